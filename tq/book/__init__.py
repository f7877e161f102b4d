"""The book itself: results and their provenance, figures, and the runner that re-executes the chapters.

Nothing here is imported by the rest of ``tq``. Submodules are imported by name (``from tq.book import results``).
"""

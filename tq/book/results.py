"""The recorder under its public name: ``from tq.book import results``, then ``results.chapter(...)``."""

from tq.book.record.results import Chapter, beside, chapter, load, record, show, value

__all__ = ["Chapter", "beside", "chapter", "load", "record", "show", "value"]

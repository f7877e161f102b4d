"""Names the notebooks that `make test` executes cell by cell: those changed since their quick run, and three more.

A chapter whose sources are those of its committed run has been executed as it stands; of these three a day take their
turn, so that each comes within a week. `make soak` executes all of them.
"""

import datetime
import sys
from collections.abc import Sequence

TURN = 3


def chosen(chapters: Sequence[str], changed: Sequence[str], day: int) -> list[str]:
    """The changed chapters, and three of the others, on the next day the next three."""
    others = [name for name in chapters if name not in changed]
    turn = {others[(TURN * day + k) % len(others)] for k in range(TURN)} if others else set()
    return [name for name in chapters if name in changed or name in turn]


def has_changed(chapter: str) -> bool:
    """Whether its committed quick run on a CPU is missing, or of other sources."""
    from tq.book import paths
    from tq.book.record.dependencies import source_hash

    recorded = paths.read_json(paths.place("results", "cpu", "quick", f"{chapter}.json", paths.root() / "data")) or {}
    return recorded.get("source_hash") != source_hash(paths.notebook(chapter), "cpu")


def main() -> None:
    from tq.book import paths

    chapters = paths.chapters()
    changed = [name for name in chapters if has_changed(name)]
    names = chosen(chapters, changed, datetime.date.today().toordinal())
    print(*(f"notebooks/{name}.ipynb" for name in names))
    rest = f"; {len(chapters) - len(names)} are as they were recorded" if len(names) < len(chapters) else ""
    print(f"notebooks: {len(changed)} changed, {len(names) - len(changed)} in turn{rest}", file=sys.stderr)


if __name__ == "__main__":
    main()

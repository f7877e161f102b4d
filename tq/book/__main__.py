"""`python -m tq.book`: re-execute chapters, compare, commit results, build the HTML.

Exit codes: 0 done; 1 a chapter failed, the build failed, `lint` found something or a request was refused; 2 a wrong
command line or another run is under way; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXAMPLES = """examples:
  python -m tq.book reproduce                              every chapter that is not up to date
  python -m tq.book reproduce distortion --profile full    one chapter, as its verdicts need it
  python -m tq.book reproduce --device cuda --jobs 2       two chapters at a time
  python -m tq.book reproduce --device cuda --profile full --minutes 9   as far as it comes; again to go on
  python -m tq.book status                                 what is committed, fresh, stale
  python -m tq.book diff                                   fresh results beside the committed ones
  python -m tq.book promote distortion                     commit-ready results and notebook of one chapter
  python -m tq.book revalidate compressed-adamw            stale results count again if a sample of runs agrees
  python -m tq.book claims --verdict partly                the claims ledger, a line a claim
  python -m tq.book claims --id S0-007 --why               how one verdict comes about
  python -m tq.book build                                  HTML of the committed book in _build/html
  python -m tq.book bench                                  throughput of the codec on this device
  python -m tq.book lint                                   measured numbers that were typed into the prose
  python -m tq.book prose distortion                       long sentences and banned phrases of a page
"""

VERDICTS = (
    "reproduced", "partly", "not reproduced", "undecided", "stated limit", "not checkable", "not measured", "not yet",
)  # fmt: skip


def _reproduce(given: argparse.Namespace) -> int:
    from tq.book.run.reproduce import reproduce

    code = reproduce(
        given.chapters, given.device, given.profile, jobs=given.jobs, force=given.force, minutes=given.minutes
    )
    if given.book and code in (0, 1):
        from tq.book.record.provenance import resolve_device
        from tq.book.site.build import build_book

        code = max(code, build_book(fresh=True, device=resolve_device(given.device), profile=given.profile))
    return code


def _status(given: argparse.Namespace) -> int:
    from tq.book.run import compare
    from tq.book.run.reproduce import select

    select(given.chapters)
    print(compare.status(given.chapters))
    return 0


def _diff(given: argparse.Namespace) -> int:
    from tq.book.run import compare
    from tq.book.run.reproduce import select

    select(given.chapters)
    rows = compare.diff(given.chapters, given.device, given.profile)
    compare.write_page(rows)
    print(compare.as_table(rows, everything=given.all))
    return 0


def _promote(given: argparse.Namespace) -> int:
    from tq.book.run import compare
    from tq.book.run.reproduce import select
    from tq.book.run.stamps import lock
    from tq.book.site import readme

    select(given.chapters)
    if given.broken_off and (len(given.chapters) != 1 or given.device is None or given.profile is None):
        raise ValueError("--broken-off goes with one CHAPTER, --device and --profile")
    with lock():
        if given.broken_off:
            rows = compare.promote_broken_off(given.chapters[0], given.device, given.profile)
        else:
            rows = compare.promote(given.chapters, given.device, given.profile, given.force)
    print(compare.as_table(rows))
    if readme.update():
        print("README.md: measured table rewritten")
    print("promoted: " + ", ".join(sorted({f"{row.chapter} ({row.device}, {row.profile})" for row in rows})))
    return 0


def _revalidate(given: argparse.Namespace) -> int:
    from tq.book.run.reproduce import select
    from tq.book.run.revalidate import revalidate
    from tq.book.run.stamps import lock

    code = 0
    with lock():
        for chapter in select(given.chapters):
            holds, said = revalidate(
                chapter, given.device, given.profile, sample=given.sample, functions=given.functions
            )
            print(f"{chapter}:\n{said}")
            code = max(code, 0 if holds else 1)
    return code


def _outcomes(given: argparse.Namespace) -> int:
    from tq.book.run import archive
    from tq.book.run.reproduce import select

    select([given.chapter])
    view = given.chapter, given.device, given.profile
    if given.way == "pack":
        print(f"{archive.place(*view)}: {archive.pack(*view)} runs")
    else:
        print("{} runs, {} of them new here".format(*archive.unpack(*view)))
    return 0


def _campaign(given: argparse.Namespace) -> int:
    from tq.book.run import campaign

    if given.list:
        print(campaign.listed())
    else:
        print(f"{campaign.run(given.run)}: to be committed")
    return 0


def _build(given: argparse.Namespace) -> int:
    from tq.book.site.build import build_book

    return build_book(fresh=given.fresh)


def _lint(given: argparse.Namespace) -> int:
    from tq.book import paths
    from tq.book.site import lint

    values = lint.recorded(paths.root() / "data") + (lint.recorded(paths.build()) if given.fresh else [])
    found = lint.lint(values)
    print("\n".join(map(str, found)) or f"no typed result among {len(values)} recorded numbers")
    return 1 if found else 0


def _prose(given: argparse.Namespace) -> int:
    from tq.book.site import prose

    found = prose.report(given.pages)
    for page in found:
        print(
            f"{page.page:24s} {page.sentences:4d} sentences, median {page.median:2d} words, "
            f"95 % at most {page.high:2d}, "
            f"{len(page.phrases)} phrases of the word list{'' if page.good else '  <-'}"
        )
        if given.pages:
            print("\n".join([*(f"  {phrase}" for phrase in page.phrases), f"  longest: {page.longest}"]))
    return 0 if all(page.good for page in found) else 1


def _readme(given: argparse.Namespace) -> int:
    from tq.book.site import readme

    print("README.md: rewritten" if readme.update() else "README.md: in step")
    return 0


def _bench(given: argparse.Namespace) -> int:
    from tq.book.run import bench

    bench.run(given.device, given.elements, given.repeats)
    return 0


def _claims(given: argparse.Namespace) -> int:
    from tq.book.claims import judge

    if given.why:
        if not given.id:
            raise ValueError("--why needs the --id of a claim, such as --id S0-007")
        print("\n\n".join(judge.why(name) for name in given.id))
    elif given.record:
        print(judge.record(given.because))
    else:
        print(judge.report(given.verdict, given.seed, given.id, given.json))
    return 0


def _clean(given: argparse.Namespace) -> int:
    from tq.book.run.clean import clean_file

    for path in given.notebooks:
        print(f"{path}: {'cleaned' if clean_file(path) else 'is clean'}")
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m tq.book",
        description="The book's own tools. A re-run writes to _build/ only; `promote` changes committed files.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    _runs(commands)
    _kept_runs(commands)
    _pages(commands)
    return top


def _runs(commands: Any) -> None:
    """Commands that execute chapters and compare what they found."""
    some = argparse.ArgumentParser(add_help=False)
    some.add_argument("chapters", nargs="*", metavar="CHAPTER", help="name of a chapter; none: all")
    view = argparse.ArgumentParser(add_help=False)
    view.add_argument("--device", choices=("cpu", "cuda"), help="only this device; default: all")
    view.add_argument("--profile", choices=("quick", "full"), help="only this profile; default: all")

    run = commands.add_parser("reproduce", parents=[some], help="re-execute chapters that are not up to date")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one")
    run.add_argument("--profile", choices=("quick", "full"), default="quick", help="default: quick, minutes on a CPU")
    run.add_argument("--jobs", type=int, default=1, metavar="N", help="chapters at the same time, sharing the cores")
    run.add_argument("--force", action="store_true", help="also chapters that are up to date, from their beginning")
    run.add_argument("--minutes", type=float, metavar="N", help="stop after so long; the next run continues")
    run.add_argument("--book", action="store_true", help="then build the HTML of what was executed")
    run.set_defaults(act=_reproduce)
    status = commands.add_parser("status", parents=[some], help="what is committed, fresh and stale, and why")
    status.set_defaults(act=_status)
    compared = commands.add_parser("diff", parents=[some, view], help="fresh results beside the committed ones")
    compared.add_argument("--all", action="store_true", help="show what is within noise as well")
    compared.set_defaults(act=_diff)
    promoted = commands.add_parser(
        "promote", parents=[some, view], help="copy fresh results to data/ and cleaned notebooks to notebooks/"
    )
    promoted.add_argument("--force", action="store_true", help="also what is stale; it stays marked as stale")
    promoted.add_argument(
        "--broken-off", action="store_true", help="what a run had recorded when it broke off; it is marked so"
    )
    promoted.set_defaults(act=_promote)
    timed = commands.add_parser("bench", help="time the codec against a copy, its reference and installed peers")
    timed.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    timed.add_argument("--elements", type=int, metavar="N", help="of a tensor; default: 2**24 on a CPU, 2**28 on a GPU")
    timed.add_argument("--repeats", type=int, default=7, metavar="N", help="turns that are timed; default: 7")
    timed.set_defaults(act=_bench)


def _kept_runs(commands: Any) -> None:
    """Commands on the finished runs that long chapters keep."""
    view = argparse.ArgumentParser(add_help=False)
    view.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    view.add_argument("--profile", choices=("quick", "full"), default="full", help="default: full")
    again = commands.add_parser(
        "revalidate", parents=[view],
        help="stale results count again if a random sample of their kept runs comes out the same today",
    )  # fmt: skip
    again.add_argument("chapters", nargs="+", metavar="CHAPTER", help="name of a chapter")
    again.add_argument("--sample", type=int, default=6, metavar="N", help="runs computed anew; default: 6")
    again.add_argument(
        "--functions", nargs="+", default=(), metavar="NAME",
        help="whose runs are sampled and count again; the rest, as of what measures time, is left to reproduce",
    )
    again.set_defaults(act=_revalidate)
    moved = commands.add_parser(
        "outcomes", parents=[view], help="finished runs of a long chapter, to and from data/outcomes"
    )
    moved.add_argument(
        "way", choices=("pack", "unpack"), help="unpack: what this code would make again is taken as made"
    )
    moved.add_argument("chapter", metavar="CHAPTER")
    moved.set_defaults(act=_outcomes)
    long = commands.add_parser(
        "campaign", help="runs of hours at GPT-2's sizes, a small file each in data/campaign: the next one, to its end"
    )
    long.add_argument("run", nargs="?", metavar="RUN", help="its name, as --list shows it; default: the next")
    long.add_argument("--list", action="store_true", help="what is finished, under way and to be done")
    long.set_defaults(act=_campaign)


def _pages(commands: Any) -> None:
    """Commands on what is read: pages, prose, claims, notebooks."""
    built = commands.add_parser("build", help="build the HTML without executing anything")
    built.add_argument("--fresh", action="store_true", help="from the last runs (device cpu, profile quick)")
    built.set_defaults(act=_build)
    linted = commands.add_parser("lint", help="find measured numbers that were typed into the prose")
    linted.add_argument("--fresh", action="store_true", help="against the results of the last runs as well")
    linted.set_defaults(act=_lint)
    prose = commands.add_parser("prose", help="length of the sentences, and phrases that the word list bans")
    prose.add_argument("pages", nargs="*", metavar="PAGE", help="to show in detail; none: every page, a line each")
    prose.set_defaults(act=_prose)
    readme = commands.add_parser("readme", help="rewrite the README's measured table from the recorded results")
    readme.set_defaults(act=_readme)
    judged = commands.add_parser(
        "claims", help="the verdict of every claim, a line each, and how many of each there are"
    )
    judged.add_argument("--verdict", choices=VERDICTS, help="only claims with this verdict")
    judged.add_argument("--seed", choices=("0", "1", "2", "3", "4", "T"), help="only claims of this document")
    judged.add_argument("--id", action="append", default=[], metavar="S0-001", help="only this claim; may be repeated")
    judged.add_argument("--why", action="store_true", help="how the verdict on each --id comes about, step by step")
    judged.add_argument("--json", action="store_true", help="with evidence, confidence and what would change it")
    judged.add_argument("--record", action="store_true", help="bring data/verdicts.json in step, and say what changed")
    judged.add_argument("--because", default="", help="with --record: why verdicts changed, where it is not results")
    judged.set_defaults(act=_claims)
    cleaned = commands.add_parser(
        "clean", help="clean executed notebooks in place (nothing is deleted; `make clean` removes what was built)"
    )
    cleaned.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK")
    cleaned.set_defaults(act=_clean)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    from tq.book.run.stamps import Busy

    try:
        code: int = given.act(given)
        return code
    except Busy as busy:
        print(busy, file=sys.stderr)
        return 2
    except (ValueError, FileNotFoundError) as error:
        # What the user can set right; everything else is a fault of ours and shows its traceback.
        print(f"{given.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    from tq.economics.terminal import run

    sys.exit(run(main))

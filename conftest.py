"""What a run says at its end: what was skipped and why, the most memory a process took.

With `--durations` it leaves in _build/ which tests were slowest and which failed, for `make test` to say at its end.

Skips are never silent: each reason is printed with what it held back, and in CI an unexpected one fails the run.
Holds for tests/ and for notebooks/ (nbval). It judges no test; what a test needs, the test says.
"""

import os
import re
import resource
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# In CI a skip passes only if its reason starts with one of these. Keep the list short: each entry is a hole.
ALLOWED_IN_CI = (
    "needs a GPU",
    "needs a network",
    "needs hosts: namespaces or token buckets are not allowed",
    "needs a git checkout",
    "needs a browser",
    "needs a stack",  # of other people's packages, that `python -m tq.lab.stacks install` fetches
    "needs AVX-512 VNNI",  # instructions that half of the machines for tests have
    "needs SLURM",
    "needs gguf",
    "needs transformers",
    "needs a pretrained model",  # that `python -m tq.infer fetch` gets
)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ").strip()


def skips(config: pytest.Config) -> list[tuple[str, str]]:
    """(test, reason) of everything that was skipped, over all workers."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return [(r.nodeid, _reason(r)) for r in reporter.stats.get("skipped", [])] if reporter else []


def unexpected_skips(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(test, reason) for test, reason in found if not reason.startswith(ALLOWED_IN_CI)]


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true", "yes")


def peak_bytes() -> int:
    """Most that this process, or one that it started and waited for, has held in memory."""
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) << 10


# Of each process that runs tests: the bytes it came to, and the tests that made it grow, each with how much.
PEAKS = pytest.StashKey[list[tuple[int, list[tuple[int, str]]]]]()
STEPS = 6  # of growth that are told
MOST_SAID = 600  # characters of what a failed test said


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PEAKS] = [(0, [])]
    if config.pluginmanager.hasplugin("nbval") and config.getoption("nbval_lax", False):
        from nbval import kernel

        kernel.start_new_kernel = twice(kernel.start_new_kernel)


def twice(start: Any) -> Any:
    """Starts a kernel anew if it died before its first word: its ports are free when they are chosen, and may be
    another program's when it opens them (jupyter/jupyter_client#487). A notebook has run nothing by then."""

    def started(*args: Any, **options: Any) -> Any:
        try:
            return start(*args, **options)
        except RuntimeError as error:
            if "died before replying" not in str(error):
                raise
            return start(*args, **options)

    return started


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    peaks = item.config.stash[PEAKS]
    before, grown = peaks[0]
    if (now := peak_bytes()) > before:
        peaks[0] = now, [*grown, (now - before, item.nodeid)]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of xdist has ended; one that crashed has not said what it took."""
    node.config.stash[PEAKS].append(tuple(getattr(node, "workeroutput", {}).get("peak", (0, []))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup`: a file that builds something once goes to one worker, or each worker would build it.

    Other tests go where there is time. Decided by the file's text: xdist 3.8's own groups are lost in pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return file if builds_once(config.rootpath / file) else nodeid

    return ByFile(config, log) if config.getoption("dist") == "loadgroup" else None


@cache
def builds_once(file: Path) -> bool:
    """Whether a fixture of this file is made once for all of its tests."""
    return re.search(r"""@pytest\.fixture\([^)]*scope=["'](module|session)["']""", file.read_text()) is not None


def slowest(config: pytest.Config, count: int) -> list[str]:
    """Lines of seconds and test, all phases of a test together, the slowest first."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    seconds: Counter[str] = Counter()
    for report in (report for reports in reporter.stats.values() for report in reports):
        seconds[getattr(report, "nodeid", "")] += getattr(report, "duration", 0.0)
    return [f"{took:8.2f} s  {test}\n" for test, took in seconds.most_common(count)]


def failed(config: pytest.Config) -> list[str]:
    """A line of each test that failed, with what it said first."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    lines = []
    for report in (*reporter.stats.get("failed", []), *reporter.stats.get("error", [])):
        crash = getattr(report.longrepr, "reprcrash", None)  # nbval and a module that does not import have none
        said = (crash.message if crash else report.longreprtext).strip()
        lines.append(f"{report.nodeid}: {' '.join(said.split())[:MOST_SAID]}\n")
    return lines


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")
    if is_worker:
        session.config.workeroutput["peak"] = session.config.stash[PEAKS][0]
    if not is_worker and in_ci() and unexpected_skips(skips(session.config)) and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    _say_what_was_skipped(terminalreporter, config)
    if count := config.getoption("durations"):
        folder, part = config.rootpath / "_build", Path(config.args[0]).parts[0]
        folder.mkdir(exist_ok=True)
        (folder / f"slowest-{part}.txt").write_text("".join(slowest(config, count)))
        (folder / f"failed-{part}.txt").write_text("".join(failed(config)))
    most, grown = max(*config.stash[PEAKS], (peak_bytes(), []), key=lambda peak: peak[0])
    terminalreporter.line(f"largest process: {most / 1e9:.1f} GB{f', in {grown[-1][1]}' if grown else ''}")
    for growth, test in sorted(grown, reverse=True)[:STEPS] if len(grown) > 1 else ():
        terminalreporter.line(f"    it grew by {growth / 1e9:.1f} GB in {test}")


def _say_what_was_skipped(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = skips(config)
    if not found:
        return
    terminalreporter.section("skipped, and why")
    bad = unexpected_skips(found) if in_ci() else []
    for reason in dict.fromkeys(reason for _, reason in found):
        tests = [test for test, other in found if other == reason]
        files = ", ".join(dict.fromkeys(test.split("::")[0] for test in tests))
        where = tests[0] if len(tests) == 1 else f"{len(tests)} tests of {files}"
        mark = "  <- not allowed in CI" if reason in [other for _, other in bad] else ""
        terminalreporter.line(f"{where}: {reason}{mark}")
    if bad:
        terminalreporter.line(f"CI: {len(bad)} skipped without a reason listed in conftest.py: the run fails", red=True)

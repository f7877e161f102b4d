"""Skips are never silent: each is printed with its reason, and in CI an unexpected one fails the run.

Holds for tests/ and for notebooks/ (nbval). It judges no test; what a test needs, the test says.
"""

import os

import pytest

# In CI a skip passes only if its reason starts with one of these. Keep the list short: each entry is a hole.
ALLOWED_IN_CI = (
    "needs a GPU",
    "needs a network",
    "needs root",
    "needs a git checkout",
    "needs a browser",
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


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker and in_ci() and unexpected_skips(skips(session.config)) and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = skips(config)
    if not found:
        return
    terminalreporter.section("skipped, and why")
    bad = unexpected_skips(found) if in_ci() else []
    for test, reason in found:
        mark = "  <- not allowed in CI" if (test, reason) in bad else ""
        terminalreporter.line(f"{test}: {reason}{mark}")
    if bad:
        terminalreporter.line(f"CI: {len(bad)} skipped without a reason listed in conftest.py: the run fails", red=True)

"""What the tests that open pages in a browser share; where there is no browser, they are skipped."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

WIDE, NARROW = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
FLAGS = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync "
    "--no-first-run --disable-default-apps"
).split()
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# What sticks out to the right, if the page scrolls sideways.
OVERFLOW = """() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  const wide = [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > width + 1);
  return [`scrolls at ${width}`, ...wide.slice(0, 5).map(e => e.outerHTML.slice(0, 120))];
}"""


def executable() -> str | None:
    """TQ_CHROMIUM, else the system's browser, else one that Playwright installed."""
    own = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright")
    fetched = sorted(own.glob("chromium-*/chrome-linux*/chrome"))
    found = [os.environ.get("TQ_CHROMIUM"), *map(shutil.which, NAMES), *map(str, fetched[-1:])]
    return next((path for path in found if path), None)


CHROMIUM = executable()
needs_browser = pytest.mark.skipif(
    CHROMIUM is None,
    reason="needs a browser: no page was opened in one (install chromium, or name one in TQ_CHROMIUM)",
)


class Visit:
    """A tab that writes down what goes wrong, and lets no request leave the disk."""

    def __init__(self, browser: Any) -> None:
        self.context = browser.new_context(viewport=WIDE, color_scheme="light")
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.context.route("**/*", self._only_files)
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self._note("error", str(error)))
        self.page.on("requestfailed", lambda request: self._note("error", f"failed: {request.url[:200]}"))

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.wrong.append(f"{kind}: {text}")

    def _only_files(self, route: Any) -> None:
        if route.request.url.startswith(("file:", "data:", "blob:")):
            route.continue_()
        else:
            self.wrong.append(f"remote: {route.request.url}")
            route.abort()

    def open(self, path: Path, query: str = "") -> Any:
        self.page.goto(path.as_uri() + query, wait_until="load")
        return self.page

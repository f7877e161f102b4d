"""A browser for all tests of a module, and a tab of it for one test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.book import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium.CHROMIUM, args=chromium.FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[chromium.Visit]:
    tab = chromium.Visit(browser)
    yield tab
    tab.context.close()

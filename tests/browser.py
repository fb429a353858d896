"""Headless Chromium of the distribution for page tests: a reason to skip without it, a failure in CI."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.waiting import LIMIT_S

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "Chromium is not installed; tests/install-browser.sh installs Debian's"


def executable() -> str:
    """Return Chromium's path; without one, skip the test, or fail it where CI=true."""
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is not None:
        return program
    if os.environ.get("CI") == "true":
        pytest.fail(MISSING)
    pytest.skip(MISSING)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a headless Chromium and close it again."""
    path = executable()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS), timeout=1000 * LIMIT_S)
        try:
            yield browser
        finally:
            browser.close()

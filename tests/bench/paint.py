"""First paint of every page in a real browser: `make bench-paint`, on a machine that does nothing else.

Each page is opened by a browser that has kept nothing, and then again by the same one, as a person does; what counts is
the browser's own entry `first-contentful-paint`, in milliseconds from the request.
"""

import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page

from tests import browser as browsers
from tests import web_world
from tests.api_stack import Api, served_api
from tests.bench.screens import signed_in
from tests.stopping import leave_when_told
from tests.web_world import WebWorld

ROUNDS = 5
LIMIT_MS = 1000
PAINTED = """() => new Promise(tell => new PerformanceObserver((list, watcher) => {
    const found = list.getEntriesByName("first-contentful-paint");
    if (found.length) { watcher.disconnect(); tell(found[0].startTime); }
}).observe({ type: "paint", buffered: true }))"""
SENT = """() => ["navigation", "resource"].flatMap(kind => performance.getEntriesByType(kind))
    .reduce((sum, entry) => sum + entry.transferSize, 0)"""
"""Bytes that came over the wire, headers included."""


def addresses(world: WebWorld) -> dict[str, str]:
    """Return the pages by name."""
    return {
        "overview": "/",
        "ablation, running": f"/a/{world.running}",
        "ablation, judged": f"/a/{world.judged}",
        "history": "/history/hybrid-tiny/psiv_cache",
        "REST interface": "/docs",
    }


def painted(page: Page, address: str) -> tuple[float, int]:
    """Open a page; return when it was first painted, in ms, and how many bytes it took."""
    page.goto(address, wait_until="load")
    return float(page.evaluate(PAINTED)), int(page.evaluate(SENT))


def measure(browser: Browser, api: Api, world: WebWorld) -> Iterator[tuple[str, list[float], list[float], int]]:
    """Yield for each page its name, its paints when new and when known, in ms, and its bytes when new."""
    for name, path in addresses(world).items():
        new, known, sizes = [], [], []
        for _ in range(ROUNDS):
            page = signed_in(browser, api)
            state = page.context.storage_state()
            page.context.close()
            context = browser.new_context(storage_state=state, viewport={"width": 1280, "height": 900})
            page = context.new_page()
            paint, size = painted(page, str(api.client.base_url) + path)
            new.append(paint)
            sizes.append(size)
            known.append(painted(page, str(api.client.base_url) + path)[0])
            context.close()
        yield name, new, known, max(sizes)


def main() -> int:
    """Print the table; end with 1 where a page is painted too late."""
    logging.disable(logging.WARNING)  # there is no broker here
    os.environ["ABLATE_CONTROL_EVERY"] = "0"  # no arm by chance
    leave_when_told()
    out = sys.stdout.write
    out(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {ROUNDS} rounds; ms\n")
    out(f"{'page':20}{'new, median':>13}{'new, worst':>13}{'known, median':>15}{'known, worst':>14}{'kB sent':>9}\n")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder, served_api("sqlite", Path(folder)) as api:
        world = web_world.fill(api)
        with browsers.chromium() as browser:
            for name, new, known, size in measure(browser, api, world):
                worst = max(worst, *new, *known)
                shown = (
                    f"{statistics.median(new):13.0f}{max(new):13.0f}{statistics.median(known):15.0f}{max(known):14.0f}"
                )
                out(f"{name:20}{shown}{size / 1000:9.1f}\n")
    out(f"worst {worst:.0f} ms; load {os.getloadavg()[0]:.1f} at the end\n")
    return 0 if worst < LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())

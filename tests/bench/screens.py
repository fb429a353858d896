"""Pictures of the pages for the documentation: `make screens` takes them of a service with something of everything.

Each is one view of a browser, in a palette, so that it stays small.
"""

import io
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page

from tests import browser as browsers
from tests import web_world
from tests.api_stack import Api, served_api
from tests.architecture.pages import ROOT
from tests.bench.screens_mlflow import pages_of_mlflow
from tests.stopping import leave_when_told
from tests.web_pages import sign_in_path
from tests.web_world import WebWorld

FOLDER = ROOT / "docs" / "screens"
COLOURS = 128
SIZE = (1100, 760)
PHONE = (390, 760)
TALL = (1100, 920)


def save(page: Page, name: str) -> Path:
    """Store what a browser shows now as docs/screens/<name>.png."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.png"
    shown = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shown.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    return path


def signed_in(browser: Browser, api: Api, *, size: tuple[int, int] = SIZE, scheme: str = "light") -> Page:
    """Return a browser's page that is signed in to operate."""
    viewport = {"width": size[0], "height": size[1]}
    page = browser.new_page(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(str(api.client.base_url) + sign_in_path(api, api.admin, operate=True))
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", name="Queue", exact=True).wait_for()
    return page


def pages_of_service(browser: Browser, api: Api, world: WebWorld) -> None:
    """Take the service's own pages."""
    at: Callable[[str], str] = lambda path: str(api.client.base_url) + path  # noqa: E731
    wide, tall, dark, phone = (
        signed_in(browser, api),
        signed_in(browser, api, size=TALL),
        signed_in(browser, api, scheme="dark"),
        signed_in(browser, api, size=PHONE),
    )
    shots = {
        "overview": (wide, "/"),
        "overview-phone": (phone, "/"),
        "ablation-live": (tall, f"/a/{world.running}"),
        "ablation-judged": (wide, f"/a/{world.judged}"),
        "ablation-judged-dark": (dark, f"/a/{world.judged}"),
        "history": (wide, "/history/hybrid-tiny/psiv_cache"),
    }
    for name, (page, path) in shots.items():
        page.goto(at(path), wait_until="load")
        print(save(page, name).relative_to(ROOT))  # noqa: T201


def page_of_decisions(browser: Browser, api: Api) -> None:
    """Take the page of an answer with a decision for every variant."""
    decided = web_world.decide(api)
    page = signed_in(browser, api)
    page.goto(f"{api.client.base_url}/a/{decided}", wait_until="load")
    print(save(page, "ablation-decided").relative_to(ROOT))  # noqa: T201


def main() -> int:
    """Take every picture."""
    os.environ["ABLATE_CONTROL_EVERY"] = "0"  # no arm by chance
    os.environ["ABLATE_QUIET_S"] = "0"
    leave_when_told()
    with tempfile.TemporaryDirectory() as folder, served_api("sqlite", Path(folder)) as api:
        world = web_world.fill(api)
        with browsers.chromium() as browser:
            pages_of_service(browser, api, world)
            page_of_decisions(browser, api)
            (in_mlflow := Path(folder) / "mlflow").mkdir()
            pages_of_mlflow(browser, in_mlflow, save)
    return 0


if __name__ == "__main__":
    sys.exit(main())

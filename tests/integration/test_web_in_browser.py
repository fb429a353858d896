"""The service's pages in a person's browser: what they show, live, by keyboard, small, dark, and without JavaScript."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect

from ablate.experiments.reporting import wording
from ablate.service.errors import Unavailable
from ablate.service.web import pages
from ablate.service.web.live_curves import live_curves
from tests import browser as browsers
from tests import web_world
from tests.acceptance.test_report_in_browser import OVERFLOWING
from tests.api_stack import Api, api_fixture, served_api
from tests.waiting import LIMIT_S
from tests.web_pages import sign_in_path
from tests.web_world import WebWorld

pytestmark = pytest.mark.browser

PATIENCE_MS = 1000 * LIMIT_S
BUDGET_BYTES = 200_000
"""Of a page with all that it loads, as sent."""
LOADED_BYTES = """() => ["navigation", "resource"].flatMap(kind => performance.getEntriesByType(kind))
    .reduce((sum, entry) => sum + entry.encodedBodySize, 0)"""
LOOK = """looks => { Object.defineProperty(document, "hidden", {value: !looks, configurable: true});
    document.dispatchEvent(new Event("visibilitychange")); }"""
"""Somebody looks at another tab, or at this one again."""
FEWER_ALIKE = """() => document.querySelectorAll(".interface section").forEach((part, place) => {
    if (place % 12 && part.querySelector("h3").id !== "submitAblation") part.remove(); })"""
"""One template makes all sections of the interface; one in twelve, and the one with examples, are looked at by axe."""
REFUSED = "Failed to load resource: the server responded with a status of "
RULES: dict[str, dict[str, Any]] = {
    "light": {
        "type": "tag",
        "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    },
    "dark": {"type": "rule", "values": ["color-contrast"]},
}
"""Of axe. What pictures draw is looked at in the tests of the pictures."""


api = api_fixture(served_api, kinds=["sqlite"], scope="module")


@pytest.fixture(scope="module")
def world(api: Api) -> WebWorld:
    return web_world.fill(api)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browsers.chromium() as browser:
        yield browser


@pytest.fixture
def visit(chromium: Browser, api: Api) -> Iterator[Callable[..., Page]]:
    """Return a function that signs a browser in; at the end no page may have complained or loaded what is foreign.

    A browser complains of every status from 400 on; a test that asks for them says so with `refused`.
    """
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def visited(*, width: int = 1280, operate: bool = False, scripts: bool = True, refused: bool = False) -> Page:
        options: dict[str, Any] = {"java_script_enabled": scripts, "reduced_motion": "reduce"}
        contexts.append(chromium.new_context(viewport={"width": width, "height": 844}, **options))
        contexts[-1].set_default_timeout(PATIENCE_MS)
        page = contexts[-1].new_page()
        page.on(
            "console", lambda message: (refused and message.text.startswith(REFUSED)) or complaints.append(message.text)
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith((base(api), "data:")) or complaints.append(asked.url))
        page.goto(base(api) + sign_in_path(api, api.admin, operate=operate))
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("heading", name="Queue", exact=True).wait_for()
        return page

    yield visited
    for context in contexts:
        context.close()
    assert complaints == []


def base(api: Api) -> str:
    return str(api.client.base_url)


def pages_of(world: WebWorld) -> dict[str, str]:
    """Return the addresses of all pages that somebody who is signed in can open, those that refuse included."""
    return {
        "overview": "/",
        "running": f"/a/{world.running}",
        "failing": f"/a/{world.failing}",
        "judged": f"/a/{world.judged}",
        "history": "/history/hybrid-tiny/psiv_cache",
        "two ablations": f"/compare?a={world.judged}&b={world.failing}",
        "which two ablations": "/compare",
        "nodes": "/nodes",
        "sessions": "/sessions",
        "session": f"/sessions/{web_world.SESSION}",
        "priority?": f"/a/{world.running}/priority",
        "cancel?": f"/a/{world.running}/cancel",
        "drain?": "/nodes/two-core/drain",
        "no such ablation": "/a/nobody",
        "no such gate": "/history/hybrid-tiny/psiv",
        "no such page": "/nothing/here",
    }


def plain(text: str) -> str:
    return text.replace(wording.SPACE, " ")


def test_the_first_page_says_what_waits_and_why_who_works_and_what_was_answered(
    api: Api, world: WebWorld, visit: Callable[..., Page]
) -> None:
    page = visit()
    queue = page.locator("#queue .card")
    assert [line.split()[0] for line in queue.all_inner_texts()] == ["loss-chunks", "compiled", "waits-for-a-gpu"]
    queue_text = plain(page.locator("#queue").inner_text())
    assert "1 of 6 blocks" in queue_text
    assert "about 8 min left" in queue_text
    assert re.search(r"a free node of class 'cpu' \(1 live, 4 blocks ahead in the queue, about \d+\smin", queue_text)
    assert queue_text.count(" ahead") == 1, "no number twice"
    assert "Waits for a live node of class 'h200'; none has registered yet." in queue_text
    nodes = plain(page.locator("#nodes").inner_text())
    assert "drained" in nodes
    assert "device 0 still holds 1.2 GiB" in nodes
    assert "Runs loss-chunks, block 2" in nodes
    assert "uncalibrated" in nodes
    assert page.get_by_role("link", name="Drain").count() == 0, "this session reads"
    answers = plain(page.locator("#answers").inner_text())
    assert "? inconclusive faster by 5.75 %" in answers
    assert "■ oom 6 of 6 trials ran out of memory" in answers
    assert "psiv_cache false \N{RIGHTWARDS ARROW} true" in answers
    assert "chunk_size 16 → 32" in answers
    assert page.locator("#answers thead th").all_inner_texts() == ["question", "change", "answer", "when"]
    page.get_by_label("Search").fill("TRAINS fastest")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url("**/?show=all&q=TRAINS+fastest")
    assert page.locator("#answers tbody").count() == 1
    page.get_by_label("Show").select_option("running")
    page.get_by_label("Search").fill("")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_url("**/?show=running&q=")
    assert page.locator("#answers tbody").count() == 3
    page.get_by_role("link", name="compiled").click()
    page.wait_for_url(f"{base(api)}/a/{world.waiting}")


def test_the_live_trial_moves_and_what_somebody_does_stays(
    api: Api, world: WebWorld, visit: Callable[..., Page]
) -> None:
    page = visit(width=390)
    page.goto(f"{base(api)}/a/{world.running}")
    page.locator("main[data-open=yes]").wait_for()
    running = page.locator("#running")
    assert "step 19 of 40" in running.inner_text()
    assert page.locator("#grid tbody tr").count() == 3
    expect(page.locator("#curves")).to_contain_text("at step 19 of block")
    live_curves.cache_clear()
    page.locator("#grid-scroll").focus()
    page.evaluate("window.kept = true")
    web_world.beat(api, world.block, range(20, 25))
    expect(running).to_contain_text("step 24 of 40", timeout=PATIENCE_MS)
    expect(page.locator("#curves")).to_contain_text("at step 24 of block", timeout=PATIENCE_MS)
    assert page.evaluate("window.kept"), "the page was not loaded again"
    assert page.evaluate("document.activeElement.id") == "grid-scroll"
    page.evaluate(LOOK, False)
    page.locator("main[data-open=no]").wait_for()
    web_world.beat(api, world.block, range(25, 27))
    page.evaluate(LOOK, True)
    page.locator("main[data-open=yes]").wait_for()
    expect(running).to_contain_text("step 26 of 40", timeout=PATIENCE_MS)


def test_the_grid_the_failures_and_their_logs_are_there(api: Api, world: WebWorld, visit: Callable[..., Page]) -> None:
    page = visit()
    page.goto(f"{base(api)}/a/{world.failing}")
    places = [page.locator(place).bounding_box() for place in ("#answer", "#deciding", "#course")]
    tops = [box["y"] for box in places if box is not None]
    assert tops == sorted(tops), "blocks and failures come after the answer"
    assert len(tops) == 3
    answers = [plain(line.inner_text()) for line in page.locator("#answer .answer > .line").all()]
    assert [line.replace("\n", " ").partition(" to ")[0] for line in answers] == [
        "psiv-on psiv_cache false →",
        "chunk-32 chunk_size 16 →",
    ]
    course = page.locator("#course > summary")
    assert "8 failures" in course.inner_text()
    course.focus()
    page.keyboard.press("Enter")
    rows = {
        row.locator("th").inner_text(): row.locator("td .quiet").all_inner_texts()
        for row in page.locator("#grid tbody tr").all()
    }
    measured = ["measured"] * 6
    assert rows == {
        "baseline": measured,
        "psiv-on": [*measured[:3], "timeout", *measured[:2]],
        "chunk-32": ["oom"] * 6,
    }
    failures = page.locator("#failures")
    assert "chunk-32, blocks 1-6" in failures.inner_text()
    assert "the node was wanted for something else" in failures.inner_text()
    failures.get_by_text("End of the log").click()
    log = failures.locator("pre").inner_text()
    assert log.endswith("CUDA error: device lost\n")
    assert log.startswith("step "), "whole lines"
    assert len(log) <= 2000


def test_the_trace_of_each_arm_can_be_downloaded(api: Api, world: WebWorld, visit: Callable[..., Page]) -> None:
    page = visit(refused=True)
    page.goto(f"{base(api)}/a/{world.judged}")
    assert page.get_by_role("heading", name="Where a step spends its time and memory").is_visible()
    links = page.get_by_role("link", name="Trace of")
    assert links.all_inner_texts() == ["Trace of baseline", "Trace of psiv-on", "Trace of chunk-32"]
    with page.expect_download() as started:
        page.get_by_role("link", name="Trace of psiv-on").click()
    assert started.value.suggested_filename == "psiv-on.trace.json"
    events = json.loads(started.value.path().read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2
    page.goto(f"{base(api)}/a/{world.judged}/traces/nobody.json")
    assert "arms with one: " in page.inner_text("main")


def test_nodes_are_compared_with_reasons_and_versions(api: Api, world: WebWorld, visit: Callable[..., Page]) -> None:
    page = visit()
    page.get_by_role("link", name="Nodes", exact=True).click()
    busy = plain(page.locator("#nodes").inner_text())
    assert "Load: 1 of 64 devices busy; other processes took 2 % of the CPU time during its last trial" in busy
    assert "Runs loss-chunks, block 2" in busy
    results = page.get_by_role("region", name="Lanes and back ends on h100")
    rows = [row.inner_text().split("\t") for row in results.get_by_role("row").all()]
    assert rows[0] == ["node", "health", "cuda", "peer", "loss=quack", "attention=fa4", "attention=flex"]
    assert [plain(cell) for cell in rows[1][2:]] == 5 * ["✓ works"]
    assert [plain(cell) for cell in rows[2][2:]] == ["✓ works", "○ refused", "✗ crashes", "○ refused", "✗ wrong"]
    reasons = page.get_by_role("region", name="What does not work on h100").inner_text()
    assert "attention 'fa4' needs the package flash-attn-4" in reasons
    assert "Different between these nodes: driver and flash-attn-4." in page.locator("main").inner_text()


def test_two_ablations_stand_side_by_side(api: Api, world: WebWorld, visit: Callable[..., Page]) -> None:
    page = visit()
    page.goto(f"{base(api)}/a/{world.judged}")
    page.get_by_role("link", name="Beside another ablation").click()
    page.locator("select[name=b]").select_option(world.failing)
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("heading", name="Conditions").wait_for()
    answers, conditions, settings = (page.locator(".table").nth(place) for place in range(3))
    lines = [plain(line) for line in answers.locator("tbody tr").all_inner_texts()]
    assert [line.split()[0] for line in lines] == ["psiv-on", "chunk-32"]
    assert "inconclusive" in lines[0]
    assert "timeout" in lines[0]
    assert "oom" in lines[1]
    by_name = {line.split("\t")[0]: line.split("\t")[1:] for line in conditions.locator("tbody tr").all_inner_texts()}
    assert by_name["question"] == [
        "Does caching PsiV or a larger chunk raise throughput?",
        "Which chunk size trains fastest?",
    ]
    assert "Alike in both: node class: cpu; state: completed" in conditions.inner_text()
    assert settings.locator("thead").count() == 0, "no empty table"
    assert "The baselines have equal settings." in settings.inner_text()
    assert "Nothing here is a test of one against the other." in answers.inner_text()


def test_an_end_brings_the_report(api: Api, visit: Callable[..., Page]) -> None:
    made = api.submit(ablation="soon-over", limits={"priority": 100})
    node = api.register("quick")
    page = visit()
    page.goto(f"{base(api)}/a/{made['id']}")
    page.locator("main[data-open=yes]").wait_for()
    for _ in range(6):
        web_world.report(api, api.claimed(node), node, ablation="soon-over", limits={"priority": 100})
    web_world.settle(api)
    page.locator("#answer").wait_for()
    assert page.locator("main[data-events]").count() == 0, "nothing is left to wait for"
    page.locator("summary", has_text="Tables behind the answer").click()
    titles = page.locator("#answer details.more", has_text="Tables behind the answer").locator("> .table > h3")
    assert titles.count() > 1
    assert all(title.is_visible() for title in titles.all()), "tables beside each other need their titles"


@pytest.mark.parametrize("scripts", [True, False])
def test_an_operator_is_asked_before_anything_happens(api: Api, visit: Callable[..., Page], scripts: bool) -> None:
    page = visit(operate=True, scripts=scripts)
    api.register("node-9")
    page.goto(base(api))
    page.get_by_role("link", name="Drain node-9").focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Drain node-9?").wait_for()
    page.get_by_role("link", name="No, go back").click()
    page.get_by_role("link", name="Drain node-9").click()
    page.get_by_role("button", name="Drain node-9").focus()
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Resume node-9").click()
    page.get_by_role("button", name="Resume node-9").click()
    page.get_by_role("link", name="Drain node-9").wait_for()
    made = api.submit(ablation="not-wanted")["id"]
    page.goto(f"{base(api)}/a/{made}")
    page.get_by_role("link", name="Priority").click()
    page.get_by_label("Priority").fill("3")
    page.keyboard.press("Enter")
    page.get_by_text("priority 3").first.wait_for()
    page.get_by_role("link", name="Cancel").click()
    page.get_by_role("button", name="Cancel not-wanted").click()
    page.get_by_text("cancelled").first.wait_for()
    assert api.get(f"/v1/ablations/{made}").json()["state"] == "cancelled"
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="Signed out").wait_for()


def check_page(page: Page, name: str) -> None:
    """See that a page has no barrier, fits a phone and is light."""
    assert 1000 < page.evaluate(LOADED_BYTES) < BUDGET_BYTES, name
    page.evaluate("() => document.querySelectorAll('details').forEach(part => { part.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
    assert page.evaluate(OVERFLOWING) == [], name
    page.evaluate(FEWER_ALIKE)
    for scheme, rules in RULES.items():
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        barriers = Axe().run(page, context={"exclude": [["figure svg"]]}, options={"runOnly": rules})
        assert barriers.violations_count == 0, f"{name}, {scheme}: {barriers.generate_report()}"


def test_no_page_has_a_barrier_or_overflows_or_is_heavy(
    api: Api, world: WebWorld, visit: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit(width=390, operate=True, refused=True)
    for name, path in pages_of(world).items():
        page.goto(base(api) + path, wait_until="load")
        check_page(page, name)
    for error, message in ((RuntimeError("ours"), "Internal Server Error"), (Unavailable(), "Service Unavailable")):
        monkeypatch.setattr(pages, "overview", raising(error))
        page.goto(base(api))
        assert page.get_by_role("heading", name=message).is_visible()
        check_page(page, message)
    monkeypatch.undo()
    page.goto(base(api))
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="Signed out").wait_for()
    check_page(page, "signed out")
    page.goto(base(api))
    check_page(page, "sign in first")
    page.goto(base(api) + sign_in_path(api, api.admin))
    check_page(page, "sign in")


def raising(error: Exception) -> Callable[..., None]:
    def raised(*_: object) -> None:
        raise error

    return raised


def test_a_history_begins_with_what_was_answered_on_a_small_screen_too(
    api: Api, world: WebWorld, visit: Callable[..., Page]
) -> None:
    page = visit(width=390)
    page.goto(f"{base(api)}/history/hybrid-tiny/psiv_cache")
    table = page.locator("table").first
    assert table.locator("thead th").all_inner_texts()[:4] == ["value", "answer", "decision", "workload"]
    box = table.locator("thead th").nth(2).bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 390, "the decision is on the screen"
    assert " of 256 tokens" in table.locator("tbody tr").first.inner_text()


def test_what_a_session_may_not_do_is_said_on_a_page(api: Api, world: WebWorld, visit: Callable[..., Page]) -> None:
    page = visit(width=390, refused=True)
    page.goto(f"{base(api)}/a/{world.running}/cancel")
    assert page.get_by_role("heading", name="Forbidden").is_visible()
    check_page(page, "forbidden")


def test_pages_say_the_same_without_javascript(api: Api, world: WebWorld, visit: Callable[..., Page]) -> None:
    page = visit(scripts=False)
    page.goto(f"{base(api)}/a/{world.running}")
    assert page.locator("#grid tbody tr").count() == 3
    assert page.locator("#curves svg[role=img]").count() == 2
    assert "reload this page" in page.locator("#live-state").inner_text()

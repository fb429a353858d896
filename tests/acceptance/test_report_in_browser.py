"""The report as a person's browser shows it: light, dark, on a phone and on paper, without errors or overflow."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from ablate.experiments.outcomes import AblationState
from ablate.experiments.reporting.pages import report
from ablate.experiments.reporting.pictures import registry
from ablate.experiments.reporting.view import AblationView
from tests import browser as browsers
from tests import views

pytestmark = pytest.mark.browser
Open = Callable[..., Page]

VIEWS: dict[str, Callable[[], AblationView]] = {
    "h200": lambda: views.traced(views.view(val_every=5)),
    "cpu": views.cpu_view,
    "exact": lambda: views.view(primary="peak_allocated_gib", calibrated=False),
    "running": lambda: views.unfinished(AblationState.RUNNING, done_blocks=2),
    "queued": lambda: views.unfinished(AblationState.QUEUED),
}

OVERFLOWING = """() => [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, pre, .skip')
    && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
OUTSIDE_THEIR_PICTURE = """() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter(text => {
        const own = text.getBoundingClientRect();
        return own.left < box.left - 1 || own.right > box.right + 1
            || own.top < box.top - 1 || own.bottom > box.bottom + 1;
    }).map(text => text.textContent);
})"""
UNFOLD = "() => document.querySelectorAll('details').forEach(part => { part.open = true; })"
OVERLAPPING = """() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
    const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    const meet = (p, q) => Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1
        && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 3;
    return texts.flatMap(([a, p], i) => texts.slice(i + 1).filter(([, q]) => meet(p, q)).map(([b]) => [a, b]));
})"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browsers.chromium() as browser:
        yield browser


@pytest.fixture
def open_report(chromium: Browser, tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens a view's report; at the end no page may have complained or left its file."""
    complaints: list[str] = []
    pages: list[Page] = []

    def opened(view: AblationView, *, width: int = 1200, scheme: str = "light") -> Page:
        file = tmp_path / f"report-{len(pages)}.html"
        file.write_text(report.render(view))
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: asked.url == file.as_uri() or complaints.append(asked.url[:200]))
        page.goto(file.as_uri())
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert [text for text in complaints if not text.startswith("data:,")] == []


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("width", [390, 820, 1200])
def test_nothing_overflows_or_overlaps(open_report: Open, name: str, width: int) -> None:
    page = open_report(VIEWS[name](), width=width)
    for unfold in ("() => null", UNFOLD):
        page.evaluate(unfold)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OVERFLOWING) == []
        assert page.evaluate(OUTSIDE_THEIR_PICTURE) == []
        assert page.evaluate(OVERLAPPING) == []


def test_twelve_variants_are_all_seen_beside_each_other(open_report: Open) -> None:
    arms = {name.ljust(12, "x") if name != "baseline" else name: own for name, own in views.many(12).items()}
    page = open_report(views.cpu_view(arms=arms), width=1280)
    page.evaluate(UNFOLD)
    wider = "() => [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
    assert page.locator("thead th").get_by_text("v11xxxxxxxxx").count() >= 2
    assert page.evaluate(wider) == 0


def test_the_answer_and_every_picture_are_there(open_report: Open) -> None:
    page = open_report(views.traced(views.view(val_every=5)))
    assert page.title() == "psiv-cache \N{EN DASH} ablation report"
    assert (
        page.locator("h1").inner_text() == "Does caching PsiV raise step throughput without costing headroom or loss?"
    )
    assert page.locator(".lead").inner_text().startswith("Adopt psiv-on")
    assert page.locator(".answer").count() == 4
    page.evaluate(UNFOLD)
    tables = page.locator("main table")
    assert tables.count() >= 8
    figures = page.locator("figure svg")
    assert figures.count() == len(registry.DRAWN) - 1, "no program logged a curve"
    for i in range(figures.count()):
        box = figures.nth(i).bounding_box()
        assert box is not None
        assert box["width"] > 300
        assert box["height"] > 80
        assert figures.nth(i).get_by_text("base").count() + figures.nth(i).get_by_text("psiv-on").count() > 0
    assert page.locator("figure [role=img]").first.get_attribute("aria-labelledby") == "forest-title forest-desc"


def test_the_evidence_is_one_click_from_the_top(open_report: Open) -> None:
    page = open_report(views.view())
    evidence = page.locator("#calibrations")
    assert page.evaluate("window.scrollY") == 0
    page.locator(".glance a", has_text="yes").click()
    box = evidence.bounding_box()
    assert box is not None
    assert -1 < box["y"] < 900


def test_an_exact_answer_is_drawn_without_intervals(open_report: Open) -> None:
    page = open_report(VIEWS["exact"]())
    assert page.locator(".lead").inner_text().startswith("Do not adopt")
    caption = page.locator("#picture-forest figcaption").inner_text()
    assert "there is no interval" in caption
    assert page.locator(".answer", has_text="102.70").count() > 0


def test_dark_mode_changes_page_and_pictures(open_report: Open) -> None:
    ink = "getComputedStyle(document.querySelector('#picture-forest svg text')).fill"
    paper = "getComputedStyle(document.body).backgroundColor"
    light = open_report(views.cpu_view(), scheme="light")
    dark = open_report(views.cpu_view(), scheme="dark")
    assert light.evaluate(paper) == "rgb(255, 255, 255)"
    assert dark.evaluate(paper) == "rgb(21, 24, 28)"
    assert light.evaluate(ink) != dark.evaluate(ink)
    dark.emulate_media(media="print")
    assert dark.evaluate(paper) == "rgb(255, 255, 255)"


def test_it_prints_with_its_receipts(open_report: Open) -> None:
    page = open_report(views.cpu_view(), scheme="dark")
    assert page.locator("#receipts").is_visible() is False
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 40_000
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 690, "height": 1000})
    assert page.locator("#receipts").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 690


def test_markup_in_names_stays_text(open_report: Open) -> None:
    page = open_report(views.hostile())
    assert page.locator("h1").inner_text() == views.HOSTILE
    assert page.evaluate("document.querySelectorAll('script, img, iframe, a[href^=\"http\"]').length") == 0


MANY = {
    "baseline": views.Effect(),
    **{
        f"variant-{n}": views.Effect(
            speed_pct=n - 5.0,
            gates={"chunk_size": (16, 32, 64)[n % 3], "psiv_cache": n % 2 == 0, "compile": n >= 6, "loss": "chunked"},
        )
        for n in range(12)
    },
}


def many() -> AblationView:
    return views.view(arms=MANY, num_blocks=40, timed=4)


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_first_screen_answers(open_report: Open, width: int, height: int) -> None:
    page = open_report(views.view(), width=width)
    page.set_viewport_size({"width": width, "height": height})
    lines = page.locator(".answer .line")
    boxes = [lines.nth(i).bounding_box() for i in range(lines.count())]
    assert all(box is not None and box["y"] + box["height"] <= height for box in boxes)
    answer = page.locator("#answer").inner_text()
    assert "faster by 2.44" in answer.replace("\N{NO-BREAK SPACE}", " ")
    assert "tokens/s" in answer
    if width > height:
        forest = page.locator("#picture-forest svg").bounding_box()
        assert forest is not None
        assert forest["y"] + forest["height"] <= height
        assert page.locator(".warnings").bounding_box()["y"] < height  # type: ignore[index]


def test_twelve_variants_over_forty_blocks_fit_and_are_sorted(open_report: Open) -> None:
    page = open_report(many(), width=1280)
    assert page.evaluate("document.documentElement.scrollHeight") <= 8000
    lines = page.locator(".answer .line")
    assert lines.count() == 12
    last = lines.nth(11).bounding_box()
    assert last is not None
    assert last["y"] + last["height"] <= 900
    assert lines.nth(0).inner_text().startswith("variant-11")
    assert lines.nth(11).inner_text().startswith("variant-0")
    assert page.evaluate(OVERFLOWING) == []

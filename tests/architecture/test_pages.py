import re
from pathlib import Path

import pytest
import yaml
from pydantic_settings import BaseSettings

from ablate.service.settings import ServiceSettings
from ablate.workers.settings import Settings
from tests.architecture import pages
from tests.chaos.receipt import Outcome, write_receipt

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
DOCUMENTS = sorted(
    path.relative_to(pages.ROOT).as_posix()
    for path in [
        *pages.ROOT.glob("*.md"),
        *(pages.ROOT / "docs").glob("*.md"),
        *(pages.ROOT / "docs/why").glob("*.md"),
        *(pages.ROOT / "docs/published").glob("*.md"),
        *(pages.ROOT / "docs/receipts").glob("**/*.md"),
        *(pages.ROOT / "docker").glob("**/*.md"),
    ]
)
RECEIPTS = sorted(path.name for path in (pages.ROOT / "docs/receipts").iterdir() if path.is_dir())
WORDS_OF_A_RECEIPT = 200
WORDS_OF_THE_LOG = 3000


@pytest.mark.parametrize("name", pages.PAGES)
def test_generated_page_matches_the_code(name: str) -> None:
    assert (pages.ROOT / name).read_text(encoding="utf-8") == pages.PAGES[name](), "run `make docs`"


def links(name: str) -> list[tuple[Path, str]]:
    """Return the files and headings of this repository that a page links to."""
    document = pages.ROOT / name
    pairs = LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8")))
    return [
        ((document.parent / target).resolve() if target else document, heading)
        for target, heading in pairs
        if "://" not in target
    ]


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them; equal headings get numbers."""
    anchors: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        plain = LINK.sub(lambda link: link[0][1:].partition("]")[0], title).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = next(number for number in range(99) if f"{anchor}-{number}".removesuffix("-0") not in anchors)
        anchors.add(f"{anchor}-{number}".removesuffix("-0"))
    return anchors


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files_and_headings_that_exist(name: str) -> None:
    targets = links(name)
    assert [path for path, _ in targets if not path.exists()] == []
    assert [
        (path.name, heading)
        for path, heading in targets
        if heading and path.suffix == ".md" and heading not in headings(path)
    ] == []


@pytest.mark.parametrize("name", RECEIPTS)
def test_a_receipt_is_short_and_a_page_names_it(name: str) -> None:
    text = (pages.ROOT / "docs/receipts" / name / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= WORDS_OF_A_RECEIPT
    readers = [page for page in DOCUMENTS if "receipts/" not in page]
    assert any(f"receipts/{name}/" in (pages.ROOT / page).read_text(encoding="utf-8") for page in readers)


def test_the_log_is_short() -> None:
    assert len((pages.ROOT / "docs/LOG.md").read_text(encoding="utf-8").split()) <= WORDS_OF_THE_LOG


def test_every_setting_and_every_error_says_what_it_is() -> None:
    rows = [row for name in ("docs/settings.md", "docs/errors.md") for row in pages.PAGES[name]().splitlines()]
    assert [row for row in rows if row.startswith("| `") and row.rstrip(" |").endswith("`")] == []


def test_everything_that_the_compose_file_lets_people_set_is_explained() -> None:
    text = (pages.ROOT / "docs/operate.md").read_text(encoding="utf-8") + pages.PAGES["docs/settings.md"]()
    asked = set(re.findall(r"(?<!\$)\$\{(\w+)", (pages.ROOT / "compose.yaml").read_text(encoding="utf-8")))
    assert asked
    assert {name for name in asked if f"`{name}" not in text} == set()


SET_OTHERWISE = {
    "api": {
        *(
            "ABLATE_HOME",
            "ABLATE_HOST",
            "ABLATE_GATEWAY",
            "ABLATE_PORT",
        ),  # fixed in the image; ABLATE_PUBLISH opens another port
        *("ABLATE_DATABASE_URL", "ABLATE_BROKER_URL", "ABLATE_MLFLOW_URL", "ABLATE_ADMIN_TOKEN"),  # files of secrets
        "ABLATE_WORKER_TOKEN",  # a file of a secret
        *("ABLATE_GENERATE_TOKENS", "ABLATE_RESTART_PAUSE_S", "ABLATE_FORWARD_MLFLOW"),  # of the embedded stack
    },
    "worker-cpu": {
        *("ABLATE_HOME", "ABLATE_WORKER_TOKEN", "ABLATE_BROKER_URL"),
        *("ABLATE_EXIT_WHEN_IDLE", "ABLATE_UNTIL", "ABLATE_MAX_BLOCKS"),  # a worker that ends is started again
        *("ABLATE_ENROLMENT_TOKEN", "ABLATE_ALLOCATION"),  # its key is a file of a secret
    },
}
"""Documented settings that people cannot set for a container through .env, and why."""


@pytest.mark.parametrize(
    ("service", "settings"), [("api", ServiceSettings), ("background", ServiceSettings), ("worker-cpu", Settings)]
)
def test_the_compose_file_passes_every_documented_setting(service: str, settings: type[BaseSettings]) -> None:
    composed = yaml.safe_load((pages.ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    text = (pages.ROOT / "docs/operate.md").read_text(encoding="utf-8")
    documented = {f"ABLATE_{name.upper()}" for name in settings.model_fields}
    otherwise = SET_OTHERWISE["worker-cpu" if settings is Settings else "api"]
    passed = set(composed[service]["environment"])
    elsewhere = {name for name in passed - documented if f"`{name}`" in text}
    assert passed | otherwise == documented | elsewhere, "a setting is missing in compose.yaml, or unknown"
    assert passed & otherwise == set()


def test_the_mlflow_image_is_given_what_it_asks_for() -> None:
    asked = set(
        re.findall(r'^    "(\w+)": "', (pages.ROOT / "docker/mlflow/server.py").read_text(encoding="utf-8"), re.M)
    )
    composed = (pages.ROOT / "compose.yaml").read_text(encoding="utf-8")
    assert asked
    assert {name for name in asked if f"{name}: " not in composed} == set()


def test_every_glossary_word_of_the_product_is_explained() -> None:
    glossary = (pages.ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").lower()
    words = ["gate", "ablation", "arm", "block", "trial", "attempt", "node", "receipt", "verdict", "lane"]
    assert [word for word in words if f"**{word}**" not in glossary] == []


def test_the_receipt_of_a_run_of_chaos_is_short(tmp_path: Path) -> None:
    faults = [{"kind": "kill", "target": f"part:{number}"} for number in range(200)]
    outcome = Outcome("sqlite", "1", 200, ["a problem"] * 50, [1.0] * 100, {"receipts": 3}, faults)
    write_receipt(tmp_path, [outcome, outcome])
    assert len((tmp_path / "README.md").read_text(encoding="utf-8").split()) <= WORDS_OF_A_RECEIPT
    assert (tmp_path / "details.md").read_text(encoding="utf-8").count("a problem") == 100

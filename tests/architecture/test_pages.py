import re

import pytest
import yaml
from pydantic_settings import BaseSettings

from service.settings import ServiceSettings
from tests.architecture import pages
from workers.settings import Settings

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
DOCUMENTS = sorted(
    path.relative_to(pages.ROOT).as_posix()
    for path in [
        *pages.ROOT.glob("*.md"),
        *(pages.ROOT / "docs").glob("*.md"),
        *(pages.ROOT / "docs/why").glob("*.md"),
        *(pages.ROOT / "docker").glob("*.md"),
    ]
)


@pytest.mark.parametrize("name", pages.PAGES)
def test_generated_page_matches_the_code(name: str) -> None:
    assert (pages.ROOT / name).read_text(encoding="utf-8") == pages.PAGES[name](), "run `make docs`"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files_that_exist(name: str) -> None:
    document = pages.ROOT / name
    targets = [target for target in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in target]
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert missing == []


def test_every_setting_and_every_error_says_what_it_is() -> None:
    rows = [row for name in ("docs/settings.md", "docs/errors.md") for row in pages.PAGES[name]().splitlines()]
    assert [row for row in rows if row.startswith("| `") and row.rstrip(" |").endswith("`")] == []


def test_everything_that_the_compose_file_lets_people_set_is_explained() -> None:
    told = (pages.ROOT / "docs/operate.md").read_text(encoding="utf-8") + pages.PAGES["docs/settings.md"]()
    asked = set(re.findall(r"(?<!\$)\$\{(\w+)", (pages.ROOT / "compose.yaml").read_text(encoding="utf-8")))
    assert asked
    assert {name for name in asked if f"`{name}" not in told} == set()


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
    "worker-cpu": {"ABLATE_HOME", "ABLATE_WORKER_TOKEN", "ABLATE_BROKER_URL"},
}
"""Documented settings that people cannot set for a container through .env, and why."""


@pytest.mark.parametrize(
    ("service", "settings"), [("api", ServiceSettings), ("background", ServiceSettings), ("worker-cpu", Settings)]
)
def test_the_compose_file_passes_every_documented_setting(service: str, settings: type[BaseSettings]) -> None:
    composed = yaml.safe_load((pages.ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    told = (pages.ROOT / "docs/operate.md").read_text(encoding="utf-8")
    documented = {f"ABLATE_{name.upper()}" for name in settings.model_fields}
    otherwise = SET_OTHERWISE["worker-cpu" if settings is Settings else "api"]
    passed = set(composed[service]["environment"])
    elsewhere = {name for name in passed - documented if f"`{name}`" in told}
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

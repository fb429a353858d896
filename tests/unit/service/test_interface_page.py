"""The page of the REST interface holds all of the OpenAPI document, and its lines for the shell say what it asks."""

import html
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from service.web.html import render
from service.web.interface_page import describe
from tests.golden.freeze_openapi import document

DOCUMENT = document()


@pytest.fixture(scope="module")
def page() -> str:
    return render("docs.html", interface=describe(DOCUMENT), visitor=None)


@pytest.fixture(scope="module")
def said(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", page.replace("<br>", " ").replace("<dl", " <dl"))).split())


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, asked in methods.items():
            yield method.upper(), path, asked


def words(value: Any, *keys: str) -> Iterator[str]:
    """Yield the texts under these keys, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in keys and isinstance(inner, str):
                yield inner
            yield from words(inner, *keys)
    elif isinstance(value, list):
        for inner in value:
            yield from words(inner, *keys)


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every schema with fields, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get("properties"), dict) and value.get("type") == "object":
            yield value
        for inner in value.values():
            yield from objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from objects(inner)


def test_what_is_below_an_ablation_stands_under_ablations() -> None:
    subjects = {subject.name: subject.operations for subject in describe(DOCUMENT).subjects}
    below = [path for _, path, _ in operations() if path.startswith("/v1/ablations/{")]
    assert "/v1/ablations/{ablation_id}/spec" in below
    assert {one.path for one in subjects["ablations"]} >= set(below)
    assert not [one.path for name, own in subjects.items() if name != "ablations" for one in own if one.path in below]


def section(page: str, name: str) -> str:
    """Return one section as people read it."""
    text = page.partition(f'<section aria-labelledby="{name}">')[2].partition("</section>")[0]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def test_every_operation_is_there_with_its_parameters_bodies_and_answers(page: str) -> None:
    for method, path, asked in operations():
        text = section(page, asked["operationId"])
        assert f"{method} {path}" in text
        for parameter in asked.get("parameters", ()):
            needed = "required" if parameter.get("required") else "optional"
            assert f"{parameter['name']} {parameter['in']}, {needed}" in text
        for kind in asked.get("requestBody", {}).get("content", ()):
            assert f"Body {kind} :" in text
        for status in asked["responses"]:
            assert re.search(rf"\b{status}\b", text), (asked["operationId"], status)


def test_every_type_is_there_with_all_its_fields(page: str) -> None:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        text = section(page, f"type-{name}")
        for field in schema.get("properties", {}):
            needed = "required" if field in schema.get("required", ()) else "optional"
            assert f"{field} {needed}" in text, name
        for value in schema.get("enum", ()):
            assert str(value) in text


def test_every_description_and_limit_is_said(said: str) -> None:
    named = {name for schema in objects(DOCUMENT["components"]["schemas"]) for name in schema["properties"]}
    assert all(f"{name} required" in said or f"{name} optional" in said for name in named)
    for key in ("description", "pattern"):
        for text in set(words(DOCUMENT["components"], key)) - set(
            words(DOCUMENT["components"]["securitySchemes"], key)
        ):
            assert " ".join(text.replace("`", "").split()) in said.replace("`", ""), text


def test_links_lead_to_what_is_on_the_page(page: str) -> None:
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)


@pytest.mark.parametrize(
    ("method", "path", "asked"), list(operations()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_line_for_the_shell_asks_for_that(page: str, method: str, path: str, asked: dict[str, Any]) -> None:
    found = describe(DOCUMENT)
    line = next(one.curl for group in found.subjects for one in group.operations if one.id == asked["operationId"])
    given = shlex.split(line)
    assert given[0] == "curl"
    assert (given[given.index("-X") + 1] if "-X" in given else "GET") == method
    assert re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(f"$ABLATE_URL{path}")), given[-1].partition("?")[0])
    assert any(word.startswith("Authorization: Bearer ") for word in given) == bool(asked.get("security"))
    assert ("--data-binary" in given) == ("requestBody" in asked)
    needed = [one["name"] for one in asked.get("parameters", ()) if one.get("required") and one["in"] == "header"]
    assert all(any(word.startswith(f"{name}: ") for word in given) for name in needed)

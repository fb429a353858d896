"""The alerts for Prometheus name metrics, labels and values that this service really has, and their page names them."""

import re
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ablate.experiments.outcomes import AttemptState, BlockState
from ablate.service.lifecycle import OutboxKind
from ablate.service.store import leaders
from tests.api_stack import running_api
from tests.architecture.pages import ROOT

RULES = ROOT / "docker" / "prometheus-rules.yml"
PAGE = ROOT / "docs" / "watch.md"
OF_PROMETHEUS = {"up": {"job", "instance"}}
ADDED = {"job", "instance"}
"""Labels that the scrape adds."""
FUNCTIONS = {"sum", "min", "max", "rate", "delta", "max_over_time", "histogram_quantile"}
WORDS = {"by", "on", "and"}
VALUES: dict[tuple[str, str], set[str]] = {
    ("ablate_blocks", "state"): set(BlockState),
    ("ablate_attempts", "state"): set(AttemptState),
    ("ablate_outbox_oldest_seconds", "kind"): set(OutboxKind),
    ("ablate_duty_held", "duty"): set(leaders.DUTIES),
    ("ablate_nodes", "health"): {"live", "silent"},
    ("ablate_dependency_up", "dependency"): {"database", "writes", "background", "broker", "mlflow", "projection"},
}


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, set[str]]]:
    """Sample names of a service that has done a little of everything, with their labels and values."""
    values: dict[str, dict[str, set[str]]] = {}
    with running_api("sqlite", tmp_path_factory.mktemp("alerts")) as api:
        api.submit()
        node = api.register()
        block = api.claimed(node)
        api.attempt(block, "report", failure_class="crash", message="it broke")
        api.client.get("/nowhere")
        text = api.client.get("/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = values.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return values


def _selectors(expression: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Metric names in an expression, with their label matchers."""
    bare = re.sub(r"\b(by|on)\s*\([^)]*\)|\[\d+[smhd]\]", "", expression)
    named = re.findall(r"\b([a-z_][a-z0-9_]*)\b(?:\s*\{([^}]*)\})?(?!\s*\()", re.sub(r"\d+e\d+", "", bare))
    matchers = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
    return [(name, matchers.findall(inner)) for name, inner in named if name not in FUNCTIONS | WORDS]


@pytest.mark.parametrize("rule", _rules(), ids=lambda rule: rule["alert"])
def test_every_alert_can_fire(rule: dict[str, Any], metrics: dict[str, dict[str, set[str]]]) -> None:
    selectors = _selectors(rule["expr"])
    assert selectors
    for name, matchers in selectors:
        labels = OF_PROMETHEUS.get(name) or set(metrics[name]) | ADDED
        assert {label for label, _, _ in matchers} <= labels, name
        for label, sign, value in matchers:
            possible = VALUES.get((name, label), set())
            if sign in ("=", "=~") and label not in ADDED and possible:
                assert all(one in possible for one in value.split("|")), f"{name}: {label} is never {value}"
    grouped = re.findall(r"\bby\s*\(([^)]*)\)", rule["expr"])
    known = set().union(*(set(metrics.get(name, {})) | ADDED for name, _ in selectors))
    assert {label.strip() for group in grouped for label in group.split(",")} <= known


def test_the_labels_that_alerts_ask_for_have_these_values(metrics: dict[str, dict[str, set[str]]]) -> None:
    for (name, label), possible in VALUES.items():
        assert metrics[name][label] <= possible, name
    for name in ("ablate_dependency_up", "ablate_duty_held", "ablate_nodes"):
        label = {"ablate_dependency_up": "dependency", "ablate_duty_held": "duty", "ablate_nodes": "health"}[name]
        assert metrics[name][label] == VALUES[name, label]


@pytest.mark.parametrize("rule", _rules(), ids=lambda rule: rule["alert"])
def test_every_alert_is_said_and_explained(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    kept = set(re.findall(r"\bby\s*\(([^)]*)\)", rule["expr"]))
    assert used <= kept | {"instance"}
    assert f"`{rule['alert']}`" in PAGE.read_text()
    assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))


def test_the_page_names_no_alert_that_is_not_there() -> None:
    assert set(re.findall(r"`(Ablate\w+)`", PAGE.read_text())) == {rule["alert"] for rule in _rules()}

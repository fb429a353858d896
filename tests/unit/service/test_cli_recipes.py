"""`ablate catalog recipes`, and what `ablate catalog gates` says of an arm that does not name a gate."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from ablate.experiments.design.arms import Arm, resolve
from ablate.experiments.design.gate import read_field, show
from ablate.experiments.design.gates import GATES
from ablate.experiments.design.listings import public_gates, public_recipes
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.recipes import OVERRIDES, RECIPES
from ablate.experiments.errors import SpecError
from ablate.kernels.backends import NODE_CLASSES
from ablate.service.cli.commands.catalog import gates
from ablate.service.cli.commands.catalog.gates import with_recipes
from ablate.service.cli.commands.catalog.recipes import app
from tests.factories import spec_values

ROWS = {row.name: row for row in public_recipes()}


def recipes(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.stderr
    return done.stdout


def baseline(recipe: str, node_class: str, **overrides: Any) -> Arm:
    """Return the arm of a spec that names no gate but the lane, and that only where the recipe's does not run."""
    lanes = NODE_CLASSES[node_class].lanes
    named = {} if RECIPES[recipe].config.model.scan.lane in lanes else {"gates": {"lane": lanes[0].value}}
    values = spec_values(baseline=named, variants={"other": {"gates": {"loss": "chunked"}}})
    values["workload"] |= {"recipe": recipe, "overrides": overrides}
    values["placement"] = {"node_class": node_class}
    resolved = resolve(parse_spec(json.dumps(values).encode(), "application/json"))
    assert resolved.problems == ()
    return resolved.arms[0]


@pytest.mark.parametrize("name", RECIPES)
def test_the_values_of_a_recipe_are_those_that_an_arm_gets(name: str) -> None:
    row, arm = ROWS[name], baseline(name, (RECIPES[name].node_classes or ("cpu",))[0])
    assert row.gates == arm.gates
    assert set(row.overrides) == set(OVERRIDES)
    for key, value in row.overrides.items():
        assert read_field(RECIPES[name].config, OVERRIDES[key].path) == value
    assert row.sizes is not None
    assert row.sizes.tokens_per_step == arm.config.micro_batch * arm.config.data.seq_len
    assert sum(row.sizes.layers.values()) == len(arm.config.model.pattern)


def test_an_override_of_the_rows_counts_where_no_arm_names_the_gate() -> None:
    assert baseline("hybrid-tiny", "cpu", micro_batch=8).gates["micro_batch"] == 8


def test_every_recipe_is_a_line_and_a_named_one_shows_every_value() -> None:
    text = recipes()
    for row in ROWS.values():
        line = next(line for line in text.splitlines() if line.startswith(f"{row.name} "))
        assert row.sizes is not None
        assert f"{row.sizes.parameters:,}" in line
        assert set(row.summary.split()) <= set(text.split())
    shown = [line.split() for line in recipes("hybrid-tiny").splitlines()]
    tiny = ROWS["hybrid-tiny"]
    for name, value in {**tiny.overrides, **tiny.gates}.items():
        assert [name, *show(value).split()] in shown  # no second corpus is an empty cell
    assert [words[0] for words in shown if words].count("micro_batch") == 1


def test_json_is_one_document_and_an_unknown_name_is_refused() -> None:
    (recipe,) = json.loads(recipes("hybrid-ref-h200", "--json"))
    assert recipe == ROWS["hybrid-ref-h200"].model_dump(mode="json")
    assert [row["name"] for row in json.loads(recipes("--json"))] == list(RECIPES)
    refused = CliRunner().invoke(app, ["hybrid-tin"])
    assert (refused.exit_code, "unknown recipe 'hybrid-tin'" in refused.stderr) == (5, True)
    assert "hybrid-tiny" in refused.stderr


@pytest.mark.parametrize("node_class", [name for name, entry in NODE_CLASSES.items() if entry.lanes])
def test_gates_of_a_node_class_show_the_values_of_recipes_that_run_there(node_class: str) -> None:
    able = [name for name, recipe in RECIPES.items() if node_class in (recipe.node_classes or NODE_CLASSES)]
    for row in with_recipes(public_gates(), None, node_class):
        got = {name: baseline(name, node_class).gates[row.name] for name in able}
        assert row.recipes == got or row.name == "lane"


def test_gates_say_one_value_where_recipes_agree_and_each_where_not() -> None:
    rows = {row.name: gates.value_in_recipes(row) for row in public_gates()}
    assert rows["loss"] == "dense"
    assert rows["micro_batch"] == "2: hybrid-tiny; 8: hybrid-ref-h200, hybrid-ref-v6e; 4: nam56r-quarter, nam56r"
    (tiny,) = (row for row in with_recipes(public_gates(), "hybrid-tiny", None) if row.name == "micro_batch")
    assert gates.value_in_recipes(tiny) == "2"
    assert set(rows) == set(GATES)


def test_a_value_that_does_not_run_there_is_no_default() -> None:
    (lane,) = (row for row in public_gates() if row.name == "lane")
    only = lane.model_copy(update={"values": ("xla", "cuda")})
    (shown,) = with_recipes([only], "hybrid-tiny", None)
    assert gates.value_in_recipes(shown) == "must be named"


def test_a_recipe_that_is_not_for_a_node_class_is_refused() -> None:
    with pytest.raises(SpecError, match="'hybrid-ref-h200' is not meant for node class 'cpu'"):
        with_recipes(public_gates(), "hybrid-ref-h200", "cpu")

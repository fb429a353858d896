import re

import pytest

from ablate.experiments.design.gate import show
from ablate.experiments.design.gates import GATES
from ablate.experiments.design.listings import GatePublic, public_gates
from ablate.experiments.errors import SpecError
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.service.cli.commands.catalog.gates import node_classes_of, values_on, where_it_runs

ROWS = public_gates()
CLASSES = node_classes_of(ROWS)


def read(text: str, row: GatePublic) -> dict[str, set[str]]:
    """Return by value the classes that people read in `text`."""
    parts = text.split("; ") if re.search(r"(^|; )[^:;]+: ", text) else [f"{', '.join(row.node_classes)}: {text}"]
    classes: dict[str, set[str]] = {}
    for part in parts:
        values, _, where = part.rpartition(": ")
        able = set(CLASSES) if where == "everywhere" else set() if where == "nothing yet" else set(where.split(", "))
        classes |= dict.fromkeys(values.split(", "), able)
    return classes


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_where_a_value_runs_is_read_back_from_what_is_shown(row: GatePublic) -> None:
    assert read(where_it_runs(row, CLASSES), row) == {value: set(able) for value, able in row.node_classes.items()}


def test_a_value_that_runs_nowhere_says_so() -> None:
    row = ROWS[0].model_copy(update={"node_classes": {"sequential": (), "chunk_parallel": ("cpu",)}})
    assert where_it_runs(row, CLASSES) == "sequential: nothing yet; chunk_parallel: cpu"


@pytest.mark.parametrize("node_class", CLASSES)
def test_values_of_one_node_class_are_those_that_a_spec_may_ask_for_there(node_class: str) -> None:
    kept = {row.name: row for row in values_on(ROWS, node_class, CLASSES)}
    for row in ROWS:
        able = [value for value in row.values if node_class in row.node_classes[show(value)]]
        assert (row.name in kept) == (len(able) > 1)
        assert row.name not in kept or list(kept[row.name].values) == able


def test_an_unknown_node_class_is_refused_with_the_known_ones() -> None:
    assert set(CLASSES) <= {str(name) for name in NODE_CLASSES}
    with pytest.raises(SpecError, match="unknown node class 'H200'; known: cpu, h200") as caught:
        values_on(ROWS, "H200", CLASSES)
    assert "h200" in str(caught.value.problems[0].hint)


@pytest.mark.parametrize("node_class", ["rtx-4090", "a100-80gb", "mi300x"])
def test_values_of_any_gpu_are_those_that_a_spec_may_ask_for_there(node_class: str) -> None:
    kept = {row.name: set(row.values) for row in values_on(ROWS, node_class, CLASSES)}
    entry = NODE_CLASSES[node_class]
    for name, gate in GATES.items():
        able = {
            value for value in gate.values if any(gate.supports(entry, lane, value) is None for lane in entry.lanes)
        }
        assert kept.get(name, able if len(able) < 2 else None) == able, name
    assert "lane" not in kept, "kernels of ours need Hopper"
    assert {"attention", "loss"} <= kept.keys()

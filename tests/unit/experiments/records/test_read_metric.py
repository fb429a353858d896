import typing

import pytest
from pydantic import BaseModel

from experiments.design.metrics import METRICS
from experiments.records.receipts import Receipt, read_metric
from experiments.reporting.pages.evidence_tables import KERNEL_NUMBERS
from model.measurements import GIB
from tests import factories


def _annotation(model: type[BaseModel], path: str) -> set[object]:
    name, _, rest = path.partition(".")
    found = model.model_fields[name].annotation
    choices = set(typing.get_args(found)) or {found}
    if not rest:
        return choices
    (inner,) = choices - {type(None)}
    return _annotation(typing.cast("type[BaseModel]", inner), rest)


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if not (metric.summed or metric.counted)])
def test_every_metric_is_a_number_of_the_receipt(name: str) -> None:
    assert _annotation(Receipt, METRICS[name].field) - {type(None)} <= {int, float}


def test_memory_is_read_in_gib_and_is_missing_without_a_reading() -> None:
    receipt = factories.make_receipt(factories.make_plan(), 0, "psiv-on")
    assert receipt.memory is not None
    metric = METRICS["peak_allocated_gib"]
    assert read_metric(metric, receipt) == receipt.memory.peak_allocated_bytes / GIB
    assert read_metric(metric, receipt.model_copy(update={"memory": None})) is None


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.summed is not None])
def test_what_is_added_up_is_a_number_of_the_kernel_table(name: str) -> None:
    metric = METRICS[name]
    assert metric.summed in KERNEL_NUMBERS
    plan, rows = factories.make_plan(), ({"name": "fwd", metric.summed: 3}, {"name": "bwd", metric.summed: 4})
    assert read_metric(metric, factories.make_receipt(plan, 0, "psiv-on", kernels=rows)) == 7
    assert read_metric(metric, factories.make_receipt(plan, 0, "psiv-on", kernels=(*rows, {"name": "x"}))) is None
    assert read_metric(metric, factories.make_receipt(plan, 0, "psiv-on")) is None


def test_kernels_are_counted_where_there_are_any() -> None:
    plan, metric = factories.make_plan(), METRICS["kernel_count"]
    rows = ({"name": "fwd"}, {"name": "bwd"}, {"name": "bwd"})
    assert read_metric(metric, factories.make_receipt(plan, 0, "psiv-on", kernels=rows)) == 3
    assert read_metric(metric, factories.make_receipt(plan, 0, "psiv-on")) is None

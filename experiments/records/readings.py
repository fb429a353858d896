"""Read a metric from a receipt."""

from functools import reduce

from experiments.design.metrics import Metric
from experiments.records.receipts import Receipt


def read_metric(metric: Metric, receipt: Receipt) -> float | None:
    """Return `metric` in its unit; None where the receipt holds no value: no window, no memory, no validation."""
    value: float | None = reduce(_attribute, metric.field.split("."), receipt)  # type: ignore[arg-type,assignment]
    return value if value is None or metric.per == 1 else value / metric.per


def _attribute(part: object, name: str) -> object:
    return None if part is None else getattr(part, name)

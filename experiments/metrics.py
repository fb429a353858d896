"""The metrics of a receipt: unit, direction and how they are compared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from experiments.receipts import Memory, Receipt, Summary

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of a receipt."""

    unit: str
    better: Literal["higher", "lower"] | None
    """Direction of improvement; None where none is claimed (a lower loss after few steps is not a benefit)."""
    kind: Literal["ratio", "absolute", "loss"]
    """`ratio`: compared by ln(variant / baseline); `absolute`: by its difference; `loss`: by identity or envelope."""
    read: Callable[[Receipt], float | None]


def _summary(read: Callable[[Summary], float | None]) -> Callable[[Receipt], float | None]:
    return lambda receipt: None if receipt.summary is None else read(receipt.summary)


def _memory(read: Callable[[Memory], int]) -> Callable[[Receipt], float | None]:
    return lambda receipt: None if receipt.memory is None else read(receipt.memory) / GIB


METRICS: dict[str, Metric] = {
    "tokens_per_s": Metric(unit="tokens/s", better="higher", kind="ratio", read=_summary(lambda s: s.tokens_per_s)),
    "step_s": Metric(unit="s", better="lower", kind="ratio", read=_summary(lambda s: s.step_s_mean)),
    "model_tflops_per_s": Metric(
        unit="TFLOP/s", better="higher", kind="ratio", read=_summary(lambda s: s.model_tflops_per_s)
    ),
    "peak_reserved_gib": Metric(
        unit="GiB",
        better="lower",
        kind="absolute",
        read=_memory(lambda m: m.peak_reserved_bytes),
    ),
    "peak_allocated_gib": Metric(
        unit="GiB",
        better="lower",
        kind="absolute",
        read=_memory(lambda m: m.peak_allocated_bytes),
    ),
    "compile_s": Metric(unit="s", better="lower", kind="absolute", read=lambda receipt: receipt.compile_s),
    "loss_step1": Metric(unit="nats", better=None, kind="loss", read=_summary(lambda s: s.loss_step1)),
    "loss_final": Metric(unit="nats", better=None, kind="loss", read=_summary(lambda s: s.loss_final)),
    "loss_val": Metric(unit="nats", better=None, kind="loss", read=_summary(lambda s: s.loss_val)),
}
"""Every metric by name."""

PRIMARY_METRICS: tuple[str, ...] = tuple(name for name, metric in METRICS.items() if metric.kind == "ratio")
"""Metrics that can decide: those compared as ratios."""

"""The baseline of a recipe over time: one point per ablation, changes of level, and drift from the anchor.

A series has one metric of one baseline configuration on one device. A point is the mean of ln over the baseline's
measured trials. The newest points are compared with the oldest, the anchor, because small losses within the margin add
up over time.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal, TypeAlias

import numpy as np
import scipy

from ablate.experiments.analysis.noise.history_series import (
    MIN_POINTS,
    AnchorDrift,
    HistoryPoint,
    HistorySeries,
    LevelChange,
)
from ablate.experiments.analysis.statistics import percent
from ablate.experiments.design.metrics import find_metric
from ablate.experiments.digest import digest
from ablate.experiments.documents import Frozen
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.receipts import Receipt, identities, read_named

MIN_SEGMENT = 2
PENALTY = 15.0
"""Penalty per change, in variances of a point: at most 5 % of constant series of 8 points or more get a change."""
ENDS = 3
"""Number of points of the anchor, and of the newest level."""
CONFIDENCE = 0.95
_MAD_TO_SD = 1.4826
_Better: TypeAlias = Literal["higher", "lower"] | None
"""Direction of improvement of a metric."""


class BaselineRun(Frozen):
    """The baseline's receipts of one ablation."""

    ablation: str
    name: str
    receipts: tuple[Receipt, ...]


def history_of(metric: str, runs: Iterable[BaselineRun]) -> list[HistorySeries]:
    """Return a series per configuration and device in `runs`; runs without a value are left out."""
    every = tuple(runs)
    metrics = (find_metric(metric, receipt.config.declared) for run in every for receipt in run.receipts)
    better = next((one.better for one in metrics if one is not None), None)
    rows = sorted(
        (row for run in every for row in _rows(metric, run)), key=lambda row: (row[0], row[1].at, row[1].ablation)
    )
    groups = groupby(rows, key=lambda row: row[0])
    return [_series(metric, key, [point for _, point in own], better) for key, own in groups]


def _rows(metric: str, run: BaselineRun) -> Iterable[tuple[tuple[str, str, str], HistoryPoint]]:
    """Yield the point of every device that ran the baseline."""
    measured = sorted((r for r in run.receipts if r.outcome is Outcome.MEASURED), key=_place)
    for key, receipts in groupby(measured, key=_place):
        own = sorted(receipts, key=lambda receipt: receipt.started_at)
        values = [value for receipt in own if (value := read_named(metric, receipt)) and value > 0]
        if values and len(values) == len(own):
            yield (
                key,
                HistoryPoint(
                    ablation=run.ablation,
                    name=run.name,
                    at=own[0].started_at,
                    value=statistics.geometric_mean(values),
                    trials=len(values),
                    code=_code_of(own[0]),
                    data=own[0].digests.data,
                ),
            )


def _place(receipt: Receipt) -> tuple[str, str, str]:
    where = receipt.environment
    names = identities(where)
    return where.node_class, " + ".join(names), _configuration(receipt)


def _configuration(receipt: Receipt) -> str:
    """Return the digest of the configuration that a series has: all versions of sent code are one series."""
    if receipt.config.archive is None:
        return receipt.digests.arm
    values = {name: value for name, value in receipt.config.values_without_seed.items() if name != "code"}
    if "evaluate" in values:
        values["evaluate"] = {name: value for name, value in values["evaluate"].items() if name != "code"}
    return digest(values)


def _code_of(receipt: Receipt) -> str:
    """Return the digest of the code that ran: ours, the program's, and its evaluation's."""
    own, program = receipt.digests.code, receipt.program
    if program is None:
        return own
    return digest([own, program.code, *([] if program.evaluation is None else [program.evaluation.code])])


def _series(metric: str, key: tuple[str, str, str], points: Sequence[HistoryPoint], better: _Better) -> HistorySeries:
    logs = np.log([point.value for point in points])
    enough = len(points) >= MIN_POINTS
    return HistorySeries(
        metric=metric,
        node_class=key[0],
        device=key[1],
        arm_digest=key[2],
        points=tuple(points),
        changes=tuple(_changes(better, points, logs)) if enough else (),
        since_anchor=_drift(better, logs) if enough else None,
    )


def scatter(logs: np.ndarray) -> float:
    """Return the standard deviation of a point, from the median step between neighbours, robust to level changes."""
    steps = np.abs(np.diff(logs))
    return float(_MAD_TO_SD * np.median(steps) / math.sqrt(2))


def find_changes(logs: np.ndarray) -> list[int]:
    """Return the indices at which a new level begins: least squares with a penalty per change (PELT)."""
    sd = scatter(logs)
    if sd == 0:
        sd = float(np.finfo(float).eps)
    import ruptures  # takes half a second, so commands that only show a series skip it

    search = ruptures.KernelCPD(kernel="linear", min_size=MIN_SEGMENT).fit((logs - logs.mean()) / sd)
    return [int(index) for index in search.predict(pen=PENALTY)[:-1]]


def _changes(better: _Better, points: Sequence[HistoryPoint], logs: np.ndarray) -> Iterable[LevelChange]:
    bounds = [0, *find_changes(logs), len(points)]
    for before, index, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
        change = float(logs[index:after].mean() - logs[before:index].mean())
        yield LevelChange(
            ablation=points[index].ablation,
            at=points[index].at,
            change_pct=percent(change),
            worse=_worse(better, change, change),
            code_changed=points[index].code != points[index - 1].code,
            data_changed=points[index].data != points[index - 1].data,
        )


def _drift(better: _Better, logs: np.ndarray) -> AnchorDrift:
    change = float(logs[-ENDS:].mean() - logs[:ENDS].mean())
    freedom = (len(logs) - 1) // 2  # a median step estimates the scatter with about half the degrees of freedom
    half = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * scatter(logs) * math.sqrt(2 / ENDS)
    low, high = change - half, change + half
    return AnchorDrift(
        change_pct=percent(change), low_pct=percent(low), high_pct=percent(high), worse=_worse(better, low, high)
    )


def _worse(better: _Better, low: float, high: float) -> bool | None:
    if better is None:
        return None
    return high < 0 if better == "higher" else low > 0

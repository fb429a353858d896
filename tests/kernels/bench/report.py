"""Stored results of the bench: one JSON file per part, so that parts can run at different times."""

from collections.abc import Iterable
from pathlib import Path
from statistics import median

from pydantic import BaseModel, ConfigDict

from ablate.kernels.facts import Fact
from tests.kernels.accuracy import Errors

SCHEMA = 2
BEGUN = ".begun.json"
"""Suffix of the file of an incomplete part."""
WAYS = ("kernels", "graph", "eager")
"""Kinds of times. The last two are sampled."""
TOGETHER = "all kernels"
"""Name of the row with the sum of a lane's kernels."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Machine(_Model):
    """Where a part ran."""

    date: str
    """Start, UTC, ISO 8601."""
    device: str
    """Name of the GPU."""
    driver: str
    """Version of its driver."""
    clocks_before: str
    """SM and memory clock before."""
    clocks_after: str
    """SM and memory clock after."""
    versions: dict[str, dict[str, str]]
    """Lane -> package -> version."""
    absent: dict[str, str] = {}
    """Lane that did not run -> reason."""
    ceilings: dict[str, float] = {}
    """Bytes per second of a copy and FLOPs per second of a bf16 product, measured before the part."""


class _Judged(_Model):
    """Errors of a lane's results against the float64 reference, see work.Judged."""

    errors: Errors = {}
    shares: dict[str, tuple[float, float]] = {}
    wrong: list[str] = []


class AccuracyRow(_Judged):
    """Errors of one lane on one problem."""

    name: str
    lane: str
    refused: str | None = None
    """Reason for missing errors."""


class Times(_Model):
    """Times of one pass in three kinds, see timing.py."""

    kernels_ms: float | None = None
    """Sum of its GPU kernels."""
    graph_ms: list[float] = []
    """Samples of a CUDA graph."""
    eager_ms: list[float] = []
    """Samples of calls."""
    no_graph: str | None = None
    """Why there is no graph."""

    def medians(self) -> dict[str, float]:
        """Return the median of each kind that was measured, in the order of WAYS."""
        kernels = [] if self.kernels_ms is None else [self.kernels_ms]
        samples = {"kernels": kernels, "graph": self.graph_ms, "eager": self.eager_ms}
        return {way: median(times) for way, times in samples.items() if times}


class SpeedRow(_Judged):
    """Times of one lane or attention implementation on one problem, with the errors of the timed functions."""

    name: str
    lane: str
    forward: Times = Times()
    both: Times = Times()
    """Forward and backward together."""
    peak_gib: float | None = None
    """Peak of allocated memory of forward and backward, inputs included."""
    facts: dict[str, Fact] = {}
    """Facts that the lane recorded, see ScanFact."""
    refused: str | None = None
    """Reason for missing times."""


class KernelRow(_Model):
    """Time of one kernel in one forward and backward pass. Only kernels of our lane have floors."""

    name: str
    """The problem."""
    lane: str
    kernel: str
    ms: float
    floor_ms: float | None = None
    bytes: float | None = None
    flops: float | None = None


class ChainRow(_Model):
    """Errors and times of one variant of a chain of matrix products, see chain.py."""

    name: str
    """The sizes."""
    variant: str
    largest: float | None = None
    """Largest error as a share of the largest value."""
    norm: float | None = None
    """Norm of the error as a share of the norm of the result."""
    times: Times = Times()
    """Times of one chain."""
    refused: str | None = None
    """Reason for missing times."""


class TablePart(_Model):
    """One part of the table."""

    schema_version: int = SCHEMA
    part: str
    """accuracy, speed, attention or chain."""
    machine: Machine
    complete: bool = True
    """False until the end. An interrupted run keeps its results so far."""
    accuracy: list[AccuracyRow] = []
    speed: list[SpeedRow] = []
    kernels: list[KernelRow] = []
    chain: list[ChainRow] = []


Row = AccuracyRow | SpeedRow | KernelRow | ChainRow
PLACES: dict[type, str] = {AccuracyRow: "accuracy", SpeedRow: "speed", KernelRow: "kernels", ChainRow: "chain"}
"""Type of row -> its list in a part."""


def sorted_rows(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return list of a part -> its rows."""
    lists: dict[str, list[Row]] = {}
    for row in rows:
        lists.setdefault(PLACES[type(row)], []).append(row)
    return lists


def store(part: TablePart, folder: Path) -> Path:
    """Write the part below `folder` and return its path. An incomplete part replaces no complete one."""
    folder.mkdir(parents=True, exist_ok=True)
    whole, begun = folder / f"{part.part}.json", folder / f"{part.part}{BEGUN}"
    begun.write_text(part.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return begun.replace(whole) if part.complete else begun


def stored(folder: Path, names: tuple[str, ...]) -> list[TablePart]:
    """Return the parts below `folder` in the order of `names`, including incomplete ones."""
    parts = []
    for name in names:
        paths = (folder / f"{name}.json", folder / f"{name}{BEGUN}")
        text = next((path.read_text(encoding="utf-8") for path in paths if path.is_file()), None)
        parts += [] if text is None else [TablePart.model_validate_json(text)]
    return parts

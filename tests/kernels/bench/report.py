"""What a run of the table finds, as it is stored: one JSON file for each part, so that parts can run at other times."""

from collections.abc import Iterable
from pathlib import Path
from statistics import median

from pydantic import BaseModel, ConfigDict

from kernels.facts import Fact
from tests.kernels.accuracy import Errors

SCHEMA = 2
BEGUN = ".begun.json"
"""End of the name of a part that is not through."""
WAYS = ("kernels", "graph", "eager")
"""The ways to look at a time; samples are taken of the last two."""
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
    """The same afterwards."""
    versions: dict[str, dict[str, str]]
    """Lane -> package -> version."""
    absent: dict[str, str] = {}
    """Lane that did not run -> why."""
    ceilings: dict[str, float] = {}
    """Bytes per second of a copy and FLOPs per second of a bf16 product, measured before the part."""


class _Judged(_Model):
    """How near a lane's results are to the float64 reference: see work.Judged."""

    errors: Errors = {}
    shares: dict[str, tuple[float, float]] = {}
    wrong: list[str] = []


class AccuracyRow(_Judged):
    """Errors of one lane on one problem."""

    name: str
    lane: str
    refused: str | None = None
    """Why there are none."""


class Times(_Model):
    """Times of one pass, looked at in three ways: see timing.py."""

    kernels_ms: float | None = None
    """Sum of its GPU kernels."""
    graph_ms: list[float] = []
    """Samples of a CUDA graph."""
    eager_ms: list[float] = []
    """Samples of calls."""
    no_graph: str | None = None
    """Why there is no graph."""

    def medians(self) -> dict[str, float]:
        """Return the time of each way in which it was looked at, in the order of WAYS."""
        found = {"graph": self.graph_ms, "eager": self.eager_ms}
        all_ways = {"kernels": [] if self.kernels_ms is None else [self.kernels_ms], **found}
        return {way: median(samples) for way, samples in all_ways.items() if samples}


class SpeedRow(_Judged):
    """Times of one lane, or of one attention implementation, on one problem; the errors are those of what is timed."""

    name: str
    lane: str
    forward: Times = Times()
    both: Times = Times()
    """Forward and backward together."""
    peak_gib: float | None = None
    """Peak of allocated memory of forward and backward, inputs included."""
    facts: dict[str, Fact] = {}
    """What the lane said about the passes: see ScanFact."""
    refused: str | None = None
    """Why nothing was timed."""


class KernelRow(_Model):
    """Time of one kernel in one forward and backward pass; the floors are those of ours."""

    name: str
    """The problem."""
    lane: str
    kernel: str
    ms: float
    floor_ms: float | None = None
    bytes: float | None = None
    flops: float | None = None


class SweepRow(_Model):
    """One way to run the reference problem: its times, and what its binaries show."""

    change: str
    """What differs from the default."""
    speed: SpeedRow
    default: Times = Times()
    """Forward and backward of the default, in turn with these."""
    binaries: list[dict[str, str | int | float | bool]] = []
    """One row of attest.table for every kernel that walks chunks."""


class TablePart(_Model):
    """One part of the table."""

    schema_version: int = SCHEMA
    part: str
    """accuracy, speed, attention or sweep."""
    machine: Machine
    complete: bool = True
    """False while it runs: a run that was ended keeps what it found until then."""
    accuracy: list[AccuracyRow] = []
    speed: list[SpeedRow] = []
    kernels: list[KernelRow] = []
    sweep: list[SweepRow] = []


Row = AccuracyRow | SpeedRow | KernelRow | SweepRow
PLACES: dict[type, str] = {AccuracyRow: "accuracy", SpeedRow: "speed", KernelRow: "kernels", SweepRow: "sweep"}
"""Kind of row -> the list of a part where it belongs."""


def sorted_rows(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows by the lists of a part where they belong."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(PLACES[type(row)], []).append(row)
    return found


def store(part: TablePart, folder: Path) -> Path:
    """Write the part below `folder` and return its path; one that is not through replaces none that is."""
    folder.mkdir(parents=True, exist_ok=True)
    whole, begun = folder / f"{part.part}.json", folder / f"{part.part}{BEGUN}"
    begun.write_text(part.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return begun.replace(whole) if part.complete else begun


def stored(folder: Path, names: tuple[str, ...]) -> list[TablePart]:
    """Return the parts below `folder`, in the order of `names`; of a part that was never through, what was found."""
    found = []
    for name in names:
        paths = (folder / f"{name}.json", folder / f"{name}{BEGUN}")
        text = next((path.read_text(encoding="utf-8") for path in paths if path.is_file()), None)
        found += [] if text is None else [TablePart.model_validate_json(text)]
    return found

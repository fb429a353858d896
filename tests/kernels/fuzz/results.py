"""Stored results of a fuzz run: one line per problem, and a summary as JSON and as a page."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tests.kernels import criterion
from tests.kernels.fuzz.outcomes import FuzzOutcome
from tests.kernels.fuzz.problems import ScanProblem

LINES, SUMMARY, PAGE = "outcomes.jsonl", "summary.json", "README.md"
GOOD = ("right", "refused")
AXES = (
    "N",
    "P",
    "R",
    "B",
    "H",
    "decay",
    "documents",
    "cuts",
    "full_rotary",
    "cumulated",
    "shared_angles",
    "started",
    "ended",
    "dtype",
)
"""Fields of a problem that the summary counts."""
RANGES = {"B": (1, 2, 3, 5), "H": (1, 2, 4, 8, 16), "documents": (1, 2, 4, 8, 16, 32)}
"""Fields that the summary counts in ranges -> starts of the ranges."""


class FuzzSetting(BaseModel):
    """Machine and arguments of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str
    """Command line."""
    date: str
    """Start, UTC, ISO 8601."""
    device: str
    """Number and name of the GPUs."""
    versions: dict[str, str]
    """Package -> version."""


class FuzzSummary(BaseModel):
    """Results of a run so far."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    setting: FuzzSetting
    seconds: float
    """Seconds since the start of the last run, if several runs continued one another."""
    complete: bool
    """Whether all requested problems ran."""
    endings: dict[str, int]
    """Ending -> number of problems."""
    kernels_compiled: int
    """Kernels compiled in this run."""
    kernels_kept: int
    """Kernels from TileLang's cache."""
    refusals: dict[str, int]
    """Reason without its numbers -> number of refused problems."""
    worst: dict[str, tuple[float, float]]
    """Result -> largest error of any right problem, whole and row, as multiples of their noise."""
    counted: dict[str, dict[str, int]]
    """Axis -> value -> number of problems that were not refused."""


class OutcomeStore:
    """The outcomes in one folder. Existing ones belong to the run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._by_line = {outcome.problem.line: outcome for outcome in _read(folder / LINES)}

    @property
    def outcomes(self) -> list[FuzzOutcome]:
        """The last outcome of every problem."""
        return list(self._by_line.values())

    def add(self, outcome: FuzzOutcome) -> None:
        """Store one outcome."""
        self._by_line[outcome.problem.line] = outcome
        with (self.folder / LINES).open("a", encoding="utf-8") as lines:
            lines.write(outcome.model_dump_json(exclude_defaults=True) + "\n")

    def write(self, summary: FuzzSummary) -> str:
        """Write the summary; return the page."""
        text = page(summary, self.outcomes)
        (self.folder / SUMMARY).write_text(summary.model_dump_json(indent=1) + "\n", encoding="utf-8")
        (self.folder / PAGE).write_text(text, encoding="utf-8")
        return text


def _read(path: Path) -> Iterator[FuzzOutcome]:
    """Yield the stored outcomes. The last line of a killed run may be incomplete."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            yield FuzzOutcome.model_validate_json(line)
        except ValueError:
            continue


def summarised(
    outcomes: Iterable[FuzzOutcome], setting: FuzzSetting, seconds: float, *, complete: bool, kernels: tuple[int, int]
) -> FuzzSummary:
    """Return the summary of these outcomes."""
    outcomes = list(outcomes)
    ran = [outcome.problem for outcome in outcomes if outcome.ending != "refused"]
    return FuzzSummary(
        setting=setting,
        seconds=round(seconds, 1),
        complete=complete,
        endings=dict(Counter(outcome.ending for outcome in outcomes)),
        kernels_compiled=kernels[0],
        kernels_kept=kernels[1],
        refusals=dict(Counter(_kind(o.why) for o in outcomes if o.ending == "refused").most_common()),
        worst=_worst(outcome for outcome in outcomes if outcome.ending == "right"),
        counted={"backward walk": dict(sorted(Counter(o.walk for o in outcomes if o.walk).items()))}
        | {axis: _counted(axis, ran) for axis in AXES}
        | _switches(ran),
    )


def _kind(reason: str) -> str:
    """Return a reason without its numbers, so that equal reasons count together."""
    return re.sub(r"\d+(\.\d+)?", "#", reason)


def _worst(outcomes: Iterable[FuzzOutcome]) -> dict[str, tuple[float, float]]:
    worst: dict[str, tuple[float, float]] = {}
    for outcome in outcomes:
        for name, (whole, row) in outcome.errors.items():
            before = worst.get(name, (0.0, 0.0))
            worst[name] = (max(before[0], whole), max(before[1], row))
    return worst


def _counted(axis: str, problems: list[ScanProblem]) -> dict[str, int]:
    values = Counter(getattr(problem, axis) for problem in problems)
    if axis not in RANGES:
        return {str(value): count for value, count in sorted(values.items())}
    ranged: Counter[int] = Counter()
    for value, count in values.items():
        ranged[max(start for start in (0, *RANGES[axis]) if start <= value)] += count
    return {f">= {value}": count for value, count in sorted(ranged.items())}


def _switches(problems: list[ScanProblem]) -> dict[str, dict[str, int]]:
    """Return switch -> value other than the default -> number of problems."""
    counts: dict[str, Counter[str]] = {}
    for problem in problems:
        for name, value in problem.switches.items():
            counts.setdefault(name, Counter())[json.dumps(value)] += 1
    return {name: dict(sorted(values.items())) for name, values in sorted(counts.items())}


def page(summary: FuzzSummary, outcomes: Iterable[FuzzOutcome]) -> str:
    """Return the summary as Markdown: faults with the command that reproduces them, then the coverage."""
    bad = [outcome for outcome in outcomes if outcome.ending not in GOOD]
    ran = sum(count for ending, count in summary.endings.items() if ending != "refused")
    where = summary.setting
    lines = [
        "# Fuzz of the CUDA lane", "",
        f"`{where.command}`, {where.date}, {where.device}, {', '.join(f'{k} {v}' for k, v in where.versions.items())}.",
        f"{summary.seconds:.0f} s; {summary.kernels_compiled} kernels compiled, {summary.kernels_kept} loaded."
        + ("" if summary.complete else " **Not complete.**"), "",
        f"{ran} problems ran, each twice: "
        + ", ".join(f"{count} {ending}" for ending, count in sorted(summary.endings.items()) if ending != "refused")
        + f". {summary.endings.get('refused', 0)} were refused before anything was compiled.", "",
    ]  # fmt: skip
    if bad:
        lines += ["## Faults", ""]
        lines += [f"- {described(outcome)}\n\n  `{reproduction(outcome.problem)}`" for outcome in bad] + [""]
    lines += [
        "## Largest errors", "",
        f"Of right results, in multiples of the noise; limits {criterion.LIMITS}.", "",
        "| result | whole | row |", "|---|---|---|",
        *(f"| {name} | {whole:.2f} | {row:.2f} |" for name, (whole, row) in summary.worst.items()), "",
        "## Refusals", "", "| times | reason |", "|---|---|",
        *(f"| {count} | {reason} |" for reason, count in summary.refusals.items()), "",
        "## Coverage", "", "| axis | value: problems |", "|---|---|",
        *(f"| {axis} | {', '.join(f'{value}: {n}' for value, n in values.items())} |"
          for axis, values in summary.counted.items()), "",
    ]  # fmt: skip
    return "\n".join(lines)


def described(outcome: FuzzOutcome) -> str:
    """Return an outcome in one line."""
    alone = "" if outcome.alone is None else f" (alone: {outcome.alone})"
    return f"{outcome.ending}{alone}: {' '.join(outcome.why.split())}"


def reproduction(problem: ScanProblem) -> str:
    """Return the command that runs one problem again."""
    return f"python -m tests.kernels.fuzz --only '{problem.line}'"

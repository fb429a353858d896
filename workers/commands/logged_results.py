"""Results that a program logs where it logs them anyway: TensorBoard, W&B or MLflow, in the folder of its trial.

The last number that was logged is the result. Files that were there before the program began do not count.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from ablate.experiments.design.metrics import TRACKER_VARIABLES, LoggedMetric, Tracker
from ablate.experiments.design.problems import listed, nearest
from ablate.experiments.records.program_report import contradicts, printable
from ablate.workers.commands.event_files import tensorboard_runs
from ablate.workers.commands.logged_runs import LoggedRun, Unreadable, files_below
from ablate.workers.commands.mlflow_stores import mlflow_runs
from ablate.workers.commands.wandb_files import wandb_runs

Curve: TypeAlias = tuple[tuple[int, float], ...]
"""(step, number)."""
MOST_POINTS = 400
"""Of a curve in a receipt."""
_TITLES: Mapping[Tracker, str] = {"tensorboard": "TensorBoard", "wandb": "W&B", "mlflow": "MLflow"}
_FILES: Mapping[Tracker, str] = {
    "tensorboard": "event file (events.out.tfevents.*)",
    "wandb": "offline run (*.wandb)",
    "mlflow": "run in a local store",
}
_ADVICE: Mapping[Tracker, str] = {
    "tensorboard": "write below the working folder or {out}",
    "wandb": "do not set mode, dir or WANDB_MODE in the program",
    "mlflow": "do not call mlflow.set_tracking_uri in the program, or with sqlite:///mlflow.db",
}
_MOST_SHOWN = 20
_SAME_SHARE = 1e-3
"""Other numbers of a metric contradict the logged one from this share on: TensorBoard stores 24 bits."""


@dataclass(frozen=True, kw_only=True)
class LoggedResults:
    """What a program has logged."""

    values: Mapping[str, float] = field(default_factory=dict)
    """By metric, those that are not finite included."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """By metric."""
    problem: str | None = None
    """Why a metric has no value."""

    def contradicting(self, others: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers of the same names that contradict the logged ones, which count."""
        return {
            name: others[name]
            for name, value in self.values.items()
            if name in others
            and math.isfinite(others[name])
            and not math.isclose(others[name], value, rel_tol=_SAME_SHARE)
            and contradicts(others[name], value)
        }


class ProgramLogs:
    """The folder of a trial, in which a program logs metrics."""

    def __init__(self, metrics: Mapping[str, LoggedMetric], folder: Path) -> None:
        """Look at the folder before the program starts."""
        self._metrics, self._folder = metrics, folder
        self._trackers = sorted({place.tracker for place in metrics.values()})
        self._before = frozenset(files_below(folder)) if metrics else frozenset()
        self._own = folder / "logged"

    def variables(self) -> dict[str, str]:
        """Make the folder into which the program is going to log; return the variables that say so."""
        values = {
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(self._own),
            "MLFLOW_TRACKING_URI": (self._own / "mlflow").as_uri(),
            "MLFLOW_ALLOW_FILE_STORE": "true",
        }
        if self._trackers:
            self._own.mkdir(exist_ok=True)
        return {name: values[name] for tracker in self._trackers for name in TRACKER_VARIABLES[tracker]}

    def read(self) -> LoggedResults:
        """Return the results, once all processes of the program have ended."""
        values: dict[str, float] = {}
        curves: dict[str, Curve] = {}
        files = [file for file in files_below(self._folder) if file not in self._before] if self._metrics else []
        try:
            for tracker in self._trackers:
                own = {name: place for name, place in self._metrics.items() if place.tracker == tracker}
                runs = list(self._runs(tracker, files, sorted({place.tag for place in own.values()})))
                for name, place in own.items():
                    numbers = _numbers(name, place, runs)
                    values[name] = numbers[-1][1]
                    curves[name] = _thinned([one for one in numbers if math.isfinite(one[1])])
        except Unreadable as error:
            return LoggedResults(problem=str(error))
        return LoggedResults(values=values, curves=curves)

    def _runs(self, tracker: Tracker, files: Sequence[Path], wanted: Sequence[str]) -> Iterator[LoggedRun]:
        if tracker == "tensorboard":
            own = [file for file in files if "tfevents" in file.name]
            return tensorboard_runs(own, self._folder, wanted)
        if tracker == "wandb":
            return wandb_runs([file for file in files if file.suffix == ".wandb"], wanted)
        return mlflow_runs(files, wanted)


def _numbers(name: str, place: LoggedMetric, runs: Sequence[LoggedRun]) -> Sequence[tuple[int, float]]:
    """Return the numbers of a metric in their order. Raises Unreadable with the reason why there is no last one."""
    title, wanted = _TITLES[place.tracker], f"which workload.metrics names for {name}"
    if not runs:
        raise Unreadable(
            f"the program wrote no {_FILES[place.tracker]} of {title} into the folder of its trial, {wanted}; "
            f"{_ADVICE[place.tracker]} (files that were there before do not count)"
        )
    own = [run for run in runs if place.run is None or place.run in run.names]
    if not own:
        names = [run.names[0] for run in runs]
        raise Unreadable(
            f"the program logged no run '{place.run}' to {title}, {wanted}; its runs: "
            f"{_shown(names)}{_hint(place.run or '', names)}"
        )
    if broken := next((run.broken for run in own if run.broken is not None), None):
        raise Unreadable(f"what the program logged to {title} cannot be read: {broken}")
    having = [run for run in own if run.numbers[place.tag]]
    if not having:
        others = sorted({other for run in own for other in run.others | _others(run, place.tag)})
        raise Unreadable(
            f"the program logged no number '{place.tag}' to {title}, {wanted}; it logged: "
            f"{_shown(others)}{_hint(place.tag, others)}"
        )
    if len(having) > 1:
        raise Unreadable(
            f"{len(having)} runs of the program logged '{place.tag}' to {title}, {wanted}: "
            f"{_shown([run.names[0] for run in having])}; name the one that counts, such as run: {having[-1].names[0]}"
        )
    if problem := having[0].problems.get(place.tag):
        raise Unreadable(f"'{place.tag}' of {title}, {wanted}: {problem}")
    return having[0].numbers[place.tag]


def _others(run: LoggedRun, tag: str) -> set[str]:
    """Return the wanted tags of other metrics that a run has."""
    return {printable(other) for other, numbers in run.numbers.items() if numbers and other != tag}


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN:,} more" if len(names) > _MOST_SHOWN else ""
    return listed(f"'{name}'" for name in names[:_MOST_SHOWN]) + more


def _hint(name: str, names: Sequence[str]) -> str:
    words = nearest(name, names)
    return "" if words is None else f"; {words}"


def _thinned(numbers: Sequence[tuple[int, float]]) -> Curve:
    """Return numbers evenly spread over all of them, the first and the last included."""
    if len(numbers) <= MOST_POINTS:
        return tuple(numbers)
    return tuple(numbers[round(place * (len(numbers) - 1) / (MOST_POINTS - 1))] for place in range(MOST_POINTS))

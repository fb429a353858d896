"""The spec behind `ablate ask` and `ablate.compare`: from a command and its arms to an ablation answered in minutes."""

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from ablate.experiments.design.arguments import merged_arguments
from ablate.experiments.design.kinds.kind import MAX_TRIALS
from ablate.experiments.design.metrics import (
    CPU_STEP,
    METRICS,
    THROUGHPUT,
    TRACKER_VARIABLES,
    WINDOW_METRICS,
    is_declarable,
)
from ablate.experiments.design.spec import MAX_SEEDS, MIN_BLOCKS
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.outcomes import BASELINE, CONTROL
from ablate.experiments.reporting import wording
from ablate.service.cli.output import err

MARGIN = "1%"
"""Differences that do not matter."""
_TRIALS_S = 480.0
"""Time of all trials: with the check and the start of a stack, an answer comes within ten minutes."""
_LEAST_WINDOW_S, _MOST_WINDOW_S = 2.0, 15.0
_LEAST_STEPS, _MOST_STEPS = 10, 5000
_WORK_S, _TURN_WORK_S = 5.0, 0.25
"""Processor time of a window in turns, and of a turn: the speed of busy cores changes within seconds, each change of
turns costs milliseconds, and a short check sees only by chance how long a step takes there."""
_SCRIPT = (".py", ".sh", ".bash", ".jl", ".R")
_QUALITY: Mapping[str, Literal["lower", "higher"]] = {
    **dict.fromkeys(("loss", "bpb", "bpc", "ppl", "perplexity", "error", "err", "wer", "mse"), "lower"),
    **dict.fromkeys(("acc", "accuracy", "score", "reward", "f1", "bleu", "auc", "iou", "map"), "higher"),
}
"""Words in names of numbers that load by other processes cannot change, with their better direction."""


@dataclass(frozen=True, kw_only=True)
class CheckedTimes:
    """The part of the answer of `ablate check SPEC --json` that sizes the ablation."""

    node_class: str
    seed: int | None
    """The seed that the baseline reports."""
    marks: Literal["process", "steps", "tokens"]
    is_quiet: bool
    """Whether others take less of the cores than the spec allows."""
    can_take_turns: bool
    """Whether all trials of a block may run by turns: programs of at most one rank, for which the memory has room."""
    step_s: float | None
    cpu_step_s: float | None
    own_steps: int | None
    """Fewest steps of an arm's loop outside of a trial; None if no arm says."""
    start_s: float
    longest_s: float
    checks: tuple[Mapping[str, Any], ...] = ()
    """Its lines: name, detail, whether it passed, and whether it is needed."""

    @classmethod
    def read(cls, document: str) -> "CheckedTimes":
        """Return the part of the answer that is needed here."""
        answer = json.loads(document)
        return cls(**{name: answer[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class AskedQuestion:
    """A command, the arms that add something to it, and the rule that decides."""

    name: str
    """Of the ablation."""
    change: str
    """In words, for people."""
    command: tuple[str, ...]
    """The words that all arms share."""
    baseline: Mapping[str, Any]
    """As in a spec."""
    variants: Mapping[str, Any]
    commit_name: str = ""
    """What the user calls the commit of a variant, with its short name: `v1.2 (4f2a9c1b03de)`."""
    metric: str | None = None
    """A metric of ours, a name that the program reports, a line that it prints with {} for the number, or
    `tensorboard:TAG` (`wandb:`, `mlflow:`) that it logs."""
    better: Literal["lower", "higher"] | None = None
    margin: str = MARGIN
    data: tuple[str, ...] = ()
    search_path: str = ""
    """PYTHONPATH of all arms."""
    seed: int | None = None
    """The seed of every trial, of a program that does not take the block's."""
    steps: int | None = None
    blocks: int = MIN_BLOCKS
    may_take_turns: bool = True
    """Whether trials may take turns on a busy machine."""

    def command_lines(self) -> Iterator[tuple[str, str]]:
        """Yield the arms with what they run."""
        for name, arm in {BASELINE: self.baseline, **self.variants}.items():
            before = [f"{key}={shlex.quote(value)}" for key, value in arm.get("env", {}).items()]
            after = [f"(code of {self.commit_name})"] if "code" in arm else []
            args = arm.get("args", self.baseline.get("args", ()))
            yield name, " ".join([*before, shlex.join([*self.command, *args]), *after])

    @property
    def declared(self) -> str | None:
        """Name of the metric that the program reports or prints; None if one of ours decides."""
        if self.metric is None or self.metric in METRICS:
            return None
        words = self._logged.get("tag", self.metric.replace("{}", ""))
        name = re.sub("[^a-z0-9]+", "_", words.lower()).strip("_")[:50]
        return name if is_declarable(name) else f"reported_{name}".rstrip("_")

    def with_own_seed(self, seed: int | None) -> "AskedQuestion | None":
        """Return the question at the seed that the program trains with; None if that would be no other question.

        Times may be compared at one seed. A number that the program reports needs a seed for every block.
        """
        takes_seed = "{seed}" in str((self.command, self.baseline, self.variants))
        if seed is None or seed == self.seed or takes_seed or self.metric is not None:
            return None
        return replace(self, seed=seed)

    def spec(self, times: CheckedTimes | None = None) -> dict[str, Any]:
        """Return the values of the spec: before the check one that needs nothing of the program, then the whole."""
        workload: dict[str, Any] = {"command": list(self.command), "code": "."}
        if self.data:
            workload["data"] = list(self.data)
        if self.search_path:
            workload["env"] = {"PYTHONPATH": self.search_path}
        if times is not None and times.step_s is not None:
            workload["steps"] = self._steps(times)
        if times is not None and times.marks == "process" and self.takes_turns(times):
            workload["turns"] = True
        placement: dict[str, Any] = {"node_class": "cpu" if times is None else times.node_class}
        # the check of a number of steps has to say whether the machine is quiet
        of_work = self.metric == "cpu_s" or (self.metric == CPU_STEP and times is not None)
        if self._quality or of_work or (times is not None and not times.is_quiet):
            placement["max_foreign_load"] = "99%"
        if self.declared is not None:
            workload["metrics"] = {self.declared: self._declaration()}
        seeds = min(self.blocks, MAX_SEEDS) if self.seed is None else [self.seed]
        return {
            "ablation": self.name[:63].rstrip("-"),
            "question": self._question(),
            "workload": workload,
            "baseline": self.baseline,
            "variants": self.variants,
            "design": {"seeds": seeds, "blocks": {"count": self.blocks}},
            "placement": placement,
            "limits": self._limits(times),
            "verdict": {"primary": {"metric": self._primary(times), "margin": self.margin}},
        }

    @property
    def _quality(self) -> Literal["lower", "higher"] | None:
        words = (self.declared or "").split("_")
        return next((_QUALITY[word] for word in reversed(words) if word in _QUALITY), None)

    def _declaration(self) -> dict[str, str]:
        line = {"line": self.metric} if self.metric is not None and "{}" in self.metric else {}
        return {"better": self.better or self._quality or "lower", **line, **self._logged}

    @property
    def _logged(self) -> dict[str, str]:
        """Where the program logs the metric; empty if it reports or prints it."""
        tracker, _colon, tag = (self.metric or "").partition(":")
        return {"from": tracker, "tag": tag} if tracker in TRACKER_VARIABLES and tag and "{}" not in tag else {}

    def _primary(self, times: CheckedTimes | None) -> str:
        if self.metric is not None:
            return self.declared or self.metric
        if times is not None and self.takes_turns(times):
            return "cpu_s" if times.marks == "process" else CPU_STEP
        return {"process": "process_s", "steps": "step_s", "tokens": "tokens_per_s"}[
            times.marks if times else "process"
        ]

    def _question(self) -> str:
        what = f"improve {self.declared or self.metric} of" if self.metric else "speed up"
        return " ".join(f"Does {self.change} {what} {Path(self.command[-1]).name}?".split())[:500]

    def takes_turns(self, times: CheckedTimes) -> bool:
        """Return whether the trials of a block take turns, on busy cores or to compare processor time.

        They do so after marked steps if there are any.
        """
        marked = times.marks != "process"
        metrics = (CPU_STEP, *WINDOW_METRICS) if marked else ("cpu_s",)
        decides = self.metric is None or self.metric in metrics
        sized = times.cpu_step_s is not None if marked else times.step_s is None
        able = times.node_class == "cpu" and times.can_take_turns and sized
        by_work = self.metric in ("cpu_s", CPU_STEP)  # blocks then count under any load, also one that comes later
        able = able and decides and self.may_take_turns and (by_work or not times.is_quiet)
        return able and len(self.variants) < MAX_TRIALS - 1

    def remarks(self, times: CheckedTimes) -> Iterator[str]:
        """Yield lines about what a short loop and a busy machine change."""
        wanted = {} if times.step_s is None else self._steps(replace(times, own_steps=None))
        if wanted and self._steps(times) != wanted:
            own = wording.counted(times.own_steps or 0, "step")
            yield f"the program's loop has {own}, so a trial has no more; if it can go on: --steps {wanted['timed']}"
        yield from self.of_busy_cores(times)

    def of_busy_cores(self, times: CheckedTimes) -> Iterator[str]:
        """Yield lines about what a busy machine changes."""
        if self.takes_turns(times):
            unmarked = times.marks == "process"
            turns = "half a second" if unmarked else wording.counted(self._steps(times)["slice"], "step")
            yield f"{'' if times.is_quiet else 'the machine is busy: '}the trials of a block take turns of {turns}"
            if self.metric is None:
                by_time = {"process": "process_s", "steps": "step_s", "tokens": THROUGHPUT}[times.marks]
                by_work = self._primary(times)
                yield f"their processor time decides ({by_work}), which no waiting is in; by time: --metric {by_time}"
        elif not times.is_quiet:
            yield "the machine is busy: blocks count all the same (max_foreign_load: 99%), with wider intervals;"
            yield "where the change is in the work of the processors, --metric cpu_s may need fewer blocks"

    def _steps(self, times: CheckedTimes) -> dict[str, int]:
        """Return the steps of a trial: as many as its share of the time allows, in turns a fixed work."""
        window_s = min(_MOST_WINDOW_S, max(_LEAST_WINDOW_S, _TRIALS_S / (3 * self.blocks) - times.start_s))
        in_turns = self.takes_turns(times)
        needed = _WORK_S / max(times.cpu_step_s or 0.0, 1e-9) if in_turns else window_s / max(times.step_s or 0.0, 1e-9)
        timed = self.steps or min(_MOST_STEPS, max(_LEAST_STEPS, math.ceil(needed)))
        warmup, own = max(3, min(100, timed // 10)), times.own_steps
        if self.steps is None and own is not None and 1 + warmup + timed > own:
            warmup = max(1, min(warmup, own // 10))
            timed = own - 1 - warmup
        turns = turns_of(timed, times.cpu_step_s or 0.0) if in_turns else {}
        return {"warmup": warmup, "timed": timed, **turns}

    def expected_s(self, times: CheckedTimes) -> float:
        """Return how long all trials take, with a control, on a machine like that of the check."""
        trial_s = times.longest_s
        if times.step_s is not None:
            steps = self._steps(times)
            trial_s = times.start_s + (1 + steps["warmup"] + steps["timed"]) * times.step_s
        return 3 * self.blocks * trial_s

    def _limits(self, times: CheckedTimes | None) -> dict[str, Any]:
        """Return limits far beyond the estimate, and at least the usual ones."""
        minutes = 0.0 if times is None else 5 * self.expected_s(times) / 60
        trial = math.ceil(minutes / (3 * self.blocks))
        return {"trial": f"{max(20, trial)}m", "device_minutes": max(180, math.ceil(minutes))}


def turns_of(timed: int, step_s: float) -> dict[str, int]:
    """Return the steps of a window, at most `timed`, and of a turn; a step takes `step_s` of processor time."""
    size = max(1, min(timed // 2, round(_TURN_WORK_S / max(step_s, 1e-9))))
    return {"timed": max(timed - timed % (2 * size), 2 * size), "slice": size}


def asked_change(
    command: tuple[str, ...],
    *,
    changes: tuple[str, ...] = (),
    env: Mapping[str, str] = MappingProxyType({}),
    commit: str | None = None,
    revision: str = "",
    **rule: Any,
) -> AskedQuestion:
    """Return the question about one change of a command line. Raises SpecError without a change.

    Args:
        command: the baseline.
        changes: arguments of the variant: each replaces the one of the same name, or is added.
        env: variables of the variant.
        commit: whole name of the commit whose code is the variant.
        revision: what its author calls that commit.
        rule: other fields of the question.

    """
    shared, args = divided(command)
    merged = merged_arguments(args, changes)
    if not env and not commit and merged == args:
        has = f"the command has {shlex.join(changes)} already" if changes else "no change was given"
        detail = f"nothing differs from the baseline: {has}; give another --vs, --vs-env or --vs-commit"
        raise SpecError([SpecProblem(pointer="--vs", detail=detail, hint="ablate ask --vs='--lr 2e-3' -- ...")])
    variant: dict[str, Any] = {"args": list(merged)} if changes else {}
    variant |= {"env": dict(env)} if env else {}
    variant |= {"code": {"commit": commit}} if commit else {}
    words = [_in_short(word) for word in (*changes, *(f"{key}={value}" for key, value in env.items()))]
    name = slug(" ".join([*words, revision]))[:40].strip("-") or "variant"
    name = f"{name}-variant" if name in (BASELINE, CONTROL) else name
    commit_name = _commit_name(commit, revision) if commit else ""
    change = " and ".join(filter(None, [" ".join(words), f"the code of {commit_name}" if commit else ""]))
    arms: dict[str, Any] = {"baseline": {"args": list(args)}, "variants": {name: variant}}
    return AskedQuestion(name=f"ask-{name}", change=change, command=shared, commit_name=commit_name, **arms, **rule)


def _in_short(word: str) -> str:
    """Return an argument with the last part of an absolute path only."""
    return re.sub(r"(^|=)/\S*/(?=[^/\s])", r"\1", word)


def _commit_name(commit: str, revision: str) -> str:
    short = commit[:12]
    return f"commit {short}" if commit.startswith(revision) else f"{revision} ({short})"


def slug(text: str) -> str:
    """Return a text as a name."""
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")


def divided(command: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the program with its script, and its arguments, in which arms may differ."""
    for number, word in enumerate(command):
        if number and command[number - 1] == "-m":
            return tuple(command[: number + 1]), tuple(command[number + 1 :])
        if word.endswith(_SCRIPT) or (number and not word.startswith("-") and Path(word).is_file()):
            return tuple(command[: number + 1]), tuple(command[number + 1 :])
    return tuple(command[:1]), tuple(command[1:])


def check_devices() -> None:
    """Raise StackError if another folder's worker uses the devices of this machine. Call it before any work."""
    from ablate.service.stack import control  # imports the settings of the service
    from ablate.service.stack.layout import home_files

    control.check_devices(home_files())


def checked(
    question: AskedQuestion, check: Callable[[AskedQuestion], tuple[int, CheckedTimes]]
) -> tuple[int, AskedQuestion, CheckedTimes]:
    """Check a question, and again at the seed of its program if that is needed.

    Returns the exit code of `ablate check`, the question that was checked last, and its times.
    """
    code, times = check(question)
    own = question.with_own_seed(times.seed)
    if not code or own is None:
        return code, question, times
    err().print(f"the program trains with seed {times.seed}, so all blocks do")
    code, times = check(own)
    return code, own, times

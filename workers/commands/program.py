"""Run a user's command as a trial: start it in a copy of its code, and collect the marks of its steps.

The process of the trial starts the command and stays its parent. It receives the program's messages with the kernel's
stamps and writes the step file and the result, which the program cannot reach.
"""

import json
import math
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.program_report import OUT, ProgramReport
from ablate.experiments.system.isolation import Isolation
from ablate.experiments.system.processes import family_cpu_s
from ablate.model.errors import DataError
from ablate.model.host_load import HostLoad
from ablate.model.measurements import Step
from ablate.workers.commands.advice import ProgramPlace
from ablate.workers.commands.code_copy import link_data
from ablate.workers.commands.device_samples import DeviceSamples
from ablate.workers.commands.evaluation import Evaluated, evaluate
from ablate.workers.commands.program_end import Follower, ProgramRun, ProgramWatch, program_failure, run_to_end
from ablate.workers.commands.program_socket import (
    EndedSteps,
    LoopBegan,
    Mark,
    ProgramMessage,
    ProgramSocket,
    TurnWanted,
    WindowBegan,
    WindowEnded,
)
from ablate.workers.commands.program_start import ProgramFolders
from ablate.workers.commands.ranks import ProgramMarks, ProgramRank
from ablate.workers.isolation.node_secrets import Mask
from ablate.workers.paths import remove_tree
from ablate.workers.trials.result import TrialOrder, TrialResult
from ablate.workers.trials.turns import ProgramTurns, all_stopped


def run_program(order: TrialOrder) -> TrialResult:
    """Run the command of `order` to its end, then its evaluation; return the result, which may be a failure."""
    config, folders = order.program, program_folders(order)
    place, evaluated = ProgramPlace.of(order, config, config.argv(out=str(folders.out))), None
    with order.paths.log.open("a+b") as log:
        try:
            ran = run_marked(order, folders, log)
        except DataError as error:
            message = place.advised(str(error))
            sys.stdout.write(f"{message}\n")
            return TrialResult.partial(failure_class=FailureClass.USER_ERROR, message=message)
        failure = program_failure(config, ran.end)
        if failure is not None:
            failure = failure[0], place.advised(Mask(order.secrets).text(failure[1]))
        elif config.evaluate is not None:
            evaluated = evaluate(order, ran.end, log)
            failure = evaluated.failure
    remove_tree(folders.working)
    return finished(order, ran, failure, evaluated)


def finished(
    order: TrialOrder,
    ran: ProgramRun,
    failure: tuple[FailureClass, str] | None,
    evaluated: Evaluated | None = None,
) -> TrialResult:
    """Return the result of a trial whose program has ended."""
    code = ran.marks.package if order.dataset is None else f"sha256:{order.dataset.name}"
    result = result_of(order.program, ran, evaluated, code=code)
    if failure is not None:
        result = result.model_copy(update={"failure_class": failure[0], "message": failure[1]})
    return Mask(order.secrets).document(result)


def program_folders(order: TrialOrder) -> ProgramFolders:
    """Make the folders of a program in its trial."""
    out = order.paths.folder / "out"
    home = None if order.isolation is None else out  # the home of the worker's user is closed
    folders = ProgramFolders(working=_own_folder(order), out=out, home=home)
    link_data(order.program, folders.working)
    out.mkdir()
    return folders


def run_marked(
    order: TrialOrder,
    folders: ProgramFolders,
    log: BinaryIO,
    *,
    variables: Mapping[str, str] | None = None,
    forward: Callable[[Sequence[ProgramMessage]], None] = lambda _messages: None,
) -> ProgramRun:
    """Run a program with all its processes to the end. Raises DataError if it cannot be started.

    `variables` are added to its environment. `forward` gets the messages that have arrived at each look.
    """
    config, load, began = order.program, Load(), time.monotonic()
    turns = None if order.slice_pipe is None else ProgramTurns(order.slice_pipe, by_time=config.turns)
    samples = DeviceSamples(config.devices if order.device_type == "cuda" else 0, on_host=order.device_type == "cpu")
    lines = config.lines if config.evaluate is None else {}  # its own lines are those of the evaluation
    with order.paths.steps.open("w", buffering=1, encoding="utf-8") as steps:
        progress = MarksFollower(config, steps, load, samples, forward, turns)
        ran = run_to_end(
            order, config, folders, log, follower=progress, lines=lines, variables=variables, reach=_reach(order)
        )
    measured = _measured(config, ran.marks, load, _peak_bytes(ran.marks, on_host=order.device_type == "cpu"))
    waited_s = 0.0 if turns is None else turns.waited_s
    if turns is not None:
        measured["waited_s"] = waited_s
    if load.window_cpu_s is not None:
        measured["cpu_step_s"] = load.window_cpu_s / config.steps.timed
    if ran.ended_at is not None:
        measured |= {"process_s": ran.ended_at - began - waited_s, "cpu_s": family_cpu_s()}
    return replace(ran, samples=samples, measured=measured)


def _reach(order: TrialOrder) -> Isolation | None:
    """Return what the program may use where an evaluation has code of its own, which may contain the right answers."""
    if order.isolation is None or order.evaluation in (None, order.dataset):
        return None
    return replace(
        order.isolation, readable=tuple(path for path in order.isolation.readable if path != order.evaluation)
    )


def _measured(config: ProgramArm, marks: ProgramMarks, load: "Load", peak: tuple[int, int] | None) -> dict[str, Any]:
    """Return what was measured beside the steps."""
    measured: dict[str, Any] = {"foreign_load": load.foreign, "stolen_load": load.stolen}
    if config.attested:
        measured |= {"facts": dict(marks.attested), "flops_per_step": config.flops_per_step}
    if peak is not None:
        measured |= {"peak_allocated_bytes": peak[0], "peak_reserved_bytes": peak[1]}
    return measured


def _own_folder(order: TrialOrder) -> Path:
    """Return a folder with a copy of the code, which this trial may change."""
    folder = order.paths.folder / "code"
    if order.dataset is None:
        folder.mkdir()
    else:
        shutil.copytree(order.dataset, folder, symlinks=True)
    return folder


class Load:
    """Shares of the cores' time that others took: during the window of the first rank, or during a whole process."""

    def __init__(self) -> None:
        self._new = partial(HostLoad, _own_cpu_s)
        self._measured = self._new()
        self._in_window = False
        self.foreign: float | None = None
        self.stolen: float | None = None
        self._cpu_before_s: float | None = None
        self.window_cpu_s: float | None = None
        """Processor seconds of the program from the begin of the window to its end; None without both."""

    def window_began(self) -> None:
        """Measure from here on, or again after a slice."""
        if self._in_window:
            self._measured.resume()
        else:
            self._measured, self._in_window = self._new(), True

    def window_ended(self) -> None:
        """Take the window, or the slices of it so far."""
        if self._in_window:
            self._take()
            self._measured.pause()

    def note_cpu(self) -> None:
        """Note the processor time of the program: before its window at first, then at what may be its end."""
        if self._cpu_before_s is None:
            self._cpu_before_s = family_cpu_s()
        else:
            self.window_cpu_s = family_cpu_s() - self._cpu_before_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Measure nothing meanwhile."""
        self._measured.pause()
        try:
            yield
        finally:
            self._measured.resume()

    def process_ended(self) -> None:
        """Take the whole process unless it had a window."""
        if not self._in_window:
            self._take()

    def _take(self) -> None:
        shares = self._measured.shares()
        self.foreign, self.stolen = shares.foreign, shares.stolen


def _own_cpu_s() -> float:
    """Return the processor seconds of this process, of its descendants, and of those that ended."""
    return time.process_time() + family_cpu_s()


@dataclass(frozen=True)
class MarksFollower(Follower):
    """Stores messages and writes the steps of the first rank for people who watch."""

    config: ProgramArm
    steps: TextIO
    load: Load
    samples: DeviceSamples
    forward: Callable[[Sequence[ProgramMessage]], None] = lambda _messages: None
    turns: ProgramTurns | None = None
    """None unless the trial runs in slices."""

    def take(self, receiver: ProgramSocket, marks: ProgramMarks, watch: ProgramWatch) -> None:
        """Take the messages that have arrived."""
        self.samples.sample()
        messages = list(receiver.messages())
        self.forward(messages)
        for arrived in messages:
            before = marks.round
            message = self.note(arrived, marks)
            if marks.round != before:
                watch.forget_ranks()
            if isinstance(message, LoopBegan) and message.closes and arrived.sender > 0:
                watch.follow_rank(message.rank, arrived.sender)
            if isinstance(message, TurnWanted):
                self._wait()
                marks.ranks[message.rank].turn_began = time.monotonic()
            if isinstance(message, TurnWanted | None):
                receiver.answer(arrived)  # of a wrong message, too: its trial fails, and nobody should wait for that
        if self.turns is not None and self.turns.is_over and not watch.first_has_ended:
            with all_stopped(), self.load.paused():
                self.turns.wait()

    def _wait(self) -> None:
        """Note the processor time while the program waits; stop it until the others have run their slices."""
        if self.turns is None:
            self.load.note_cpu()
            return
        with all_stopped():
            self.load.note_cpu()
            self.turns.wait()

    def note(self, arrived: ProgramMessage, marks: ProgramMarks) -> Mark | None:
        """Store a message; return it, None if it is wrong or late."""
        before = marks.round
        message = marks.take(arrived.content, arrived.seen, arrived.sender)
        if marks.round != before:
            self.steps.seek(0)
            self.steps.truncate()
        if message is not None and message.rank == 0:
            self._show(message, marks)
        return message

    def ended(self) -> None:
        """Notice that the program has ended."""
        self.load.process_ended()

    def _show(self, message: Mark, marks: ProgramMarks) -> None:
        match message:
            case WindowBegan():
                self.load.window_began()
                if not self.config.steps.slice:  # the processors are not the trial's alone where trials take turns
                    self.samples.energy.begin()
            case WindowEnded():
                self.samples.energy.end()
                self.load.window_ended()
            case EndedSteps():
                for index, *_rest in message.steps:
                    step = _step(self.config, [marks.ranks[0]], marks.ranks[0], index, None)
                    self.steps.write(json.dumps(step.model_dump()) + "\n")
                sys.stdout.flush()


def _peak_bytes(marks: ProgramMarks, *, on_host: bool) -> tuple[int, int] | None:
    """Return the peaks over all ranks, allocated and reserved; on the host, the largest resident set of a process."""
    if on_host:  # what the program says does not count where the kernel knows
        resident = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return resident, resident
    peaks = [rank.memory for rank in marks.ranks.values() if rank.memory is not None]
    return (max(one[0] for one in peaks), max(one[1] for one in peaks)) if peaks else None


def result_of(config: ProgramArm, ran: ProgramRun, evaluated: Evaluated | None, *, code: str | None) -> TrialResult:
    """Return the measurements: the times of the slowest rank, the tokens of all, and what the evaluation measured."""
    marks, samples = ran.marks, ran.samples
    reported = ran.end.reported if evaluated is None else {**ran.end.reported, **evaluated.measured}
    contradicted = ran.end.contradicted if evaluated is None else evaluated.contradicted(ran.end)
    loops = list(marks.loops.values())
    whole = [rank for rank in loops if rank.is_whole(config.steps)]
    slowest = max(whole, key=lambda rank: rank.longest_s, default=None)
    steps: tuple[Step, ...] = ()
    if slowest is not None:
        steps = tuple(_step(config, loops, slowest, index, samples) for index in range(config.steps.total))
    first = loops[0] if loops else ProgramRank()
    clocked = slowest is not None and math.isfinite(slowest.window_seen_s)
    report = ProgramReport(
        argv=tuple(config.argv(out=OUT)),
        code=code,
        interpreter=first.interpreter,
        packages=first.packages,
        seed=first.seed,
        ranks=len(loops),
        rank_tokens=_timed_tokens(config, loops) if len(loops) > 1 else None,
        rank_step_s=tuple(rank.own_step_s(config.steps) for rank in loops) if len(whole) == len(loops) > 1 else None,
        rank_nodes=tuple(ran.node_of_rank[rank] for rank in marks.loops) if ran.node_of_rank else None,
        window_s=slowest.window_s if clocked and slowest else None,
        window_seen_s=slowest.window_seen_s if clocked and slowest else None,
        loading_s=slowest.loading_s(config.steps) if clocked and slowest else None,
        energy_j=samples.energy.joules if clocked else None,
        energy_of=samples.energy.of if clocked and samples.energy.joules is not None else None,
        reported={name: value for name, value in reported.items() if math.isfinite(value)},
        evaluation=None if evaluated is None else evaluated.report,
        contradicted=contradicted,
        curves=ran.curves,
        kernels=tuple(marks.kernels),
        live=tuple(sorted(name for name, value in marks.attested.items() if value is True)),
        resumed_from=first.first if config.resume_at is not None and first.first else None,
        repeated_otherwise=_repeated_otherwise(marks.before, first),
        exit_code=ran.end.exit_code,
    )
    closed = None if slowest is None else slowest.closed
    return TrialResult.partial(
        peak_driver_bytes=samples.peak_bytes,
        program=report,
        kernel_facts=marks.kernel_facts,
        step_trace=marks.trace,
        program_steps=steps,
        own_steps=min((rank.total for rank in loops if rank.total is not None), default=None),
        training_began_s=None if slowest is None else slowest.began,
        training_s=0.0
        if slowest is None or closed is None
        else closed - slowest.began - ran.measured.get("waited_s", 0.0),
        **ran.measured,
    )


def _repeated_otherwise(before: Mapping[int, float], rank: ProgramRank) -> tuple[int, float, float] | None:
    """Return the first step that a program ran again with another loss, and both losses; None without one."""
    again = [(index, before[index], rank.losses[index]) for index in sorted(before.keys() & rank.losses.keys())]
    return next((one for one in again if one[1] != one[2] and math.isfinite(one[1]) and math.isfinite(one[2])), None)


def _timed_tokens(config: ProgramArm, ranks: Iterable[ProgramRank]) -> tuple[int, ...]:
    timed = [index for index in range(config.steps.total) if config.steps.phase_of(index) == "timed"]
    return tuple(sum(rank.tokens.get(index, 0) for index in timed) for rank in ranks)


def _step(
    config: ProgramArm, ranks: Iterable[ProgramRank], clock: ProgramRank, index: int, samples: DeviceSamples | None
) -> Step:
    """Return step `index`: its times from `clock`, its tokens and mean loss over `ranks`."""
    before = clock.start_of(index, config.steps)
    shares = [(rank.tokens.get(index, 0) or 1, rank.losses[index]) for rank in ranks if index in rank.losses]
    return Step(
        index=index,
        phase=config.steps.phase_of(index),
        seconds=clock.step_s(index, config.steps),
        tokens=sum(rank.tokens.get(index, 0) for rank in ranks),
        loss=_mean_loss(shares),
        began_s=before - clock.began,
        ended_s=clock.ended[index] - clock.began,
        clock_mhz=None if samples is None else samples.clock_at(clock.ended[index]),
    )


def _mean_loss(shares: Sequence[tuple[int, float]]) -> float | None:
    """Return the mean of losses by their weights, exactly the loss if there is one."""
    if len(shares) < 2:
        return shares[0][1] if shares else None
    whole = sum(weight for weight, _loss in shares)
    return sum(weight / whole * loss for weight, loss in shares)

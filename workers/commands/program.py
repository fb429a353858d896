"""Run a user's command as a trial: start it in a copy of its code, and collect the marks of its steps.

The process of the trial starts the command and stays its parent. It receives the program's messages with the kernel's
stamps and writes the step file and the result, which the program cannot reach.
"""

import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.program_report import OUT, ProgramReport, printable
from ablate.experiments.system.kernel_limits import keep_apart, landlock_version
from ablate.experiments.system.processes import descendants_of, die_with_parent, end_all
from ablate.model.errors import DataError
from ablate.model.measurements import Step
from ablate.workers.commands.advice import ProgramPlace
from ablate.workers.commands.code_copy import link_data
from ablate.workers.commands.device_samples import DeviceSamples
from ablate.workers.commands.printed_results import ProgramOutput
from ablate.workers.commands.program_end import ProgramEnd, ProgramWatch, not_finite, program_failure
from ablate.workers.commands.program_socket import (
    EndedSteps,
    LoopBegan,
    Mark,
    ProgramMessage,
    ProgramSocket,
    WindowBegan,
    WindowEnded,
)
from ablate.workers.commands.program_start import start_problem
from ablate.workers.commands.ranks import ProgramMarks, ProgramRank
from ablate.workers.isolation.environment import outside_variables
from ablate.workers.isolation.node_secrets import Mask
from ablate.workers.paths import has_file_of, remove_tree
from ablate.workers.trials import failures
from ablate.workers.trials.result import MODULE_FOLDER, TrialOrder, TrialResult

VARIABLE = "ABLATE_TRIAL"
"""Variable with the settings of a trial for the module, as JSON."""
_LOG_BYTES = 2**20
"""End of the log in which the last exception is searched."""
_EXCEPTION = re.compile(r"(?:\[rank\d+\]: *)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)(?:: .*)?)")
_TICKS = os.sysconf("SC_CLK_TCK")


def run_program(order: TrialOrder) -> TrialResult:
    """Run the command of `order` to its end and return its result, which may be a failure."""
    config = order.program
    folder, out = _own_folder(order), order.paths.folder / "out"
    link_data(config, folder)
    out.mkdir()
    receiver, mask = ProgramSocket(), Mask(order.secrets)
    marks, oom_before, began = ProgramMarks(config, mask), failures.kernel_oom_kills(), time.monotonic()
    argv, environment = config.argv(out=str(out)), _environment(order, config, receiver.address, out)
    load, samples = _Load(), DeviceSamples(config.devices if order.device_type == "cuda" else 0)
    steps_file = order.paths.steps.open("w", buffering=1, encoding="utf-8")
    log_file, place = order.paths.log.open("a+b"), ProgramPlace.of(order, config, argv)
    with receiver, steps_file as steps, log_file as log, ProgramOutput(log.fileno(), config.lines) as output:
        try:
            process = _start(argv, folder, environment, output.writer)
        except DataError as error:
            message = place.advised(str(error))
            sys.stdout.write(f"{message}\n")
            return TrialResult.partial(failure_class=FailureClass.USER_ERROR, message=message)
        output.follow(process.kill)
        watch = ProgramWatch(process, receiver.fileno())
        _collect(receiver, _Progress(config, steps, marks, load, samples, watch))
        load.process_ended()
        end_all(lambda: descendants_of([os.getpid()]), grace_s=0)  # nothing of the program may touch the result
        process.wait()
        cpu_s = _ended_cpu_s()
        printed = output.finish()
        last_line = _last_line(_end_of(log))  # the open file, because the program may have removed its name
    failing = process.returncode != 0 or marks.failed is not None
    reached = failing and has_file_of(order.paths.folder, order.most_bytes)
    remove_tree(folder)
    peak = _peak_bytes(marks, on_host=order.device_type == "cpu")
    reported = {**printed.values, **marks.reported, **not_finite(printed.values)}
    end = ProgramEnd(
        exit_code=process.returncode,
        oom_kills=failures.kernel_oom_kills() - oom_before,
        reported=reported,
        contradicted=printed.contradicting(reported),
        unread=printed.problem,
        last_line=last_line,
        failed=marks.failed,
        wrong=marks.wrong,
        loops=marks.loops,
        lost=watch.lost,
        stopped=watch.stopped,
        left=watch.left,
        most_bytes=order.most_bytes,
        reached=reached,
    )
    failure = program_failure(config, end)
    code = marks.package if order.dataset is None else f"sha256:{order.dataset.name}"
    result = result_of(config, marks, end, samples, code=code)
    extra = _measured(config, marks, load, peak)
    if watch.ended_at is not None:
        extra |= {"process_s": watch.ended_at - began, "cpu_s": cpu_s}
    if failure is not None:
        extra |= {"failure_class": failure[0], "message": place.advised(mask.text(failure[1]))}
    return mask.document(result.model_copy(update=extra))


def _measured(config: ProgramArm, marks: ProgramMarks, load: "_Load", peak: tuple[int, int] | None) -> dict[str, Any]:
    """Return what was measured beside the steps."""
    measured: dict[str, Any] = {"foreign_load": load.foreign, "stolen_load": load.stolen}
    if config.attested:
        measured |= {"facts": dict(marks.attested), "flops_per_step": config.flops_per_step}
    if peak is not None:
        measured |= {"peak_allocated_bytes": peak[0], "peak_reserved_bytes": peak[1]}
    return measured


def _start(argv: list[str], folder: Path, environment: Mapping[str, str], output: int) -> "subprocess.Popen[bytes]":
    """Start the program. Raises DataError with the reason why it cannot be started."""
    problem = start_problem(argv[0], folder, environment["PATH"])
    try:
        if problem is None:
            return subprocess.Popen(
                argv,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a program may signal its whole group, and this process is not of it
                preexec_fn=_begin,
            )
    except OSError as error:
        problem = start_problem(argv[0], folder, environment["PATH"], error)
    raise DataError(problem)


def _begin() -> None:
    """Run in the process of the program, before it: end with the trial's process, which it can then not change."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # a worker in the background of a shell ignores some
    die_with_parent()
    if landlock_version():
        keep_apart()


def _own_folder(order: TrialOrder) -> Path:
    """Return a folder with a copy of the code, which this trial may change."""
    folder = order.paths.folder / "code"
    if order.dataset is None:
        folder.mkdir()
    else:
        shutil.copytree(order.dataset, folder, symlinks=True)
    return folder


def _environment(order: TrialOrder, config: ProgramArm, address: str, out: Path) -> dict[str, str]:
    """Return the environment of the program: that of this process, its arm's variables, and the module's settings."""
    variables = outside_variables(devices=config.devices if order.device_type == "cuda" else 0)
    prefix = sys.prefix if order.program_prefix is None else str(order.program_prefix)
    variables["PATH"] = os.pathsep.join([f"{prefix}/bin", variables.get("PATH", os.defpath)])
    variables["VIRTUAL_ENV"] = prefix
    variables |= order.environment
    if order.isolation is not None:
        variables["HOME"] = str(out)  # the home of the worker's user is closed
    variables |= {**config.env, **order.secrets}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(MODULE_FOLDER), config.env.get("PYTHONPATH")]))
    settings = {
        "socket": address,
        "seed": config.seed,
        "out": str(out),
        "code": None if order.dataset is None else str(order.paths.folder / "code"),
        "warmup": config.steps.warmup,
        "timed": config.steps.timed,
        "profile": config.profile,
        "trace": order.trace,
        **config.trial_settings,
    }
    return {**variables, VARIABLE: json.dumps(settings)}


class _Load:
    """Shares of the cores' time that others took: during the window of the first rank, or during a whole process."""

    def __init__(self) -> None:
        from ablate.model.training.measurement import HostLoad

        self._new = partial(HostLoad, _own_cpu_s)
        self._measured = self._new()
        self._in_window = False
        self.foreign: float | None = None
        self.stolen: float | None = None

    def window_began(self) -> None:
        self._measured, self._in_window = self._new(), True

    def window_ended(self) -> None:
        if self._in_window:
            self._take()

    def process_ended(self) -> None:
        """Take the whole process unless it had a window."""
        if not self._in_window:
            self._take()

    def _take(self) -> None:
        shares = self._measured.shares()
        self.foreign, self.stolen = shares.foreign, shares.stolen


def _ended_cpu_s() -> float:
    """Return the processor seconds of the descendants of this process that ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def _own_cpu_s() -> float:
    """Return the processor seconds of this process, of its descendants, and of those that ended."""
    spent = time.process_time() + _ended_cpu_s()
    for pid in descendants_of([os.getpid()]):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        spent += sum(int(ticks) for ticks in fields[11:15]) / _TICKS
    return spent


@dataclass(frozen=True)
class _Progress:
    """Stores messages and writes the steps of the first rank for people who watch."""

    config: ProgramArm
    steps: TextIO
    marks: ProgramMarks
    load: _Load
    samples: DeviceSamples
    watch: ProgramWatch

    def take(self, receiver: ProgramSocket) -> None:
        for message in receiver.messages():
            self._take(message)

    def _take(self, arrived: ProgramMessage) -> None:
        before = self.marks.round
        message = self.marks.take(arrived.content, arrived.seen)
        if self.marks.round != before:
            self.watch.forget_ranks()
            self.steps.seek(0)
            self.steps.truncate()
        if message is None:
            return
        if isinstance(message, LoopBegan) and message.closes and arrived.sender > 0:
            self.watch.follow_rank(message.rank, arrived.sender)
        if message.rank == 0:
            self._show(message)

    def _show(self, message: Mark) -> None:
        match message:
            case WindowBegan():
                self.load.window_began()
            case WindowEnded():
                self.load.window_ended()
            case EndedSteps():
                for index, *_rest in message.steps:
                    step = _step(self.config, [self.marks.ranks[0]], self.marks.ranks[0], index, None)
                    self.steps.write(json.dumps(step.model_dump()) + "\n")
                sys.stdout.flush()


def _collect(receiver: ProgramSocket, progress: _Progress) -> None:
    """Receive messages until the program has ended and none is left."""
    watch = progress.watch
    over = False
    while not over:
        watch.wait()
        progress.samples.sample()
        progress.take(receiver)
        over = watch.is_over(progress.marks, progress.config)
    progress.take(receiver)
    watch.close()


def _peak_bytes(marks: ProgramMarks, *, on_host: bool) -> tuple[int, int] | None:
    """Return the peaks over all ranks: allocated and reserved; on the host, the largest resident set of a process."""
    peaks = [rank.memory for rank in marks.ranks.values() if rank.memory is not None]
    if peaks:
        return max(one[0] for one in peaks), max(one[1] for one in peaks)
    if not on_host:
        return None
    resident = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return resident, resident


def _end_of(log: BinaryIO) -> bytes:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - _LOG_BYTES))
    return log.read(_LOG_BYTES)


def _last_line(end: bytes) -> str:
    """Return the line of a log that says most about its end: the last exception, else the last one with a word.

    torchrun ends its log with a frame around a summary, in which the exception of a rank is missing.
    """
    lines = [line.strip() for line in end.decode("utf-8", "replace").splitlines()]
    named = [found[1] for line in lines if (found := _EXCEPTION.fullmatch(line)) and "ChildFailed" not in line]
    line = next((line for line in [*named[-1:], *reversed(lines)] if re.search(r"\w", line)), "its log is empty")
    return printable(line[:300])


def result_of(
    config: ProgramArm, marks: ProgramMarks, end: ProgramEnd, samples: DeviceSamples, *, code: str | None
) -> TrialResult:
    """Return the measurements: the times of the slowest rank, the tokens of all."""
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
        window_s=slowest.window_s if clocked and slowest else None,
        window_seen_s=slowest.window_seen_s if clocked and slowest else None,
        reported={name: value for name, value in end.reported.items() if math.isfinite(value)},
        contradicted=end.contradicted,
        kernels=tuple(marks.kernels),
        exit_code=end.exit_code,
    )
    closed = None if slowest is None else slowest.closed
    return TrialResult.partial(
        peak_driver_bytes=samples.peak_bytes,
        program=report,
        step_trace=marks.trace,
        program_steps=steps,
        training_began_s=None if slowest is None else slowest.began,
        training_s=0.0 if slowest is None or closed is None else closed - slowest.began,
    )


def _timed_tokens(config: ProgramArm, ranks: Iterable[ProgramRank]) -> tuple[int, ...]:
    timed = [index for index in range(config.steps.total) if config.steps.phase_of(index) == "timed"]
    return tuple(sum(rank.tokens.get(index, 0) for index in timed) for rank in ranks)


def _step(
    config: ProgramArm, ranks: Iterable[ProgramRank], clock: ProgramRank, index: int, samples: DeviceSamples | None
) -> Step:
    """Return step `index`: its times from `clock`, its tokens and mean loss over `ranks`."""
    before = clock.ended.get(index - 1, clock.began)
    if index == 1 + config.steps.warmup:
        before = max(before, clock.edges.get("window began", before))
    shares = [(rank.tokens.get(index, 0) or 1, rank.losses[index]) for rank in ranks if index in rank.losses]
    return Step(
        index=index,
        phase=config.steps.phase_of(index),
        seconds=clock.ended[index] - before,
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

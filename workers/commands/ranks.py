"""What a program has sent, by rank: each message fits those before it, and all must hold together at the end."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.digest import digest
from ablate.experiments.in_trial.ablate import MOST_RESULTS
from ablate.experiments.records.program_report import printable
from ablate.model.config import StepsConfig
from ablate.model.measurements import KernelFacts, StepTrace
from ablate.workers.commands.program_socket import (
    AttestedValues,
    EndedSteps,
    KernelTable,
    LoopBegan,
    Mark,
    PackageCode,
    RankRaised,
    ReportedValues,
    StepLoads,
    StepLosses,
    StepTokens,
    StepWaits,
    TracePart,
    TrialEnded,
    TurnWanted,
    WindowBegan,
    WindowEnded,
    read_message,
)
from ablate.workers.isolation.node_secrets import Mask

_MOST_ATTESTED, _MOST_KERNELS, _MOST_EVENTS = 256, 2_000, 4_000
"""Most attested values, kernels and events of a step of one trial: more would make the report of a block too large."""


@dataclass
class ProgramRank:
    """Messages of one process of the program. Moments are seconds of the monotonic clock of the machine."""

    began: float = math.nan
    process: int | None = None
    """The process that began it, by its own number of it."""
    sender: int = 0
    """The same by the kernel, 0 if it does not say."""
    world: int | None = None
    """Number of ranks that this one knows of."""
    total: int | None = None
    """Steps of its loop outside of a trial; None if it passes no number."""
    ended: dict[int, float] = field(default_factory=dict)
    """End of each step."""
    tokens: dict[int, int] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    """Steps whose last message has arrived."""
    first: int = 0
    """The step with which it went on after the program was killed."""
    waits: dict[int, float] = field(default_factory=dict)
    """Seconds of steps in which it waited for others."""
    loads: dict[int, float] = field(default_factory=dict)
    """Seconds of steps in which it waited for data."""
    edges: dict[str, list[float]] = field(default_factory=lambda: {"window began": [], "window ended": []})
    """Begins and ends of the window, or of each of its slices, by the program's clock."""
    seen: dict[str, list[float]] = field(default_factory=lambda: {"window began": [], "window ended": []})
    """The same moments by the kernel's stamps of the messages."""
    turns: int = 0
    """How often it waited for its turn."""
    turn_began: float = math.inf
    """When it got the last one, by the worker."""
    closed: float | None = None
    """End of the trial's `with` statement."""
    whole: bool = False
    """Whether it ended without an exception."""
    memory: tuple[int, int] | None = None
    interpreter: str | None = None
    packages: str | None = None
    seed: int | None = None

    @property
    def has_begun(self) -> bool:
        """Whether it began a training loop."""
        return not math.isnan(self.began)

    @property
    def window_s(self) -> float:
        """Seconds of the window by the program's clock."""
        return _between(self.edges)

    @property
    def window_seen_s(self) -> float:
        """Seconds of the window by the stamps."""
        return _between(self.seen)

    @property
    def longest_s(self) -> float:
        """Seconds of the window by the clock that gives more of them: a rank cannot hide by a clock that runs slow."""
        return max(self.window_s, 0.0 if math.isnan(self.window_seen_s) else self.window_seen_s)

    def step_s(self, index: int, steps: StepsConfig) -> float:
        """Return the seconds of a step; the window, or a slice of it, begins with its first one."""
        return self.ended[index] - self.start_of(index, steps)

    def start_of(self, index: int, steps: StepsConfig) -> float:
        """Return the moment at which a step began."""
        before = self.ended.get(index - 1, self.began)
        number, later = divmod(index - 1 - steps.warmup, steps.slice or steps.timed)
        begins = self.edges["window began"]
        return max(before, begins[number]) if not later and 0 <= number < len(begins) else before

    def own_step_s(self, steps: StepsConfig) -> float:
        """Return the median of the timed steps without the time in which it waited for others."""
        timed = [index for index in range(steps.total) if steps.phase_of(index) == "timed"]
        return statistics.median(self.step_s(index, steps) - self.waits.get(index, 0.0) for index in timed)

    def loading_s(self, steps: StepsConfig) -> float | None:
        """Return the seconds of the timed steps in which it waited for data; None if it does not say."""
        timed = (seconds for index, seconds in self.loads.items() if steps.phase_of(index) == "timed")
        return math.fsum(timed) if self.loads else None

    def forget_window(self) -> None:
        """Forget the window, which the rank is going to run again."""
        self.turns = 0
        for moments in (*self.edges.values(), *self.seen.values()):
            moments.clear()

    def order_problem(self, steps: StepsConfig) -> str | None:
        """Return which moments of a rank with all marks are in no possible order; None if they are in order.

        Every step takes time. The last one ends with the window.
        """
        marks = [(f"step {index}", self.ended[index]) for index in range(steps.total)]
        problem = _not_after([("the loop's begin", self.began), *marks[: 1 + steps.warmup]])
        for place, (part, begins, ends) in enumerate(zip(steps.slices, *self.edges.values(), strict=True), start=1):
            what = "the window" if not steps.slice else f"slice {place} of {len(steps.slices)}"
            problem = problem or _not_after([(f"{what}'s begin", begins), *(marks[index] for index in part)])
            if problem is None and begins < self.ended[part[0] - 1]:
                problem = f"marked {what}'s begin at {begins!r} s, before the end of step {part[0] - 1}"
            if problem is None and ends != self.ended[part[-1]]:
                problem = f"marked {what}'s end at {ends!r} s; its last step ended at {self.ended[part[-1]]!r} s"
            if problem is None and self.closed is not None and self.closed < ends:
                problem = f"closed its trial at {self.closed!r} s, before {what}'s end at {ends!r} s"
        return problem

    def is_whole(self, steps: StepsConfig) -> bool:
        """Return whether all moments of its steps and its window are there and in order."""
        return len(self.ended) == steps.total and self.has_window(steps) and self.order_problem(steps) is None

    def has_window(self, steps: StepsConfig) -> bool:
        """Return whether both ends of the window, or of each slice, are there."""
        return [len(moments) for moments in self.edges.values()] == [len(steps.slices)] * 2


def _between(edges: Mapping[str, Sequence[float]]) -> float:
    """Return the seconds between begins and ends; NaN if one is missing."""
    begins, ends = edges["window began"], edges["window ended"]
    if not begins or len(begins) != len(ends):
        return math.nan
    return math.fsum(end - begin for begin, end in zip(begins, ends, strict=True))


def _not_after(line: Sequence[tuple[str, float]]) -> str | None:
    """Say which moment of a line is not after the one before; None if all are."""
    for (earlier, before), (later, after) in pairwise(line):
        if after <= before:
            return f"marked the end of {later} at {after!r} s, not after {earlier} at {before!r} s"
    return None


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """An exception that left the trial of a rank."""

    rank: int
    kind: str
    """Module and name of its class."""
    message: str


class ProgramMarks:
    """All messages of a program, checked as they arrive."""

    def __init__(self, config: ProgramArm, mask: Mask = Mask({})) -> None:  # noqa: B008 - it never changes
        self._config, self._mask = config, mask
        self._total = config.steps.total
        self.round: tuple[str, int] = ("", 0)
        """Run and number of the round, of a launcher that starts all ranks again when one fails."""
        self.restarts = 0
        """How often this launcher may do so again."""
        self.ranks: dict[int, ProgramRank] = {}
        self.reported: dict[str, float] = {}
        self.attested: dict[str, bool | int | str] = {}
        self.package: str | None = None
        """Digest of the code of a recipe's package."""
        self.kernels: list[tuple[str, int, float]] = []
        self.kernel_facts: dict[str, KernelFacts] = {}
        self._trace_parts: dict[str, list[Any]] = {"names": [], "tracks": [], "events": [], "memory": []}
        self.trace: StepTrace | None = None
        self.was_killed = False
        """Whether the worker has killed the program, so that it begins again."""
        self.before: dict[int, float] = {}
        """Losses of the first rank before that."""
        self.failed: RankFailure | None = None
        """The first exception."""
        self.wrong: str | None = None
        """What is wrong with the first message that is wrong."""

    def take(self, content: bytes, seen: float, sender: int = 0) -> Mark | None:
        """Store one message that arrived at `seen` from process `sender`, 0 if nobody says.

        Return it, None if it is wrong or of an earlier round.
        """
        try:
            message = read_message(self._mask.masked(content))
            if self._is_late(message):
                return None
            rank = self.ranks.setdefault(message.rank, ProgramRank())
            if isinstance(message, LoopBegan) and rank.process is None:  # the first one, or after it was killed
                rank.sender = sender
            _check_sender(rank, message, sender)
            self._store(message, rank, seen)
        except (RecursionError, ValueError) as error:
            problem = f"the program sent a message that is not of the module ablate: {_words(error)}"
            self.wrong = self.wrong or printable(f"{problem}; message: {self._mask.masked(content)[:100]!a}")
            return None
        return message

    def _is_late(self, message: Mark) -> bool:
        """Return whether a message belongs to an earlier round; begin anew if it belongs to a later one."""
        if message.run == self.round[0] and message.round < self.round[1]:
            return True
        place = message.run, message.round
        if place != self.round and (message.run == self.round[0] or not self.loops):
            self.__dict__.update(ProgramMarks(self._config, self._mask).__dict__)
            self.round = place
        self.restarts = message.restarts
        return False

    def _store(self, message: Mark, rank: ProgramRank, seen: float) -> None:
        match message:
            case LoopBegan():
                self._begin(rank, message)
            case WindowBegan() | WindowEnded():
                self._store_edge(rank, message, seen)
            case TurnWanted():
                self._store_turn(rank, message)
            case EndedSteps() | StepLosses() | StepTokens() | StepWaits() | StepLoads():
                self._store_steps(rank, message)
            case KernelTable() | TracePart():
                if rank is self.ranks.get(0):
                    self._store_profile(message)
            case TrialEnded():
                rank.closed, rank.whole, rank.seed = message.at, message.whole, message.seed
                rank.packages = digest(dict(message.packages))
                rank.memory = message.memory or rank.memory
            case _:
                self._store_values(message)

    def _store_values(self, message: ReportedValues | AttestedValues | PackageCode | RankRaised) -> None:
        match message:
            case ReportedValues(values=values):
                if len(self.reported) <= MOST_RESULTS:  # the end of the program tells when there are more
                    self.reported.update(values)
            case AttestedValues():
                self._attest(message)
            case PackageCode(digest=package):
                self.package = package
            case RankRaised():
                failure = RankFailure(rank=message.rank, kind=message.type, message=message.message)
                self.failed = self.failed or failure

    def is_at(self, num_steps: int) -> bool:
        """Return whether every rank has marked this many steps with all that belongs to them."""
        loops = self.loops.values()
        worlds = {rank.world or 1 for rank in loops}
        return worlds == {len(loops)} and all(len(rank.ended) == len(rank.told) == num_steps for rank in loops)

    def begin_again(self) -> None:
        """Let the program, which was killed, go on from its checkpoint."""
        self.was_killed, self.before = True, dict(next(iter(self.loops.values())).losses)
        for rank in self.ranks.values():
            rank.process = None

    def _resume(self, rank: ProgramRank, message: LoopBegan) -> None:
        """Forget the steps that a rank is going to run again."""
        done = len(rank.ended)
        if not 0 < message.first <= done:
            self.wrong = self.wrong or (
                f"the program began with step {message.first} after it was killed at the end of step {done - 1}; "
                f"allowed: 1 to {done}, the one after its checkpoint, in trial.steps(first=...)"
            )
        for index in range(message.first, self._total):
            for values in (rank.ended, rank.tokens, rank.losses, rank.waits, rank.loads):
                values.pop(index, None)
        if message.first <= 1 + self._config.steps.warmup:
            rank.forget_window()
        rank.process, rank.first = message.process, message.first

    def _begin(self, rank: ProgramRank, message: LoopBegan) -> None:
        if self.was_killed and rank.has_begun and rank.process is None:
            self._resume(rank, message)
            return
        if rank.has_begun:
            self.wrong = self.wrong or (
                "the program marked two training loops; a trial has one"
                if message.process == rank.process
                else f"two processes report as rank {message.rank}: set RANK and WORLD_SIZE for each of them"
            )
            return
        if message.first:
            self.wrong = self.wrong or f"the program began with step {message.first}; a trial begins with step 0"
        if self._config.steps.slice and message.world != 1:
            self.wrong = self.wrong or (
                f"the program trains with {message.world} ranks, which cannot take turns with the other trials: "
                "leave workload.steps.slice out"
            )
        if self._config.turns:
            self.wrong = self.wrong or (
                "the program marks its steps, and its trials take turns between them: write steps: {slice: ...} "
                "instead of workload.turns"
            )
        rank.began, rank.process, rank.world = message.at, message.process, message.world
        rank.total = message.total
        rank.interpreter = f"{message.implementation} {message.python}"[:100]

    def _store_edge(self, rank: ProgramRank, message: WindowBegan | WindowEnded, seen: float) -> None:
        _check_begun(rank, message)
        moments, allowed = rank.edges[message.event], len(self._config.steps.slices)
        if len(moments) == allowed:
            raise ValueError(f"{message.event} {'twice' if allowed == 1 else f'more than {allowed} times'}")
        is_in_turn = rank.turns == len(moments) + 1 and message.at >= rank.turn_began
        if self._config.steps.slice and isinstance(message, WindowBegan) and not is_in_turn:
            raise ValueError(f"slice {len(moments) + 1} began before the turn of its trial")
        moments.append(message.at)
        rank.seen[message.event].append(seen)

    def _store_turn(self, rank: ProgramRank, message: TurnWanted) -> None:
        _check_begun(rank, message)
        most = len(self._config.steps.slices) + 1
        if rank.turns == most:
            raise ValueError(f"a wait for a turn after {most}")
        rank.turns, rank.turn_began = rank.turns + 1, math.inf

    def _store_steps(
        self, rank: ProgramRank, message: EndedSteps | StepLosses | StepTokens | StepWaits | StepLoads
    ) -> None:
        _check_begun(rank, message)
        match message:
            case EndedSteps(steps=rows):
                self._check_indices([row[0] for row in rows], rank)
                for index, ended, tokens, loss in rows:
                    rank.ended[index], rank.tokens[index] = ended, tokens
                    if loss is not None:
                        rank.losses[index] = loss
            case StepLosses(losses=losses):
                self._check_indices([index for index, _loss in losses])
                rank.losses.update(losses)
            case StepWaits(waits=waits):
                self._check_indices([index for index, _waited in waits])
                rank.waits.update(waits)
            case StepLoads(loads=loads):
                self._check_indices([index for index, _waited in loads])
                rank.loads.update(loads)
            case StepTokens(tokens=counts):
                self._check_indices([index for index, _count in counts])
                rank.tokens.update(counts)
                rank.told.update(index for index, _count in counts)

    def _check_indices(self, indices: list[int], rank: ProgramRank | None = None) -> None:
        """Raise ValueError for the index of no step, and for steps that `rank` has already marked."""
        outside = next((index for index in indices if index >= self._total), None)
        if outside is not None:
            raise ValueError(f"step {outside} of {self._total}")
        marked = set() if rank is None else set(rank.ended)
        for index in indices if rank is not None else ():
            if index in marked:
                raise ValueError(f"step {index} twice")
            marked.add(index)

    def _attest(self, message: AttestedValues) -> None:
        if len(self.attested.keys() | message.values.keys()) > _MOST_ATTESTED:
            raise ValueError(f"more than {_MOST_ATTESTED} attested values")
        for name, value in message.values.items():
            known = self.attested.setdefault(name, value)
            if type(known) is not type(value) or known != value:  # the ranks disagree
                self.attested[name] = "mixed"

    def _store_profile(self, message: KernelTable | TracePart) -> None:
        match message:
            case KernelTable(rows=rows):
                if len(self.kernels) + len(rows) > _MOST_KERNELS:
                    raise ValueError(f"more than {_MOST_KERNELS:,} kernels")
                self.kernels += [(name[:300], calls, spent_us) for name, calls, spent_us, _facts in rows]
                self.kernel_facts |= {row[0][:300]: row[3] for row in rows if row[3].model_dump()}
            case TracePart(part="left_out", rows=rows):
                parts = self._trace_parts
                names, tracks = ([printable(str(name)) for name in parts[part]] for part in ("names", "tracks"))
                whole = {**parts, "names": names, "tracks": tracks, "left_out": rows[0] if rows else None}
                self.trace = StepTrace.model_validate(whole)
            case TracePart(part=part, rows=rows):
                if len(self._trace_parts[part]) + len(rows) > _MOST_EVENTS:
                    raise ValueError(f"more than {_MOST_EVENTS:,} {part} of a step")
                self._trace_parts[part] += rows

    @property
    def loops(self) -> dict[int, ProgramRank]:
        """The ranks that began a training loop, by number."""
        return {number: rank for number, rank in sorted(self.ranks.items()) if rank.has_begun}


def _words(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"][1:]))
    return f"{place}: {first['msg']}, got {ascii(first['input'])[:60]}".removeprefix(": ")


def _check_begun(rank: ProgramRank, message: Mark) -> None:
    if not rank.has_begun:
        raise ValueError(f"'{message.event}' of rank {message.rank} came before its training loop began")


def _check_sender(rank: ProgramRank, message: Mark, sender: int) -> None:
    """Raise ValueError for the moments of a rank from another process: it can be early while the rank works."""
    timed = isinstance(message, WindowBegan | WindowEnded | TurnWanted | EndedSteps)
    if timed and rank.sender and sender and sender != rank.sender:
        raise ValueError(f"'{message.event}' of rank {message.rank} came from another process than the one that began")


def rank_problem(ranks: Mapping[int, ProgramRank], config: ProgramArm) -> str | None:
    """Return why the ranks that began a training loop are no whole measurement together, None if they are."""
    return next(_problems(ranks, config), None)


def _problems(ranks: Mapping[int, ProgramRank], config: ProgramArm) -> Iterator[str]:
    worlds = {number: 1 if rank.world is None else rank.world for number, rank in ranks.items()}
    if len(set(worlds.values())) > 1:
        yield f"the ranks disagree about their number: {_listed(worlds)}"
    if not worlds:
        return
    world = next(iter(worlds.values()))
    missing = next((number for number in range(world) if number not in ranks), None)
    if missing is not None:
        yield f"rank {missing} of {world} marked no steps; every rank has to open ablate.trial()"
    extra = next((number for number in ranks if number >= world), None)
    if extra is not None:
        yield f"rank {extra} marked steps, but the program has {world} rank{'' if world == 1 else 's'}"
    yield from _mark_problems(ranks, config, world)
    wrong = next((n for n, rank in ranks.items() if rank.seed not in (None, config.seed)), None)
    if wrong is not None:
        own, hint = (
            ranks[wrong].seed,
            "" if config.takes_seed else ": pass it, as in --seed '{seed}', or read trial.seed",
        )
        yield f"{_who(wrong, world)} trained with seed {own}; the block has seed {config.seed}{hint}"
    for what in ("interpreter", "packages"):
        values = {number: getattr(rank, what) for number, rank in ranks.items()}
        if len(set(values.values())) > 1:
            yield f"the ranks disagree about their {what}: {_listed(values)}"


def _mark_problems(ranks: Mapping[int, ProgramRank], config: ProgramArm, world: int) -> Iterator[str]:
    total = config.steps.total
    short = [n for n, rank in ranks.items() if len(rank.ended) < total or rank.closed is None]
    if short:
        least = min(short, key=lambda number: len(ranks[number].ended))
        done = len(ranks[least].ended)
        yield (
            f"{_who(least, world)} marked {done:,} of {total:,} steps, or left the trial without closing it: "
            "let ablate.steps() end the loop, or ask for fewer: workload.steps, or ablate ask --steps"
        )
    unmarked = next((n for n, rank in ranks.items() if not rank.has_window(config.steps)), None)
    if unmarked is not None:
        yield f"{_who(unmarked, world)} marked no window"
    if not short and unmarked is None:
        disordered = ((n, rank.order_problem(config.steps)) for n, rank in ranks.items())
        yield from (f"{_who(n, world)} {problem}" for n, problem in disordered if problem is not None)


def _who(rank: int, world: int) -> str:
    return "the program" if world == 1 else f"rank {rank}"


def _listed(values: Mapping[int, object]) -> str:
    return ", ".join(f"rank {number} has {value}" for number, value in list(values.items())[:8])

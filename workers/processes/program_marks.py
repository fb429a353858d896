"""What a program has sent: its messages in the order of their arrival, each of which fits those before it."""

from typing import Any

from pydantic import ValidationError

from experiments.design.program import ProgramConfig
from experiments.digest import digest
from experiments.in_trial.ablate import MOST_RESULTS
from experiments.records.program_report import printable
from model.measurements import StepTrace
from workers.node_secrets import Mask
from workers.processes.program_end import RankFailure
from workers.processes.program_messages import (
    Attested,
    Began,
    Ended,
    Failed,
    Kernels,
    Losses,
    Message,
    Package,
    Reported,
    Steps,
    Tokens,
    Trace,
    WindowBegan,
    WindowEnded,
    read_message,
)
from workers.processes.ranks import ProgramRank

_MOST_ATTESTED, _MOST_KERNELS, _MOST_EVENTS = 256, 2_000, 4_000
"""Most attested values, kernels and events of a step of one trial: more would make the report of a block too large."""


class ProgramMarks:
    """All messages of a program, checked as they arrive."""

    def __init__(self, config: ProgramConfig, mask: Mask = Mask({})) -> None:  # noqa: B008 - it never changes
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
        self._trace_parts: dict[str, list[Any]] = {"names": [], "tracks": [], "events": [], "memory": []}
        self.trace: StepTrace | None = None
        self.failed: RankFailure | None = None
        """The first exception."""
        self.wrong: str | None = None
        """What is wrong with the first message that is wrong."""

    def take(self, content: bytes, seen: float) -> Message | None:
        """Store one message that arrived at `seen`; return it, None if it is wrong or of an earlier round."""
        try:
            message = read_message(self._mask.masked(content))
            if self._is_late(message):
                return None
            self._store(message, self.ranks.setdefault(message.rank, ProgramRank()), seen)
        except (RecursionError, ValueError) as error:
            problem = f"the program sent a message that is not of the module ablate: {_words(error)}"
            self.wrong = self.wrong or printable(f"{problem}; message: {self._mask.masked(content)[:100]!a}")
            return None
        return message

    def _is_late(self, message: Message) -> bool:
        """Return whether a message belongs to an earlier round; begin anew if it belongs to a later one."""
        if message.run == self.round[0] and message.round < self.round[1]:
            return True
        place = message.run, message.round
        if place != self.round and (message.run == self.round[0] or not self.loops):
            self.__dict__.update(ProgramMarks(self._config, self._mask).__dict__)
            self.round = place
        self.restarts = message.restarts
        return False

    def _store(self, message: Message, rank: ProgramRank, seen: float) -> None:
        match message:
            case Began():
                self._begin(rank, message)
            case WindowBegan() | WindowEnded():
                self._store_edge(rank, message, seen)
            case Steps() | Losses() | Tokens():
                self._store_steps(rank, message)
            case Kernels() | Trace():
                if rank is self.ranks.get(0):
                    self._store_profile(message)
            case Ended():
                rank.closed, rank.whole, rank.seed = message.at, message.whole, message.seed
                rank.packages = digest(dict(message.packages))
                rank.memory = message.memory or rank.memory
            case _:
                self._store_values(message)

    def _store_values(self, message: Reported | Attested | Package | Failed) -> None:
        match message:
            case Reported(values=values):
                if len(self.reported) <= MOST_RESULTS:  # the end of the program tells when there are more
                    self.reported.update(values)
            case Attested():
                self._attest(message)
            case Package(digest=package):
                self.package = package
            case Failed():
                failure = RankFailure(rank=message.rank, kind=message.type, message=message.message)
                self.failed = self.failed or failure

    def _begin(self, rank: ProgramRank, message: Began) -> None:
        if rank.has_begun:
            self.wrong = self.wrong or (
                "the program marked two training loops; a trial has one"
                if message.process == rank.process
                else f"two processes report as rank {message.rank}: set RANK and WORLD_SIZE for each of them"
            )
            return
        rank.began, rank.process, rank.world = message.at, message.process, message.world
        rank.interpreter = f"{message.implementation} {message.python}"[:100]

    def _store_edge(self, rank: ProgramRank, message: WindowBegan | WindowEnded, seen: float) -> None:
        _check_begun(rank, message)
        if message.event in rank.edges:
            raise ValueError(f"{message.event} twice")
        rank.edges[message.event], rank.seen[message.event] = message.at, seen

    def _store_steps(self, rank: ProgramRank, message: Steps | Losses | Tokens) -> None:
        _check_begun(rank, message)
        match message:
            case Steps(steps=rows):
                self._check_indices([row[0] for row in rows], rank)
                for index, ended, tokens, loss in rows:
                    rank.ended[index], rank.tokens[index] = ended, tokens
                    if loss is not None:
                        rank.losses[index] = loss
            case Losses(losses=losses):
                self._check_indices([index for index, _loss in losses])
                rank.losses.update(losses)
            case Tokens(tokens=counts):
                self._check_indices([index for index, _count in counts])
                rank.tokens.update(counts)

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

    def _attest(self, message: Attested) -> None:
        if len(self.attested.keys() | message.values.keys()) > _MOST_ATTESTED:
            raise ValueError(f"more than {_MOST_ATTESTED} attested values")
        for name, value in message.values.items():
            known = self.attested.setdefault(name, value)
            if type(known) is not type(value) or known != value:  # the ranks disagree
                self.attested[name] = "mixed"

    def _store_profile(self, message: Kernels | Trace) -> None:
        match message:
            case Kernels(rows=rows):
                if len(self.kernels) + len(rows) > _MOST_KERNELS:
                    raise ValueError(f"more than {_MOST_KERNELS:,} kernels")
                self.kernels += [(name[:300], calls, spent_us) for name, calls, spent_us in rows]
            case Trace(part="left_out", rows=rows):
                parts = self._trace_parts
                names, tracks = ([printable(str(name)) for name in parts[part]] for part in ("names", "tracks"))
                whole = {**parts, "names": names, "tracks": tracks, "left_out": rows[0] if rows else None}
                self.trace = StepTrace.model_validate(whole)
            case Trace(part=part, rows=rows):
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


def _check_begun(rank: ProgramRank, message: Message) -> None:
    if not rank.has_begun:
        raise ValueError(f"'{message.event}' of rank {message.rank} came before its training loop began")

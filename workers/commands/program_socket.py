"""The messages of the module `ablate`: the socket on which they arrive, and their forms.

The kernel adds to each message its moment and its sender. Each is checked whole before anything of it counts, because
anybody in a trial can send any bytes: a number is finite and bounded unless its trial may fail by it (a loss or a
result that is NaN), and a text can be stored and shown everywhere.
"""

import json
import math
import re
import secrets
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, TypeAdapter

from ablate.experiments.in_trial.ablate import name_problem
from ablate.experiments.records.program_report import MOST_KERNEL_US, printable
from ablate.model.measurements import KernelFacts
from ablate.workers.trials.turns import PIPE_BYTE

_MESSAGE_BYTES, _ANCILLARY_BYTES = 262_144, 256
_SO_TIMESTAMPNS = 35  # Linux; the module socket has no name for it
_STAMP = struct.Struct("qq")
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, kw_only=True)
class ProgramMessage:
    """One message as it arrived."""

    content: bytes
    seen: float
    """When the kernel queued it, in seconds of the wall clock; NaN if it does not say."""
    sender: int
    """The process that sent it, 0 if the kernel does not say."""
    address: bytes = b""
    """Of its socket, which an answer reaches; empty if it waits for none."""


class ProgramSocket:
    """A socket in the abstract namespace."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.address = f"\0ablate-trial-{secrets.token_hex(16)}"
        self._socket.bind(self.address)
        self._socket.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._socket.fileno()

    def messages(self) -> Iterator[ProgramMessage]:
        """Yield the messages that have arrived."""
        while True:
            try:
                content, ancillary, _flags, address = self._socket.recvmsg(_MESSAGE_BYTES, _ANCILLARY_BYTES)
            except BlockingIOError:
                return
            seen, sender = math.nan, 0
            for _level, kind, data in ancillary:
                if kind == _SO_TIMESTAMPNS:
                    seconds, nanoseconds = _STAMP.unpack(data[: _STAMP.size])
                    seen = int(seconds) + int(nanoseconds) / 1e9
                elif kind == socket.SCM_CREDENTIALS:
                    sender = int(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0])
            yield ProgramMessage(content=content, seen=seen, sender=sender, address=address or b"")

    def answer(self, message: ProgramMessage) -> None:
        """Let the process that waits after this message go on. Only this socket can answer: the other is connected."""
        with suppress(OSError):  # it has ended
            self._socket.sendto(PIPE_BYTE, message.address)


MOST_RANKS = 1024
_LATEST_S = 1e9
"""No machine runs for longer, and the difference of two moments below it is exact enough for a step."""
_MOST_LETTERS, _LONGEST_GATE = 200, 63
"""Of an attested value, and of its name."""
_SURROGATES = re.compile("[\ud800-\udfff]")


def _storable(text: Any) -> Any:
    """Replace halves of characters, which the name of a file in an exception may have."""
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", text) if isinstance(text, str) else text


def _shown(text: Any) -> Any:
    return printable(text) if isinstance(text, str) else text


def _named(values: Any) -> Any:
    for name in values if isinstance(values, dict) else ():
        problem = name_problem(name)
        if problem is not None:
            raise ValueError(problem)
    return values


def _attested(values: Any) -> Any:
    for name, value in values.items() if isinstance(values, dict) else ():
        shown = printable(name)[:_LONGEST_GATE]
        if type(value) not in (bool, int, str) or len(str(value)) > _MOST_LETTERS:
            raise ValueError(f"{shown} is attested as {str(value)[:_LONGEST_GATE]!a}")
        if not f"{name}{value}".isprintable():
            raise ValueError(f"{shown} or its value {str(value)!a} has letters that cannot be shown")
    return {name[:_LONGEST_GATE]: value for name, value in values.items()} if isinstance(values, dict) else values


Count: TypeAlias = Annotated[int, Strict(), Field(ge=0, lt=2**62)]
Moment: TypeAlias = Annotated[float, Strict(), Field(ge=0, le=_LATEST_S, allow_inf_nan=False)]
"""Seconds of the monotonic clock of the machine."""
Loss: TypeAlias = Annotated[float, Strict()]
"""One that is not finite ends the trial as `numerics`."""
Text: TypeAlias = Annotated[str, BeforeValidator(_storable)]
ShownText: TypeAlias = Annotated[str, BeforeValidator(_shown)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)

    rank: Annotated[int, Strict(), Field(ge=0, lt=MOST_RANKS)]
    run: Text = ""
    """Of a launcher that starts all ranks again when one fails; `round` counts its starts."""
    round: Count = 0
    restarts: Count = 0
    """How often this launcher may do so again."""


class LoopBegan(_Message):
    """A rank begins its training loop."""

    event: Literal["began"]
    at: Moment
    world: Count
    """Number of ranks that this one knows of."""
    process: Count = 0
    closes: bool = False
    """Whether the process that sent this also closes the trial."""
    first: Count = 0
    """The step with which it begins: not the first one in a program that was killed and goes on."""
    total: Count | None = None
    """Steps of its loop outside of a trial; None if it passes no number."""
    python: ShownText
    implementation: ShownText


class WindowBegan(_Message):
    """The measured window begins, or a slice of it."""

    event: Literal["window began"]
    at: Moment


class WindowEnded(_Message):
    """The measured window has ended, or a slice of it."""

    event: Literal["window ended"]
    at: Moment


class TurnWanted(_Message):
    """A program waits for its turn: before its window, or each slice of it, and after the last one."""

    event: Literal["turn"]


class EndedSteps(_Message):
    """Steps that have ended: index, moment, tokens, loss."""

    event: Literal["steps"]
    steps: tuple[tuple[Count, Moment, Count, Loss | None], ...]


class StepLosses(_Message):
    """Losses that were read after the window, by the index of their steps."""

    event: Literal["losses"]
    losses: tuple[tuple[Count, Loss], ...]


class StepTokens(_Message):
    """Tokens by the index of their steps, as they are at the end."""

    event: Literal["tokens"]
    tokens: tuple[tuple[Count, Count], ...]


class StepWaits(_Message):
    """Seconds in which a rank waited for others, by the index of their steps."""

    event: Literal["waits"]
    waits: tuple[tuple[Count, Moment], ...]


class StepLoads(_Message):
    """Seconds in which a rank waited for data, by the index of their steps."""

    event: Literal["loads"]
    loads: tuple[tuple[Count, Moment], ...]


class ReportedValues(_Message):
    """Results of the whole run; those that are not finite fail the trial at its end."""

    event: Literal["reported"]
    values: Annotated[Mapping[str, Annotated[float, Strict()]], BeforeValidator(_named)]


class AttestedValues(_Message):
    """Values of gates that the code of a recipe's package says were live."""

    event: Literal["attested"]
    values: Annotated[Mapping[str, bool | int | str], BeforeValidator(_attested)]


class PackageCode(_Message):
    """The code of a recipe's package."""

    event: Literal["package"]
    digest: Annotated[ShownText, Field(max_length=_MOST_LETTERS)]


class KernelTable(_Message):
    """Name, calls, microseconds and facts of kernels of the profiled step."""

    event: Literal["kernels"]
    rows: tuple[tuple[ShownText, Count, Annotated[float, Strict(), Field(ge=0, le=MOST_KERNEL_US)], KernelFacts], ...]


class TracePart(_Message):
    """A part of the profiled step over time; `left_out` comes last, and the whole is checked then."""

    event: Literal["trace"]
    part: Literal["names", "tracks", "events", "memory", "left_out"]
    rows: tuple[Any, ...]


class RankRaised(_Message):
    """An exception that left the trial of a rank."""

    event: Literal["failed"]
    type: Text
    message: Text


class TrialEnded(_Message):
    """A rank closes its trial."""

    event: Literal["ended"]
    at: Moment
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None
    whole: Annotated[bool, Strict()]
    packages: Mapping[Text, Text]
    memory: tuple[Count, Count] | None
    """Peaks of torch's allocator in bytes: allocated, reserved."""


Mark: TypeAlias = (
    LoopBegan
    | WindowBegan
    | WindowEnded
    | TurnWanted
    | EndedSteps
    | StepLosses
    | StepTokens
    | StepWaits
    | StepLoads
    | ReportedValues
    | AttestedValues
    | PackageCode
    | KernelTable
    | TracePart
    | RankRaised
    | TrialEnded
)
_MESSAGES: TypeAdapter[Mark] = TypeAdapter(Annotated[Mark, Field(discriminator="event")])


def read_message(content: bytes) -> Mark:
    """Return a message. Raises ValueError or RecursionError if it is none of the module."""
    return _MESSAGES.validate_python(json.loads(content))

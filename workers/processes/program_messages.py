"""The messages of the module `ablate`: each is checked whole before anything of it counts.

Anybody in a trial can send any bytes. So a number is finite and bounded unless its trial may fail by it (a loss or a
result that is NaN), and a text can be stored and shown everywhere.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, TypeAdapter

from experiments.in_trial.ablate import name_problem
from experiments.records.program_report import MOST_KERNEL_US, printable

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


class Began(_Message):
    """A rank begins its training loop."""

    event: Literal["began"]
    at: Moment
    world: Count
    """Number of ranks that this one knows of."""
    process: Count = 0
    closes: bool = False
    """Whether the process that sent this also closes the trial."""
    python: ShownText
    implementation: ShownText


class WindowBegan(_Message):
    """The measured window begins."""

    event: Literal["window began"]
    at: Moment


class WindowEnded(_Message):
    """The measured window has ended."""

    event: Literal["window ended"]
    at: Moment


class Steps(_Message):
    """Steps that have ended: index, moment, tokens, loss."""

    event: Literal["steps"]
    steps: tuple[tuple[Count, Moment, Count, Loss | None], ...]


class Losses(_Message):
    """Losses that were read after the window, by the index of their steps."""

    event: Literal["losses"]
    losses: tuple[tuple[Count, Loss], ...]


class Tokens(_Message):
    """Tokens by the index of their steps, as they are at the end."""

    event: Literal["tokens"]
    tokens: tuple[tuple[Count, Count], ...]


class Reported(_Message):
    """Results of the whole run; those that are not finite fail the trial at its end."""

    event: Literal["reported"]
    values: Annotated[Mapping[str, Annotated[float, Strict()]], BeforeValidator(_named)]


class Attested(_Message):
    """Values of gates that the code of a recipe's package says were live."""

    event: Literal["attested"]
    values: Annotated[Mapping[str, bool | int | str], BeforeValidator(_attested)]


class Package(_Message):
    """The code of a recipe's package."""

    event: Literal["package"]
    digest: Annotated[ShownText, Field(max_length=_MOST_LETTERS)]


class Kernels(_Message):
    """Name, calls and microseconds of kernels of the profiled step."""

    event: Literal["kernels"]
    rows: tuple[tuple[ShownText, Count, Annotated[float, Strict(), Field(ge=0, le=MOST_KERNEL_US)]], ...]


class Trace(_Message):
    """A part of the profiled step over time; `left_out` comes last, and the whole is checked then."""

    event: Literal["trace"]
    part: Literal["names", "tracks", "events", "memory", "left_out"]
    rows: tuple[Any, ...]


class Failed(_Message):
    """An exception that left the trial of a rank."""

    event: Literal["failed"]
    type: Text
    message: Text


class Ended(_Message):
    """A rank closes its trial."""

    event: Literal["ended"]
    at: Moment
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None
    whole: Annotated[bool, Strict()]
    packages: Mapping[Text, Text]
    memory: tuple[Count, Count] | None
    """Peaks of torch's allocator in bytes: allocated, reserved."""


Message: TypeAlias = (
    Began
    | WindowBegan
    | WindowEnded
    | Steps
    | Losses
    | Tokens
    | Reported
    | Attested
    | Package
    | Kernels
    | Trace
    | Failed
    | Ended
)
_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="event")])


def read_message(content: bytes) -> Message:
    """Return a message. Raises ValueError or RecursionError if it is none of the module."""
    return _MESSAGES.validate_python(json.loads(content))

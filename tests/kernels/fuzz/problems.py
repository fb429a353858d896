"""One problem of the fuzz: sizes, switches, values, memory layouts of the tensors, and requested results."""

import json
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

Decay: TypeAlias = Literal["initial", "benchmark", "weak", "strong", "mixed"]
Cuts: TypeAlias = Literal["anywhere", "edges", "single"]
Layout: TypeAlias = Literal["plain", "permuted", "sliced", "strided", "offset", "expanded"]
Dtype: TypeAlias = Literal["bfloat16", "float16", "float32"]


class ScanProblem(BaseModel):
    """Complete description of a computation. Two equal problems give equal bits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    B: int = 1
    """Batch."""
    S: int = 100
    """Tokens per row."""
    H: int = 2
    """Value heads."""
    G: int = 1
    """Groups sharing q and k."""
    N: int = 64
    """State size."""
    P: int = 64
    """Head width."""
    R: int = 4
    """MIMO rank."""
    full_rotary: bool = False
    """Whether all pairs of the state are rotated; else half of them."""
    cumulated: bool = False
    """Whether the angles are already cumulated."""
    shared_angles: bool = False
    """Whether all heads share one set of angles."""
    without: tuple[str, ...] = ()
    """Absent optional tensors."""
    started: bool = False
    """Whether a state enters the rows."""
    ended: bool = False
    """Whether the final state has a gradient, besides the output."""
    switches: dict[str, bool | int | str] = {}
    """Fields of ScanSwitches that differ from the default."""
    decay: Decay = "initial"
    """Distribution of dt and adt, see tensors.py."""
    documents: int = 1
    """Documents per row; at most one per token."""
    cuts: Cuts = "anywhere"
    """Ends of documents: anywhere, at multiples of 8 tokens, or so that most have one token."""
    dtype: Dtype = "bfloat16"
    """Dtype of q, k, v, z and the gradient of o."""
    seed: int = 0
    """Seed of the values."""
    layouts: dict[str, Layout] = {}
    """Tensor, segment_ids or grad_out -> its memory layout, plain by default."""
    wanted: tuple[str, ...] | None = None
    """Tensors with a requested gradient; None for all, () for only a forward pass."""
    other_stream: bool = False
    """Whether the scan runs on a stream of its own."""
    other_device: bool = False
    """Whether the tensors are on the last GPU while the first is the current one."""

    @property
    def line(self) -> str:
        """The problem as one line of JSON without defaults."""
        return json.dumps(self.model_dump(exclude_defaults=True), separators=(",", ":"))

    @property
    def angles(self) -> int:
        """Rotary angles per head."""
        return self.N // 2 if self.full_rotary else self.N // 4


def parsed(line: str) -> ScanProblem:
    """Return the problem of a line of JSON. Raises pydantic's ValidationError."""
    return ScanProblem.model_validate_json(line)


ALLOWED: dict[str, tuple[Any, ...]] = {
    "N": (16, 32, 64, 128, 256), "P": (32, 64, 128), "R": (1, 2, 4, 8), "dtype": ("bfloat16",),
    "chunk_size": (8, 16, 32, 64), "schedule": ("chunk_parallel", "sequential"), "pipeline_stages": (0, 1, 2),
    "heads_in_turn": (0, 1, 2, 4),
}  # fmt: skip
"""Largest domain of the lane, stated independently of the code that refuses."""


def must_be_refused(problem: ScanProblem) -> str | None:
    """Return the first reason why no lane can run the problem, or None. The lane may have more reasons."""
    given: dict[str, Any] = {"schedule": "chunk_parallel", "chunk_size": 16, "pipeline_stages": 1, "superchunk": 0}
    given |= {"heads_in_turn": 0} | problem.switches | problem.model_dump(include={"N", "P", "R", "dtype"})
    for name, values in ALLOWED.items():
        if given[name] not in values:
            return f"{name} is {given[name]}"
    length = given["superchunk"]
    fits = length % given["chunk_size"] == 0 and (length % 64 == 0 or length in {8, 16, 32}) and length >= 0
    if given["schedule"] == "chunk_parallel" and not fits:
        return "superchunk is no multiple of chunk_size, or neither a divisor nor a multiple of 64"
    return _wrong_sizes(problem, in_turn=max(1, given["heads_in_turn"]))


def _wrong_sizes(problem: ScanProblem, in_turn: int) -> str | None:
    if problem.B < 1 or problem.S < 1:
        return "a row or the batch is empty"
    if problem.G < 1 or problem.H % problem.G:
        return "H is no multiple of G"
    if problem.H // problem.G % in_turn:
        return "the heads of a group are no multiple of heads_in_turn"
    if ("z" in problem.without) != ("zeta" in problem.without):
        return "z or zeta alone"
    return None

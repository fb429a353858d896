"""Contents of a lowered XLA module: kernels, matrix products, collectives, digest, and changes between two modules.

All of it is read from the module's own text, so it describes the compiler's input and not the request. A Pallas kernel
is a `tpu_custom_call` whose payload is a Mosaic module. The payload holds the paths of its source files, so the digest
omits its locations.

jax is imported inside functions, so the readers of plain text need no jax.
"""

import base64
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

SHOWN = 3
"""Instructions of each kind that `describe_change` quotes."""
LINE_LIMIT = 160  # characters

_CHANGED_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = ")
_METADATA = re.compile(r", metadata=\{[^}]*\}")
_NUMBERED = re.compile(r"(%?[A-Za-z_][\w-]*?)(?:\.\d+)+")


def describe_change(before: str, after: str) -> str:
    """Return how the module text `after` differs from the text `before`, in a sentence.

    Instructions are compared without their numbers, which shift with every instruction added before them.
    """
    old, new = _instruction_counts(before), _instruction_counts(after)
    gone, come = old - new, new - old
    if not gone and not come:
        return "the same instructions, joined in another way"
    counts = f"{come.total()} of its {new.total()} instructions are new, {gone.total()} of {old.total()} are gone"
    return "; ".join([counts, *_quoted("new", come), *_quoted("gone", gone)])


def _quoted(kind: str, instructions: "Counter[str]") -> Iterable[str]:
    return (f"{kind}: {line[:LINE_LIMIT]}" for line in sorted(instructions, key=_constants_first)[:SHOWN])


def _constants_first(line: str) -> tuple[bool, str]:
    """Sort instructions with constants first: the others follow from them."""
    return " constant(" not in line and "slice={" not in line, line


def _instruction_counts(text: str) -> "Counter[str]":
    lines = (line for line in text.splitlines() if _CHANGED_INSTRUCTION.match(line))
    return Counter(_NUMBERED.sub(r"\1", _METADATA.sub("", line)).strip() for line in lines)


COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
TPU_CALL = "tpu_custom_call"
"""Custom-call target of every Pallas kernel."""

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_OPCODE = re.compile(r"^(?:\([^=]*?\)|[a-z0-9]+\[[^ ]*) ([a-z][a-z0-9-]*)\(")
_SHAPE = re.compile(r"[a-z][a-z0-9]*\[([0-9,]*)\]")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_BODY = re.compile(r'"body": ?"([A-Za-z0-9+/=]*)"')
_CALLED = re.compile(r"(?:to_apply|calls|body|true_computation|false_computation)=%?([\w.-]+)")
_CONDITION = re.compile(r"condition=%?([\w.-]+)")
_LIMIT = re.compile(r"compare\(\w+\[\][^ ]* %?[\w.-]+, \w+\[\][^ ]* %?([\w.-]+)\), direction=LT")
_NUMBER = re.compile(r"^\w+\[\][^ ]* constant\((\d+)\)")
_COMMENT = re.compile(r"/\*.*?\*/")
_LAYOUTS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
"""Custom calls that only state the layout of a value on several chips."""
_BARRIER = re.compile(r"= (\(.*?\)|\S+) opt-barrier\(")
_ARRAY = re.compile(r"([a-z]+[0-9]*)\[([0-9,]*)\]")
_ITEM_BITS = {"pred": 8, **{f"{kind}{bits}": bits for kind in "suf" for bits in (8, 16, 32, 64)}, "bf16": 16}


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Contents of one lowered module."""

    digest: str
    """SHA-256 of the module's text without the kernels' locations; equal for equal programs."""
    instructions: int
    custom_calls: Mapping[str, int]
    """Calls by kernel name (Pallas) or by target."""
    matmul_flops: int | None
    """FLOPs of all matrix products outside kernels, times the trips of their loops. None if a loop's trips are not
    constant."""
    loops: Mapping[int, int]
    """Trips -> number of loops with so many trips. A loop of unknown length has 0 trips."""
    barrier_bytes: int
    """Bytes of the values that pass an optimisation barrier, from a forward to its backward pass."""


def read_graph(module: bytes) -> Graph:
    """Read a serialized HloModuleProto."""
    text = _COMMENT.sub("", _text_of(module))
    bodies = {body: _without_locations(base64.b64decode(body)) for body in set(_BODY.findall(text))}
    plain = _BODY.sub(lambda match: f'"body": "{bodies[match[1]].digest}"', text)
    names = {kernel.digest: kernel.name for kernel in bodies.values()}
    return Graph(
        digest="sha256:" + hashlib.sha256(plain.encode()).hexdigest(),
        instructions=sum(1 for line in plain.splitlines() if _INSTRUCTION.match(line)),
        custom_calls=count_custom_calls(plain, names),
        matmul_flops=matmul_flops(plain),
        loops=count_loops(plain),
        barrier_bytes=barrier_bytes(plain),
    )


def count_custom_calls(text: str, names: Mapping[str, str]) -> dict[str, int]:
    """Count the custom calls of a module. `names` maps the text of a body to its kernel's name."""
    calls: Counter[str] = Counter()
    for line in text.splitlines():
        target = _TARGET.search(line)
        if target is not None and target[1] not in _LAYOUTS:
            body = re.search(r'"body": ?"([^"]*)"', line)
            calls[names.get(body[1], target[1]) if body else target[1]] += 1
    return dict(sorted(calls.items()))


def count_collectives(text: str) -> dict[str, int]:
    """Count the collectives of a compiled program by kind. An asynchronous pair (start, done) counts once."""
    return {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES}


def count_kernel_calls(text: str) -> int:
    """Count the calls of Pallas kernels in a compiled program, whose kernels have no names."""
    return sum(target == TPU_CALL for target in _TARGET.findall(text))


def matmul_flops(text: str) -> int | None:
    """Return the FLOPs of the matrix products, with loops times their trips. None if trips are not constant."""
    module = _Module(text)
    try:
        return module.flops(module.entry)
    except _UnknownTrips:
        return None


def count_loops(text: str) -> dict[int, int]:
    """Count the loops that the module runs, by trips. An inner loop counts once for each trip of the outer loop."""
    module = _Module(text)
    return dict(sorted(module.loops(module.entry).items()))


def barrier_bytes(text: str) -> int:
    """Return the bytes of all values that pass an optimisation barrier."""
    shapes = (match[1] for match in _BARRIER.finditer(text))
    return sum(_bytes(*array) for shape in shapes for array in _ARRAY.findall(shape))


def _bytes(dtype: str, dims: str) -> int:
    return _ITEM_BITS[dtype] // 8 * math.prod(_dims(dims))


class _UnknownTrips(Exception):
    """A loop's condition is not a counter against a constant."""


class _Module:
    """The computations of a module's text."""

    def __init__(self, text: str) -> None:
        self.entry = ""
        self._lines: dict[str, dict[str, str]] = {}
        self._flops: dict[str, int] = {}
        current: dict[str, str] = {}
        for line in text.splitlines():
            header = _COMPUTATION.match(line)
            if header is not None:
                current = self._lines.setdefault(header[1], {})
                self.entry = header[1] if line.startswith("ENTRY") else self.entry
            elif instruction := _INSTRUCTION.match(line):
                current[instruction[1]] = instruction[2]

    def flops(self, name: str) -> int:
        """Return the FLOPs of a computation and all its callees."""
        if name not in self._flops:
            self._flops[name] = sum(self._flops_of(line) for line in self._lines[name].values())
        return self._flops[name]

    def loops(self, name: str) -> Counter[int]:
        """Return the trips of the loops of a computation and all its callees."""
        return sum((self._loops_of(line) for line in self._lines[name].values()), Counter[int]())

    def _loops_of(self, line: str) -> Counter[int]:
        opcode = _OPCODE.match(line)
        if opcode is None:
            return Counter()
        inside = sum((self.loops(called) for called in _CALLED.findall(line)), Counter[int]())
        if opcode[1] != "while":
            return inside
        try:
            trips = self._trips(line)
        except _UnknownTrips:
            trips = 0
        return Counter({length: number * trips for length, number in inside.items()}) + Counter([trips])

    def _flops_of(self, line: str) -> int:
        opcode = _OPCODE.match(line)
        if opcode is None:
            return 0
        if opcode[1] == "dot":
            return _dot_flops(line)
        inside = sum(self.flops(called) for called in _CALLED.findall(line))
        return inside * self._trips(line) if inside and opcode[1] == "while" else inside

    def _trips(self, line: str) -> int:
        condition = _CONDITION.search(line)
        lines = self._lines[condition[1]] if condition else {}
        limit = next((match for part in lines.values() if (match := _LIMIT.search(part))), None)
        number = _NUMBER.match(lines.get(limit[1], "")) if limit else None
        if number is None:
            raise _UnknownTrips
        return int(number[1])


def _dot_flops(line: str) -> int:
    """Return 2 * (elements of the result) * (contracted elements) of one matrix product."""
    result, left = (_dims(shape) for shape in _SHAPE.findall(line)[:2])
    contracted = re.search(r"lhs_contracting_dims=\{([0-9,]*)\}", line)
    return 2 * math.prod(result) * math.prod(left[dim] for dim in _dims(contracted[1] if contracted else ""))


def _dims(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    name: str
    digest: str


def _without_locations(body: bytes) -> _Kernel:
    """Return a Mosaic module's name and the digest of its text, which has no locations."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown(context):
        module = ir.Module.parse(body)
        name = ir.StringAttr(module.operation.attributes["sym_name"]).value
        return _Kernel(name=name, digest=hashlib.sha256(str(module).encode()).hexdigest())


def _text_of(module: bytes) -> str:
    """Return the text of a serialized HloModuleProto, with the shapes of operands and without metadata."""
    from jax._src.lib import xla_client

    options = xla_client._xla.HloPrintOptions()
    options.print_operand_shape, options.print_metadata, options.print_large_constants = True, False, True
    to_string: Callable[..., str] = xla_client._xla.HloModule.from_serialized_hlo_module_proto(module).to_string
    return to_string(options)

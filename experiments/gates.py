"""The registry of gates: every switchable feature of model, kernel and run is declared once, here.

Validation, the published enums, the documentation table, attestation and the tests derive from the entries. A
gate's value lives in one typed field of TrainConfig; model code reads that field and never a gate's name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict

from experiments.fields import read_field, replace_fields
from kernels.backends import LANES_ON, Lane, NodeClass, lane_refusal
from model.config import TrainConfig

GateValue: TypeAlias = bool | int | str
Facts: TypeAlias = Mapping[str, Any]

ANY_LANE = tuple(Lane)
ON_REFERENCE = (Lane.REFERENCE,)
ON_CUDA = (Lane.CUDA,)


class Claim(StrEnum):
    """What a gate promises about the numbers."""

    SCHEDULE_ONLY = "schedule-only"
    """Step-1 loss is bit-identical."""
    RE_ASSOCIATES = "re-associates"
    """Sums are grouped differently: equal within an envelope."""
    CHANGES_MODEL = "changes-model"
    """Another numerical model: losses are not expected to agree."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One switchable feature."""

    name: str
    question: str
    """What an ablation of this gate asks, in one sentence."""
    values: tuple[GateValue, ...]
    default: GateValue
    path: str
    """Dotted TrainConfig field that holds the value; the only field that the gate touches."""
    claim: Claim
    lanes: Mapping[GateValue, tuple[Lane, ...]] = field(default_factory=dict)
    """Lanes that implement a value; a value that is not listed needs no particular lane."""
    requires: Mapping[str, GateValue] = field(default_factory=dict)
    """Values that other gates must have when this one is not at its default."""
    unused_with: Mapping[str, GateValue] = field(default_factory=dict)
    """Values of other gates under which this one has no effect, so that naming it is a contradiction."""
    block: str | None = None
    """Letter of the block kind that the pattern must contain for this gate to do anything."""
    attest: Callable[[Facts], Any]
    """Read from the recorded facts what was live; None when nothing about it was recorded."""
    attested_by: str
    """What `attest` looks at, in words."""

    def apply(self, config: TrainConfig, value: GateValue) -> TrainConfig:
        """Return `config` with this gate at `value`."""
        return replace_fields(config, {self.path: value})

    def read(self, config: TrainConfig) -> GateValue:
        """Return this gate's value in `config`."""
        value = read_field(config, self.path)
        return str(value) if isinstance(value, StrEnum) else value

    def allows(self, value: object) -> bool:
        """Tell whether `value` is one of the gate's values, of exactly the same type (true is not 1)."""
        return any(type(value) is type(known) and value == known for known in self.values)

    def supports(self, node_class: NodeClass, lane: Lane, value: GateValue) -> str | None:
        """Return why `value` cannot run with `lane` on `node_class`, or None when it can."""
        if self.name == "lane":
            return lane_refusal(Lane(str(value)), node_class)
        needed = self.lanes.get(value, ANY_LANE)
        if lane in needed:
            return None
        setting = f"gate '{self.name}'" if value is True else f"gate '{self.name}' = {show(value)}"
        names = " or ".join(needed)
        if not set(needed) & set(LANES_ON[node_class]):
            return f"{setting} needs lane {names}, which has no implementation on node class '{node_class}'"
        return f"{setting} needs lane {names}; this arm runs lane {lane}"

    def unused_because(self, gates: Mapping[str, Any]) -> str | None:
        """Return the setting among `gates` under which this gate has no effect, for example "schedule = sequential"."""
        for name, value in self.unused_with.items():
            if gates.get(name) == value:
                return f"{name} = {show(value)}"
        return None


class GatePublic(BaseModel):
    """One gate as `GET /v1/gates` and the documentation show it."""

    model_config = ConfigDict(frozen=True)

    name: str
    question: str
    values: tuple[GateValue, ...]
    default: GateValue
    claim: Claim
    field: str
    requires: dict[str, GateValue]
    unused_with: dict[str, GateValue]
    node_classes: dict[str, tuple[NodeClass, ...]]
    """For each value (as written in a spec): the node classes that can run it today."""
    attested_by: str


def show(value: object) -> str:
    """Write a gate value the way a spec does: true, 16, sdpa."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fact(name: str) -> Callable[[Facts], Any]:
    return lambda facts: facts.get(name)


def _psiv_cached(facts: Facts) -> bool | str | None:
    saved = facts.get("mamba3_mimo.psiv_saved_bytes", 0) > 0
    recomputed = facts.get("mamba3_mimo.psiv_recomputes", 0) > 0
    if saved and recomputed:
        return "mixed"
    return saved if saved or recomputed else None


def _compiled(facts: Facts) -> bool | None:
    return facts.get("compile.graphs", 0) > 0 if facts else None


def _cuda_flag(name: str, question: str, *, requires: Mapping[str, GateValue] | None = None) -> Gate:
    return Gate(
        name=name,
        question=question,
        values=(False, True),
        default=False,
        path=f"model.scan.{name}",
        claim=Claim.SCHEDULE_ONLY,
        lanes={True: ON_CUDA},
        requires=requires or {},
        block="M",
        attest=_fact(f"mamba3_mimo.{name}"),
        attested_by=f"fact mamba3_mimo.{name}",
    )


_ENTRIES = (
    Gate(
        name="schedule",
        question="Does walking time in parallel chunks beat walking it step by step?",
        values=("sequential", "chunk_parallel"),
        default="chunk_parallel",
        path="model.scan.schedule",
        claim=Claim.RE_ASSOCIATES,
        lanes={"sequential": (Lane.REFERENCE, Lane.CUDA)},
        block="M",
        attest=_fact("mamba3_mimo.schedule"),
        attested_by="fact mamba3_mimo.schedule",
    ),
    Gate(
        name="chunk_size",
        question="How many tokens per chunk balance work inside a chunk against work between chunks?",
        values=(8, 16, 32, 64, 128, 256),
        default=16,
        path="model.scan.chunk_size",
        claim=Claim.RE_ASSOCIATES,
        unused_with={"schedule": "sequential"},
        block="M",
        attest=_fact("mamba3_mimo.chunk_size"),
        attested_by="fact mamba3_mimo.chunk_size",
    ),
    Gate(
        name="psiv_cache",
        question="Does saving PsiV for the backward pass beat recomputing it, at what cost in memory?",
        values=(False, True),
        default=False,
        path="model.scan.psiv_cache",
        claim=Claim.SCHEDULE_ONLY,
        lanes={True: (Lane.REFERENCE, Lane.CUDA)},
        block="M",
        attest=_psiv_cached,
        attested_by="facts mamba3_mimo.psiv_saved_bytes and mamba3_mimo.psiv_recomputes",
    ),
    Gate(
        name="loss",
        question="Does computing the cross entropy in chunks save memory without costing time?",
        values=("dense", "chunked"),
        default="dense",
        path="loss",
        claim=Claim.RE_ASSOCIATES,
        attest=_fact("loss.implementation"),
        attested_by="fact loss.implementation",
    ),
    _cuda_flag(
        "tma",
        "Does loading tiles with the tensor memory accelerator hide memory latency?",
        requires={"layout_2d": True},
    ),
    _cuda_flag(
        "warp_specialize", "Do separate producer and consumer warps overlap loads with math?", requires={"tma": True}
    ),
    _cuda_flag("aggressive_smem_merge", "Does overlapping shared-memory buffers raise occupancy?"),
    _cuda_flag("layout_2d", "Do two-dimensional shared-memory tiles cost anything by themselves?"),
    Gate(
        name="attention",
        question="Which attention implementation is fastest under the document mask?",
        values=("sdpa", "flash", "cudnn", "flex"),
        default="sdpa",
        path="model.attention.backend",
        claim=Claim.RE_ASSOCIATES,
        lanes={"flash": ON_CUDA, "cudnn": ON_CUDA, "flex": ON_CUDA},
        block="A",
        attest=_fact("attention.implementation"),
        attested_by="fact attention.implementation",
    ),
    Gate(
        name="compile",
        question="Does torch.compile pay for its compile time?",
        values=(False, True),
        default=False,
        path="compile",
        claim=Claim.RE_ASSOCIATES,
        lanes={True: (Lane.REFERENCE, Lane.CUDA)},
        attest=_compiled,
        attested_by="fact compile.graphs",
    ),
    Gate(
        name="lane",
        question="Which implementation family of the scan is fastest on this node class?",
        values=tuple(str(lane) for lane in Lane),
        default=str(Lane.REFERENCE),
        path="model.scan.lane",
        claim=Claim.RE_ASSOCIATES,
        lanes={str(lane): (lane,) for lane in Lane},
        block="M",
        attest=_fact("mamba3_mimo.lane"),
        attested_by="fact mamba3_mimo.lane",
    ),
    Gate(
        name="dtype",
        question="What do bfloat16 matrix multiplications gain, and what do they cost in loss?",
        values=("float32", "bfloat16"),
        default="float32",
        path="dtype",
        claim=Claim.CHANGES_MODEL,
        attest=_fact("hidden.dtype"),
        attested_by="fact hidden.dtype",
    ),
)

GATES: dict[str, Gate] = {gate.name: gate for gate in _ENTRIES}
"""Every gate by name."""


def runs_on(gate: Gate, value: GateValue) -> tuple[NodeClass, ...]:
    """Return the node classes on which some implemented lane can run `gate` at `value`."""
    needed = gate.lanes.get(value, ANY_LANE)
    return tuple(node for node, lanes in LANES_ON.items() if set(lanes) & set(needed))


def catalogue() -> list[GatePublic]:
    """Return every gate with the node classes that can run each of its values today."""
    return [
        GatePublic(
            name=gate.name,
            question=gate.question,
            values=gate.values,
            default=gate.default,
            claim=gate.claim,
            field=gate.path,
            requires=dict(gate.requires),
            unused_with=dict(gate.unused_with),
            node_classes={show(value): runs_on(gate, value) for value in gate.values},
            attested_by=gate.attested_by,
        )
        for gate in GATES.values()
    ]

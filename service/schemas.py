"""Wire types of the REST interface that people and programs read: the service builds them, the client reads them.

A reader passes over fields that it does not know: a newer service adds some.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from experiments.analysis.sizing import Sizing
from experiments.errors import SpecProblem
from experiments.outcomes import AblationState, BlockState, TrialState
from experiments.records.calibration import Calibration, Ledger
from experiments.records.messages import DeviceInfo
from experiments.records.signing import PublicKey
from service.lifecycle import EventKind

Item = TypeVar("Item")

INDEX = "Place of the block in the plan, from 0. People are shown its number, which counts from 1."


class _Public(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())


def _all_sent(schema: dict[str, Any]) -> None:
    """Say that the service sends every field; defaults are for the documents of others, such as a proxy's."""
    schema["required"] = list(schema["properties"])
    for field in schema["properties"].values():
        field.pop("default", None)


class ProblemDetail(_Public):
    """One thing that is wrong with a request."""

    model_config = ConfigDict(json_schema_extra=_all_sent)

    pointer: str = Field(default="", examples=["#/variants/psiv-on/gates/psiv_cach"])
    detail: str = Field(examples=["unknown gate 'psiv_cach'; known: psiv_cache, schedule"])
    hint: str | None = Field(default=None, examples=["did you mean 'psiv_cache'?"])

    @classmethod
    def of(cls, problem: SpecProblem) -> "ProblemDetail":
        """Return what the experiments found wrong as it is sent."""
        return cls(pointer=problem.pointer, detail=problem.detail, hint=problem.hint)


class Problem(_Public):
    """An RFC 9457 problem document."""

    model_config = ConfigDict(json_schema_extra=_all_sent)

    type: str = Field(default="about:blank", examples=["urn:ablate:problem:invalid-spec"])
    title: str = Field(examples=["Unprocessable Content"])
    status: int = Field(default=0, examples=[422])
    """HTTP status; 0 in a problem that no server answered."""
    detail: str = ""
    instance: str = Field(default="", examples=["/v1/ablations"])
    errors: tuple[ProblemDetail, ...] = ()
    request_id: str = ""


class Event(_Public):
    """One event of an ablation, as a stream carries it."""

    model_config = ConfigDict(populate_by_name=True)

    seq: int = 0
    at: str = ""
    kind: Annotated[EventKind | str, Field(union_mode="left_to_right")]
    """A name that is no EventKind comes from a newer service."""
    subject: str | None = None
    came_from: str | None = Field(default=None, alias="from")
    went_to: str | None = Field(default=None, alias="to")
    actor: str | None = None
    reason: str | None = None
    data: dict[str, Any] | None = None

    @classmethod
    def of(cls, kind: str, sequence: str, values: dict[str, Any]) -> "Event":
        """Read one server-sent event; its name and id fill in what the data leaves out."""
        given = {"kind": kind, **({"seq": int(sequence)} if sequence else {}), **values}
        return cls.model_validate(given)


@dataclass(frozen=True, kw_only=True)
class SpecBody:
    """A spec as somebody wrote it: bytes with their content type."""

    content: bytes
    content_type: str = "application/yaml"

    @classmethod
    def of(cls, spec: "SpecBody | Mapping[str, Any]") -> "SpecBody":
        """Return `spec` itself, or a mapping as JSON."""
        if isinstance(spec, SpecBody):
            return spec
        return cls(content=json.dumps(spec).encode(), content_type="application/json")


class Links(_Public):
    """Where to go from an ablation."""

    self: str
    events: str
    verdict: str
    report: str
    cancel: str


class PlanSummary(_Public):
    """The size of what will run."""

    arms: list[str]
    blocks: int
    trials: int
    node_class: str
    devices: int
    mde_pct_per_sd_pct: float | None
    expected_device_minutes: float | None


class AblationAccepted(_Public):
    """The answer to a submission."""

    id: str = Field(examples=["abl_01KAHZ3V5T8QW2R4Y6M9N0P1S3"])
    name: str
    state: AblationState
    spec_digest: str
    rule_digest: str
    plan: PlanSummary
    links: Links


class BlockCounts(_Public):
    """Blocks of an ablation."""

    planned: int
    done: int
    failed: int


class TrialCounts(_Public):
    """Trials of an ablation."""

    planned: int
    done: int


class AblationPublic(_Public):
    """An ablation as it stands."""

    id: str
    name: str
    question: str
    state: AblationState
    spec_digest: str
    rule_digest: str
    node_class: str
    created_at: str
    started_at: str | None
    finished_at: str | None
    blocks: BlockCounts
    trials: TrialCounts
    waiting_for: str | None
    """What a queued ablation waits for, in words."""
    labels: dict[str, str]
    mlflow_url: str | None
    bundles: list[str] = []
    """Digests of the bundles that it was imported from; empty when it was submitted here."""
    links: Links


class BlockPublic(_Public):
    """A block as it stands."""

    id: str
    index: int = Field(description=INDEX)
    seed: int
    order: list[str]
    state: BlockState
    attempt_no: int
    node_id: str | None
    started_at: str | None
    finished_at: str | None
    message: str | None


class Progress(_Public):
    """How far a trial is."""

    steps_done: int
    steps_total: int | None
    tokens_per_s: float | None
    loss: float | None


class TrialPublic(_Public):
    """A trial as it stands."""

    id: str
    block_id: str
    block_index: int = Field(description=INDEX)
    arm: str
    role: str
    position: int = Field(description="Place in the block's order, from 0.")
    state: TrialState
    outcome: str | None
    progress: Progress | None
    receipt_digest: str | None


class Page(_Public, Generic[Item]):
    """One page of a list."""

    items: list[Item]
    next_cursor: str | None
    """Give it back as `cursor` for the next page; null on the last."""


class ArmPublic(_Public):
    """One arm of a plan."""

    name: str
    role: str
    digest: str
    gates: dict[str, Any]


class BlockOrder(_Public):
    """One planned block."""

    index: int = Field(description=INDEX)
    seed: int
    order: list[str]


class NodeClassAnswer(_Public):
    """Whether nodes could run the plan now."""

    node_class: str
    live_nodes: int
    eligible: bool
    reason: str | None
    """Why not, when not."""


class PlanPublic(_Public):
    """What a spec would run, without running it."""

    ablation: str
    spec_digest: str
    rule_digest: str
    node_class: str
    devices: int
    arms: list[ArmPublic]
    blocks: list[BlockOrder]
    trials: int
    mde_pct_per_sd_pct: float | None
    sizing: Sizing | None
    """What it can see at the noise that was measured; None where no node of the class was calibrated for it."""
    expected_device_minutes: float | None
    node_classes: list[NodeClassAnswer]


class BundleFiles(_Public):
    """One bundle, as `ablate exec` wrote it."""

    files: dict[str, str] = Field(
        description="Text of every file by its path below the bundle.", examples=[{"manifest.json": "{...}"}]
    )


class ImportRequest(_Public):
    """Bundles of one plan; together they are the ablation."""

    bundles: list[BundleFiles] = Field(min_length=1, max_length=100)
    trust: list[PublicKey] = Field(default=[], max_length=100, description="Keys to trust from now on.")
    unsigned: bool = Field(default=False, description="Take files that nobody signed; the verdict will say so.")


class ImportPublic(_Public):
    """What an import did."""

    id: str = Field(examples=["abl_01KAHZ3V5T8QW2R4Y6M9N0P1S3"])
    name: str
    state: AblationState
    changed: bool
    """False when exactly these bundles had been imported before."""
    blocks_imported: int
    blocks_missing: list[int] = Field(
        description="Indices, from 0, of planned blocks that no bundle holds: missing data."
    )
    remarks: list[str]
    """What does not stop the import but has to be known."""
    links: Links


class NodePublic(_Public):
    """A node as it stands."""

    id: str
    name: str
    node_class: str
    health: str
    """`live`, or `silent` when it has not been heard for longer than a lease."""
    devices: list[DeviceInfo]
    versions: dict[str, str]
    code_digest: str
    lacks: list[str]
    public_key: str | None
    registered_at: str
    seen_at: str
    running_block: str | None


class NodeList(_Public):
    """Every node."""

    items: list[NodePublic]


class KeyPublic(_Public):
    """A key that a node signs with."""

    key: PublicKey
    node: str
    trusted_by: str
    trusted_at: str
    revoked_at: str | None
    reason: str | None


class KeyList(_Public):
    """Every key, by node."""

    items: list[KeyPublic]


class CalibrationPublic(_Public):
    """What A/A blocks say about one device and workload, and whether that still holds."""

    calibration: Calibration
    problem: str | None
    """Why it admits nothing now; None when it does."""
    mended_by: str | None
    """The command that mends it."""


class CalibrationList(_Public):
    """Everything that is known about noise, the newest last."""

    items: list[CalibrationPublic]
    ledger: Ledger
    statement: str
    """What the ledger supports, in one sentence."""


class SpecText(_Public):
    """A spec as its author wrote it."""

    text: str
    content_type: str


class AttemptClosed(_Public):
    """The answer to a report or a release."""

    attempt_id: str
    block_id: str
    block_state: BlockState


class Version(_Public):
    """Which code and schema answer."""

    version: str
    schema_revision: str
    receipt_schema: int


class DependencyCheck(_Public):
    """One thing that the service needs."""

    ok: bool
    detail: str


class Readiness(_Public):
    """Whether everything that the service needs can be reached."""

    ready: bool
    checks: dict[str, DependencyCheck]

"""Circumstances of an ablation: inputs of a verdict besides the receipts.

They are broken attempts, earlier ablations of the same question, and whether A/A blocks calibrate the device. The
service and the reader of a bundle collect them; the verdict repeats them.
"""

from typing import Final, Literal

from pydantic import Field

from ablate.experiments.documents import Frozen
from ablate.experiments.outcomes import AblationState, FailureClass
from ablate.experiments.records.calibration import Calibration, Ledger
from ablate.experiments.records.signing import PublicKey
from ablate.model.measurements import OmitNone


class AttemptRecord(Frozen):
    """An attempt at a block without receipts that count."""

    block_index: int
    """Index of the block in the plan, from 0."""
    number: int
    """Number of the attempt at this block, from 1."""
    failure_class: FailureClass
    arm: str | None
    """Arm whose trial ended the attempt, or ran when the worker vanished; None when unknown."""
    message: str
    node: str
    vanished: bool = Field(default=False, exclude_if=lambda vanished: not vanished)
    """Whether the worker vanished with the attempt; without a named arm, any arm may be the cause."""


REGISTERED: Final = "registered"
"""State of a plan that a service registered, and whose results nobody has imported."""


NOT_REGISTERED = "no service registered this plan before it ran, so nobody knows how often it was tried"


class EarlierAblation(Frozen):
    """An earlier ablation with a question of this one."""

    ablation: str
    name: str
    state: AblationState | Literal["registered"]
    created_at: str
    """RFC 3339 UTC."""
    asked: tuple[str, ...] = ()
    """Names of the variants of this ablation that it compared as well."""
    words: dict[str, str]
    """Published words of its own variants; empty without a verdict."""


class Family(Frozen):
    """Earlier askings of the same questions (a variant against its baseline, workload, metric, node class)."""

    question_digest: str | None = None
    """Of the questions of all variants; None where askings are not counted, as offline."""
    earlier: tuple[EarlierAblation, ...] = ()
    """Ablations that ran at least one trial, cancelled ones included; oldest first."""

    @property
    def number(self) -> int:
        """Number of this asking among those of all these questions, from 1."""
        return len(self.earlier) + 1

    def number_of(self, arm: str) -> int:
        """Return the number of this asking of the question of variant `arm`, from 1."""
        return 1 + sum(arm in one.asked for one in self.earlier)


class Admission(Frozen):
    """Whether the devices that ran may have verdict words, and why not."""

    calibrations: tuple[Calibration, ...] = ()
    """Of all devices that ran blocks."""
    refused_because: str | None = "no A/A blocks are known for this device"
    """None when words may be published."""
    mended_by: str | None = None
    """Command that fixes it."""
    ledger: Ledger = Ledger()
    """Measured rate of false verdicts of the service."""


class BlockSigner(Frozen):
    """Node that ran some blocks, and the key that it signed with for them."""

    node: str
    """Id of the node."""
    name: str
    key: PublicKey | None
    """None without a signature; then any holder of the files could have written them."""
    blocks: tuple[int, ...]
    """Indices in the plan, from 0."""


class Registration(Frozen):
    """A service's entry in a plan: it counted the questions, and drew the seeds, before the plan was carried away.

    Its service has the digest of the whole plan and compares it. Nobody else can.
    """

    registered_at: str
    """RFC 3339 UTC."""
    family: Family
    """Earlier askings of these questions."""


class CarriedPlan(Frozen):
    """Whether a service counted the questions of a plan that ran without one, before it ran."""

    registered_at: str | None
    """RFC 3339 UTC. None: nobody registered the plan, so nobody knows how often it was asked or its seeds drawn."""
    compared: bool
    """Whether the service compared the plan with the one that it registered; else the plan itself says so."""


class Circumstances(Frozen):
    """Inputs of a verdict besides plan, spec and receipts."""

    attempts: tuple[AttemptRecord, ...] = ()
    family: Family = Family()
    admission: Admission = Admission()
    signers: tuple[BlockSigner, ...] = ()
    """Of all finished blocks."""
    carried: OmitNone[CarriedPlan] = None
    """Of a plan with a question that ran without a service."""
    not_run: OmitNone[str] = None
    """Why planned blocks did not run, for example a used-up budget of device minutes."""


UNCALIBRATED = Circumstances()
"""First asking, no broken attempts, no A/A blocks."""
CALIBRATED = Circumstances(admission=Admission(refused_because=None))
"""No broken attempts, words may be published; for simulations and tests with noise of known size."""

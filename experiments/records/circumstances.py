"""Circumstances of an ablation: what a verdict takes into account besides its receipts.

Attempts that did not count, earlier ablations that asked the same question, and whether the device was admitted to
words by A/A blocks. The service and the reader of a bundle gather them; the judge reads them; the verdict repeats them.
"""

from experiments.documents import Frozen
from experiments.outcomes import AblationState, FailureClass
from experiments.records.calibration import Calibration, Ledger
from experiments.records.signing import PublicKey
from model.measurements import OmitNone


class AttemptRecord(Frozen):
    """One attempt at a block that left no receipts that count."""

    block_index: int
    """Index of the block in the plan, from 0."""
    number: int
    """Which attempt at this block it was, from 1."""
    failure_class: FailureClass
    arm: str | None
    """The arm whose trial ended the attempt; None where it cannot be told."""
    message: str
    node: str


class EarlierAblation(Frozen):
    """An ablation that asked a question of this one before."""

    ablation: str
    name: str
    state: AblationState
    created_at: str
    """RFC 3339 UTC."""
    asked: tuple[str, ...] = ()
    """Variants of this ablation, by their names here, that it had compared as well."""
    words: dict[str, str]
    """Published word of each of its own variants; empty without a verdict."""


class Family(Frozen):
    """How often the same questions (a variant against its baseline, workload, metric, node class) have been asked."""

    question_digest: str | None = None
    """Of what all variants ask; None where nobody keeps count, as offline."""
    earlier: tuple[EarlierAblation, ...] = ()
    """Oldest first, cancelled ones included; only those that ran something."""

    @property
    def number(self) -> int:
        """Which asking of any of these questions it is, from 1."""
        return len(self.earlier) + 1

    def number_of(self, arm: str) -> int:
        """Return which asking of the question of the variant `arm` it is, from 1."""
        return 1 + sum(arm in one.asked for one in self.earlier)


class Admission(Frozen):
    """Whether words may be published for the devices that ran, and why not."""

    calibrations: tuple[Calibration, ...] = ()
    """Of every device that ran blocks."""
    refused_because: str | None = "no A/A blocks are known for this device"
    """None when words may be published."""
    mended_by: str | None = None
    """The command that mends it."""
    ledger: Ledger = Ledger()
    """The service's own rate of false words, as far as it is known."""


class BlockSigner(Frozen):
    """Who answers for some blocks: the node that ran them, and the key that it signed them with."""

    node: str
    """Its id."""
    name: str
    key: PublicKey | None
    """None where nobody signed: then whoever held the files could have written them."""
    blocks: tuple[int, ...]
    """Indices in the plan, from 0."""


class Circumstances(Frozen):
    """Everything that a verdict takes into account besides plan, spec and receipts."""

    attempts: tuple[AttemptRecord, ...] = ()
    family: Family = Family()
    admission: Admission = Admission()
    signers: tuple[BlockSigner, ...] = ()
    """Of every finished block."""
    not_run: OmitNone[str] = None
    """Why planned blocks were not run, for example that the budget of device minutes is used up."""


UNCALIBRATED = Circumstances()
"""Nothing is known: first time, nothing broke, no A/A blocks."""
CALIBRATED = Circumstances(admission=Admission(refused_because=None))
"""Nothing broke and words may be published: for simulations and tests, where the noise is known by construction."""

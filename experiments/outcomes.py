"""Closed vocabularies: roles, states, outcomes, failure classes, verdicts, decisions, proposals, exit codes."""

from enum import Enum, IntEnum, StrEnum, auto
from typing import Final, Literal, NamedTuple, TypeAlias

ArmRole: TypeAlias = Literal["baseline", "variant", "control"]
BASELINE: Final = "baseline"
"""Role and name of the arm that the others are compared with; no other arm may have this name."""
VARIANT: Final = "variant"
CONTROL: Final = "control"
"""Role of an arm that repeats the baseline; the service adds one to some plans to monitor the noise."""

DECLARED: Final = "declared, not attested"
"""How a receipt says that an arm's arguments, variables or code were requested and nothing proves them."""


class AblationState(StrEnum):
    """State of an ablation."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    COMPLETED = "completed"
    FAILED = "failed"


class BlockState(StrEnum):
    """State of a block."""

    HELD = "held"
    """After a look: it runs only if the look does not decide."""
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TrialState(StrEnum):
    """State of a trial."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class AttemptState(StrEnum):
    """State of an attempt."""

    RUNNING = "running"
    DONE = "done"
    BROKEN = "broken"
    EXPIRED = "expired"


class Outcome(StrEnum):
    """Outcome of a trial, as its receipt stores it."""

    MEASURED = "measured"
    OOM = "oom"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    INVALID = "invalid"
    FAILED = "failed"


class FinalWhen(Enum):
    """Earlier breaks of a failure class that count towards making it a result of the arm."""

    ARM = auto()
    """Breaks by the same arm in any block of the ablation."""
    BLOCK = auto()
    """Breaks of the same block by any arm."""
    ARM_IN_BLOCK = auto()
    """Breaks by the same arm in the same block."""


class FailureRule(NamedTuple):
    """What follows from one failure class."""

    attempts: int = 1
    """Attempts at one block that may end by this class, which then becomes final. Each class counts separately."""
    rests_s: tuple[float, ...] = (0.0,)
    """Seconds that the block waits after its first, second, ... such attempt; the last value repeats."""
    elsewhere: bool = False
    """Whether the next attempt should run on another node."""
    is_result: bool = False
    """Whether it is a result of the arm, not of the node: the block counts, and the receipt records the failure."""
    final_when: FinalWhen | None = None
    """Breaks that make it a result of the arm at the last allowed attempt; None if none do."""
    speaks_against_node: bool = False
    """Whether it indicates a bad node when it repeats there over different work."""
    outcome: Outcome = Outcome.FAILED
    """Outcome in the receipt of its trial."""


_ONE_ATTEMPT = FailureRule()


class FailureClass(StrEnum):
    """Why a trial or an attempt has no measurement."""

    rule: FailureRule

    def __new__(cls, value: str, rule: FailureRule = _ONE_ATTEMPT) -> "FailureClass":
        """Make the member of this value."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.rule = rule
        return member

    USER_ERROR = "user_error", FailureRule(is_result=True)
    OOM = "oom", FailureRule(is_result=True, outcome=Outcome.OOM)
    NUMERICS = "numerics", FailureRule(is_result=True)
    OUTPUT_LIMIT = "output_limit", FailureRule(is_result=True)
    GATE_REFUSED = "gate_refused", FailureRule(is_result=True, outcome=Outcome.REFUSED)
    INFRA_NODE = (
        "infra_node",
        FailureRule(
            5,
            (0.0, 2.0, 4.0, 8.0, 16.0),
            elsewhere=True,
            final_when=FinalWhen.ARM_IN_BLOCK,
            speaks_against_node=True,
        ),
    )
    INFRA_CONTROL = "infra_control", FailureRule(5, (1.0, 2.0, 4.0, 8.0, 16.0))
    PREEMPTED = "preempted", FailureRule(10)
    TIMEOUT = "timeout", FailureRule(2, final_when=FinalWhen.ARM, outcome=Outcome.TIMEOUT)
    CANCELLED = "cancelled"
    INVALID_MEASUREMENT = (
        "invalid_measurement",
        FailureRule(3, (2.0, 15.0), elsewhere=True, final_when=FinalWhen.BLOCK, outcome=Outcome.INVALID),
    )
    DISTURBED = (
        "disturbed",
        FailureRule(2, (1.0,), elsewhere=True, final_when=FinalWhen.BLOCK, outcome=Outcome.INVALID),
    )
    """Others took more of the cores' time than the spec allows. The last attempt counts with any load."""
    NO_RECEIPT = (
        "no_receipt",
        FailureRule(3, (0.0, 4.0), elsewhere=True, final_when=FinalWhen.ARM, speaks_against_node=True),
    )


class VerdictWord(StrEnum):
    """The answer for one variant."""

    BETTER = "better"
    SAME = "same"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"
    INVALID = "invalid"
    REFUSED = "refused"
    OOM = "oom"
    TIMEOUT = "timeout"
    FAILED = "failed"


GOOD = (VerdictWord.BETTER, VerdictWord.SAME)
"""Verdicts of a variant that may be used."""


class Decision(StrEnum):
    """Decision of the pre-registered rule on a variant; sets the exit code of `ablate verdict`."""

    ADOPT = "adopt"
    REJECT = "reject"
    SAME = "same"
    INCONCLUSIVE = "inconclusive"
    INVALID = "invalid"


class SeedOrigin(StrEnum):
    """How the seeds of a plan came about."""

    CHOSEN = "chosen"
    """The spec lists them, so its author may know what they do."""
    DRAWN = "drawn"
    """Drawn after the spec was fixed."""
    TO_BE_DRAWN = "to be drawn"
    """Blocks have numbers of seeds, from 1. Nothing may run."""


class Required(StrEnum):
    """What `--require` can demand of every variant: a decision, or a proof."""

    ADOPT = "adopt"
    REJECT = "reject"
    SAME = "same"
    INCONCLUSIVE = "inconclusive"
    INVALID = "invalid"
    NOT_WORSE = "not-worse"
    """The verdict is better or same, and every requirement of the rule is met."""


class ProposalOutcome(StrEnum):
    """Answer to a proposal."""

    KEEP = "keep"
    """The rule adopts it: it is the next incumbent."""
    DISCARD = "discard"
    """Proved to be worse or the same, better by less than the rule asks for, or a requirement is not met."""
    UNDECIDED = "undecided"
    """Everything else: not proved, no valid measurements, cancelled."""


class ExitCode(IntEnum):
    """Exit codes of all our programs; each code has one meaning in all commands."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> "ExitCode":
        """Create the member `value` with its meaning."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    DONE = 0, "done; for `verdict` and `--require`: adopt, or the required decision; for `try`: keep"
    REJECT = 1, "the decision is reject; for `try`: discard"
    SAME = 2, "the decision is same"
    INCONCLUSIVE = 3, "the decision is inconclusive; for `try`: undecided"
    INVALID = 4, "the decision is invalid"
    ERROR = 5, "an error with a message: rejected, not reachable, ended without a verdict"
    UNMET = 6, "a failed check: nothing runs, damaged, missing; for `--require`: adopt instead of the required decision"
    USAGE = 64, "wrong usage: unknown command, option or value"
    BUG = 70, "a bug in Ablate, with a traceback; please report it"
    DETACHED = 130, "ended by Ctrl-C; the watched ablation continues"
    CLOSED_PIPE = 141, "the reader of the output closed the pipe"


EXIT_CODES: dict[Decision, ExitCode] = {
    Decision.ADOPT: ExitCode.DONE,
    Decision.REJECT: ExitCode.REJECT,
    Decision.SAME: ExitCode.SAME,
    Decision.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
    Decision.INVALID: ExitCode.INVALID,
}

PROPOSAL_EXIT_CODES: dict[ProposalOutcome, ExitCode] = {
    ProposalOutcome.KEEP: ExitCode.DONE,
    ProposalOutcome.DISCARD: ExitCode.REJECT,
    ProposalOutcome.UNDECIDED: ExitCode.INCONCLUSIVE,
}

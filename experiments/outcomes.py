"""Closed vocabularies: roles, states, outcomes, failure classes, verdicts, decisions, exit codes."""

from enum import IntEnum, StrEnum
from typing import Final, Literal, TypeAlias

ArmRole: TypeAlias = Literal["baseline", "variant", "control"]
BASELINE: Final = "baseline"
"""Role and name of the arm that the others are compared with; no other arm may have it as its name."""
VARIANT: Final = "variant"
CONTROL: Final = "control"
"""Role of an arm that repeats the baseline, which the service adds to some plans to watch the noise."""


class AblationState(StrEnum):
    """Where an ablation is."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    COMPLETED = "completed"
    FAILED = "failed"


class BlockState(StrEnum):
    """Where a block is."""

    HELD = "held"
    """Beyond a look: it runs only if the look does not decide."""
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TrialState(StrEnum):
    """Where a trial is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class AttemptState(StrEnum):
    """Where an attempt is."""

    RUNNING = "running"
    DONE = "done"
    BROKEN = "broken"
    RELEASED = "released"
    EXPIRED = "expired"


class Outcome(StrEnum):
    """How a trial ended; stored in its receipt."""

    MEASURED = "measured"
    OOM = "oom"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    INVALID = "invalid"
    FAILED = "failed"


class FailureClass(StrEnum):
    """Why a trial or an attempt did not measure."""

    USER_ERROR = "user_error"
    OOM = "oom"
    NUMERICS = "numerics"
    GATE_REFUSED = "gate_refused"
    INFRA_NODE = "infra_node"
    INFRA_CONTROL = "infra_control"
    PREEMPTED = "preempted"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    INVALID_MEASUREMENT = "invalid_measurement"
    NO_RECEIPT = "no_receipt"


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


class Decision(StrEnum):
    """What the pre-registered rule says to do with a variant; the exit codes of `ablate verdict` follow it."""

    ADOPT = "adopt"
    REJECT = "reject"
    SAME = "same"
    INCONCLUSIVE = "inconclusive"
    INVALID = "invalid"


class ExitCode(IntEnum):
    """How a program of ours ended. No code has two meanings, whatever the command."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> "ExitCode":
        """Make the member `value` that means `meaning`."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    DONE = 0, "done; of `verdict` and `--require`: adopt, or what was required"
    REJECT = 1, "the decision is reject"
    SAME = 2, "the decision is same"
    INCONCLUSIVE = 3, "the decision is inconclusive"
    INVALID = 4, "the decision is invalid"
    ERROR = 5, "an error that was told: refused, not reachable, ended without a verdict"
    UNMET = (
        6,
        "a check does not hold: nothing runs, damaged, missing; of `--require`: adopt where another was required",
    )
    USAGE = 64, "wrong usage: no such command, option or value"
    BUG = 70, "a mistake of ours, with a traceback; please report it"
    DETACHED = 130, "ended by Ctrl-C; what was watched goes on"
    CLOSED_PIPE = 141, "whoever read the output left before its end"


EXIT_CODES: dict[Decision, ExitCode] = {
    Decision.ADOPT: ExitCode.DONE,
    Decision.REJECT: ExitCode.REJECT,
    Decision.SAME: ExitCode.SAME,
    Decision.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
    Decision.INVALID: ExitCode.INVALID,
}

"""Guards: checks that make receipts invalid, on one receipt, inside a block, and between blocks."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from ablate.experiments.block_numbers import block_name
from ablate.experiments.design.gates import GATES
from ablate.experiments.design.plan import Plan
from ablate.experiments.design.rule import MAX_BACKWARD_S, MAX_CLOCK_GAP, MAX_PAUSE_S
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.identity import mismatches, planned_fields
from ablate.experiments.records.receipt_clocks import slice_problems
from ablate.experiments.records.receipts import Receipt, held_by
from ablate.experiments.records.trial_guards import cache_problems, timing_problems, trial_problems, window_s
from ablate.kernels.scan_switches import ScanFact

_SAME_IN_BLOCK: dict[str, Callable[[Receipt], Any]] = {
    "code": lambda receipt: receipt.digests.code,
    "data": lambda receipt: receipt.digests.data,
    "validation data": lambda receipt: receipt.digests.validation,
    "device": lambda receipt: (receipt.ids.node, _devices(receipt)[0]),
    "attempt": lambda receipt: receipt.ids.attempt,
    "uncommitted patch": lambda receipt: receipt.environment.git_dirty_digest,
    "software versions": lambda receipt: dict(receipt.environment.versions),
    "number of CPU threads": lambda receipt: receipt.environment.cpu_threads,
    "code of the evaluation": lambda receipt: _evaluation_code(receipt),
}
"""Values that must be equal over all trials of a block."""

_SAME_EVERYWHERE: dict[str, Callable[[Receipt], Any]] = {
    "code": lambda receipt: receipt.digests.code,
    "data": lambda receipt: receipt.digests.data,
    "validation data": lambda receipt: receipt.digests.validation,
    "kind of device": lambda receipt: {name for name, _serial in held_by(receipt.environment)},
    "software versions": lambda receipt: _software(receipt),
    "number of CPU threads": lambda receipt: receipt.environment.cpu_threads,
    "code of the evaluation": lambda receipt: _evaluation_code(receipt),
}
"""Values that must be equal over all blocks. Nodes of a class may differ in serial number, kernel and isolation."""


_SAME_PROGRAM: dict[str, Callable[[Receipt], Any]] = {
    "the program's code": lambda receipt: receipt.program and receipt.program.code,
    "the interpreter": lambda receipt: receipt.program and receipt.program.interpreter,
    "an installed package": lambda receipt: receipt.program and receipt.program.packages,
    "the number of ranks": lambda receipt: receipt.program and receipt.program.ranks,
}
"""Values that must be equal over all blocks of one arm."""


_AMONG: dict[str, Callable[[Receipt], Any]] = {
    "data": lambda receipt: receipt.config.dataset,
    "validation data": lambda receipt: receipt.config.rows.validation,
}
"""Values that must be equal among the trials only whose configurations have this in common."""


def _evaluation_code(receipt: Receipt) -> str | None:
    evaluation = receipt.program and receipt.program.evaluation
    return evaluation.code if evaluation else None


def _software(receipt: Receipt) -> dict[str, str]:
    versions = receipt.environment.versions.items()
    return {name: version for name, version in versions if name not in {"kernel", "isolation"}}


def receipt_problems(receipt: Receipt, plan: Plan) -> list[str]:
    """Return the guards that one measured trial breaks, and its differences from `plan`."""
    return [
        *_identity_problems(receipt, plan),
        *trial_problems(receipt),
        *(timing_problems(receipt) if plan.timed else ()),
        *(cache_problems(receipt) if plan.cold_caches else ()),
    ]


def _identity_problems(receipt: Receipt, plan: Plan) -> Iterator[str]:
    expected = planned_fields(plan, receipt.ids.block_index, receipt.arm)
    for field, detail in mismatches(receipt.model_dump(mode="json", include=set(expected)), expected):
        yield f"{field} {detail}"


def block_problems(receipts: Sequence[Receipt]) -> list[str]:
    """Return the guards that the measured trials of one block break together."""
    measured = [receipt for receipt in receipts if receipt.outcome is Outcome.MEASURED]
    differing = list(_differing(measured, _SAME_IN_BLOCK))
    if "device" not in differing and not _share_devices(measured):
        differing.append("device")
    return [f"{what} differs inside the block" for what in differing]


def _share_devices(receipts: Sequence[Receipt]) -> bool:
    """Say whether all trials used the same devices; one with fewer than another must have used the first ones."""
    used = [_devices(receipt) for receipt in receipts]
    most = max(used, key=len, default=())
    return all(devices == most[: len(devices)] for devices in used)


def _devices(receipt: Receipt) -> tuple[tuple[Any, ...], ...]:
    """Return number, name and serial number of each device of a trial; `ids.device` is like node-a/0,1."""
    return tuple(zip_longest(str(receipt.ids.device).split(","), held_by(receipt.environment)))


def between_blocks_problem(receipts: Sequence[Receipt]) -> str | None:
    """Return the first difference between the measured trials of different blocks, or None."""
    measured = [receipt for receipt in receipts if receipt.outcome is Outcome.MEASURED]
    for what, other in _differing(measured, _SAME_EVERYWHERE).items():
        one, two = block_name(measured[0].ids.block_index), block_name(other.ids.block_index)
        return f"{what} of {one} and {two} differ: a comparison over both would compare more than the arms"
    return None


def program_problem(receipts: Sequence[Receipt]) -> str | None:
    """Return the first difference between the programs of one arm's measured trials, or None."""
    measured = [receipt for receipt in receipts if receipt.outcome is Outcome.MEASURED and receipt.program]
    for what, other in _differing(measured, _SAME_PROGRAM).items():
        one, two = block_name(measured[0].ids.block_index), block_name(other.ids.block_index)
        return f"{what} of arm '{other.arm}' changed between {one} and {two}"
    return None


def _differing(receipts: Sequence[Receipt], guards: Mapping[str, Callable[[Receipt], Any]]) -> dict[str, Receipt]:
    """Return the values that differ, each with the first receipt that differs from an earlier one."""
    first_other = {what: _first_other(receipts, read, _AMONG.get(what)) for what, read in guards.items()}
    return {what: other for what, other in first_other.items() if other is not None}


def _first_other(
    receipts: Sequence[Receipt], read: Callable[[Receipt], Any], among: Callable[[Receipt], Any] | None
) -> Receipt | None:
    """Return the first receipt whose value is not that of the first one, or with `among` of the first of its group."""
    if all(read(receipt) == read(receipts[0]) for receipt in receipts):
        return None
    groups: list[tuple[Any, Receipt]] = []
    for receipt in receipts:
        group = among and among(receipt)
        first = next((one for own, one in groups if own == group), None)
        if first is None:
            groups.append((group, receipt))
        elif read(receipt) != read(first):
            return receipt
    return None


def order_problems(receipts: Sequence[Receipt]) -> Iterator[str]:
    """Yield trials of one block that did not follow each other closely and in order, by their clocks.

    For metrics of time. Neighbours of a missing trial are not checked. Trials in slices are checked slice by slice.
    """
    if any(receipt.waited_s is not None for receipt in receipts):
        yield from slice_problems(receipts)
        return
    in_order = sorted(receipts, key=lambda receipt: receipt.ids.position)
    for earlier, later in pairwise(in_order):
        if later.ids.position - earlier.ids.position != 1:
            continue
        pause = pause_s(earlier, later)
        if pause < -MAX_BACKWARD_S:
            yield f"arm '{later.arm}' started {-pause:.0f} s before arm '{earlier.arm}' had ended"
        if pause > MAX_PAUSE_S:
            yield f"arm '{later.arm}' started {pause:.0f} s after arm '{earlier.arm}'; allowed: {MAX_PAUSE_S:.0f} s"


def pause_s(earlier: Receipt, later: Receipt) -> float:
    """Return the seconds from the end of one trial to the start of another one; negative if they overlap."""
    return (started(later) - started(earlier)).total_seconds() - earlier.wall_s


def started(receipt: Receipt) -> datetime:
    """Return when a trial started."""
    return datetime.fromisoformat(receipt.started_at)


def unchanged_kernels(variant: Receipt, baseline: Receipt) -> str | None:
    """Return the kernel gates that differ between the arms although the arms' kernels are the same, or None."""
    own, other = _requested(variant), _requested(baseline)
    changed = [
        gate.name
        for gate in GATES.values()
        if gate.in_kernels and own.get(gate.name) != other.get(gate.name) and gate.unused_because(own) is None
    ]
    kernels = _kernel_hashes(variant)
    if not changed or not kernels or kernels != _kernel_hashes(baseline):
        return None
    names = " and ".join(f"gate '{name}'" for name in changed)
    return f"kernel source is identical to the baseline's: {names} changed nothing"


def _requested(receipt: Receipt) -> dict[str, Any]:
    return {name: reading.requested for name, reading in receipt.gates.items()}


def _kernel_hashes(receipt: Receipt) -> dict[str, Any]:
    """Return the hashes of the kernels that ran: of the machine code if recorded, else of the source."""
    for kind in (ScanFact.BINARY_HASH, ScanFact.SOURCE_HASH):
        hashes = {name: value for name, value in receipt.facts.items() if name.startswith(kind)}
        if hashes:
            return hashes
    return {}


def clock_problem(variants: Sequence[Receipt], baselines: Sequence[Receipt]) -> str | None:
    """Return why device clocks may explain a difference, or None.

    They may if they are over 1 % apart and less than half of the difference in time remains in cycles, unless the
    device's power limit lowered the slower clock: then the clock follows from what the arm computes.
    """
    gap = _clock_gap(variants, baselines)
    if gap is None or gap.limited or (gap.time * gap.cycles > 0 and abs(gap.cycles) >= abs(gap.time) / 2):
        return None
    return f"median device clock {gap.own:.0f} MHz against the baseline's {gap.other:.0f} MHz explains the difference"


def clock_note(variants: Sequence[Receipt], baselines: Sequence[Receipt]) -> str | None:
    """Say what remains of a difference at equal clocks where the device's power limit lowered one of them."""
    gap = _clock_gap(variants, baselines)
    if gap is None or not gap.limited:
        return None
    remains = 100 * math.expm1(-gap.cycles)
    return (
        f"the power limit of the device held the clock at {gap.own:.0f} MHz, the baseline's at {gap.other:.0f} MHz; "
        f"at equal clocks the speed of a device would differ by {remains:+.2f} %"
    )


class _ClockGap(NamedTuple):
    """Median device clocks that are over 1 % apart, in MHz, and mean logarithms of times against the baseline.

    The times are those of a device for its share of a step, or of a token where tokens are counted.
    """

    own: float
    other: float
    time: float
    cycles: float
    limited: bool
    """Whether the power limit slowed every trial with the slower clock, for at least half of its window."""


def _clock_gap(variants: Sequence[Receipt], baselines: Sequence[Receipt]) -> _ClockGap | None:
    own, other = median_clock_mhz(variants), median_clock_mhz(baselines)
    if own is None or other is None or max(own, other) <= (1 + MAX_CLOCK_GAP) * min(own, other):
        return None
    time = _mean_log_time(variants) - _mean_log_time(baselines)
    slower = variants if own < other else baselines
    limited = all(_seconds_limited(one) >= window_s(one) / 2 for one in slower)
    return _ClockGap(own, other, time, time + math.log(own / other), limited)


def _seconds_limited(receipt: Receipt) -> float:
    events = receipt.environment.throttle
    return (events and events.sw_power_cap) or 0.0


def _mean_log_time(receipts: Sequence[Receipt]) -> float:
    return statistics.fmean(
        math.log(one.config.devices / one.summary.tokens_per_s if one.summary.tokens_per_s else one.summary.step_s_mean)
        for one in receipts
        if one.summary
    )


def median_clock_mhz(receipts: Sequence[Receipt]) -> float | None:
    """Return the median device clock of the timed steps; None unless every step has one."""
    clocks = [step.clock_mhz for receipt in receipts for step in receipt.steps if step.phase == "timed"]
    recorded = [clock for clock in clocks if clock is not None]
    return statistics.median(recorded) if recorded and len(recorded) == len(clocks) else None

"""Run the blocks of a plan on this node into a bundle, with a service's rules but without a service.

A block runs whole or not at all. It is retried as often as its failure allows, and is not started when the device
minutes are used up.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ablate.experiments.block_numbers import block_name
from ablate.experiments.ids import new_id
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.bundle import Attempt, BrokenAttempt, Bundle, breaks, used_up_by
from ablate.experiments.records.identity import ClaimedBlock
from ablate.experiments.records.plan_file import PlanFile
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.retries import TrialEnd, attempt_words, budget_spent, nothing_to_compare, retry_wait_s
from ablate.workers.blocks.block_runner import BlockRunner
from ablate.workers.errors import BlockBroken, BlockStopped, ExecRefused
from ablate.workers.lease import Lease, boot_time_s
from ablate.workers.offline.bundle_folder import BundleFolder
from ablate.workers.offline.progress import ProgressDisplay
from ablate.workers.processes.trial_output import BlockOutput
from ablate.workers.trials.failures import MESSAGE_LIMIT

_CHECK_EVERY_S = 0.2
"""How often a pause looks for a signal to stop."""


@dataclass(frozen=True, kw_only=True)
class ExecSummary:
    """The result of one run. Blocks are indices in the plan."""

    done: tuple[int, ...]
    """In the bundle now, including earlier runs."""
    failed: tuple[int, ...]
    """Used up their attempts."""
    stopped: str | None
    """Why the run ended before its last block."""


class ExecRun:
    """One run of `ablate offline exec`."""

    def __init__(
        self, plan_file: PlanFile, folder: BundleFolder, runner: BlockRunner, display: ProgressDisplay, *, node_id: str
    ) -> None:
        self._plan_file = plan_file
        self._folder = folder
        self._runner = runner
        self._display = display
        self._node_id = node_id
        self._done: dict[int, float] = {}
        """Seconds of finished blocks."""
        self._broken: list[BrokenAttempt] = []

    def run(self, wanted: Sequence[int], bundle: Bundle, *, stopping: Callable[[], bool]) -> ExecSummary:
        """Run the blocks `wanted` that are not in `bundle` yet."""
        self._done = {block.attempt.index: block.attempt.seconds for block in bundle.blocks}
        self._broken = list(bundle.broken)
        stopped = None
        for index in wanted:
            while stopped is None and self._is_open(index):
                stopped = self._why_not(stopping) or self._try(index)
                if stopped is None and self._is_open(index):
                    self._rest(stopping)
        failed = tuple(index for index in wanted if index not in self._done and not self._is_open(index))
        return ExecSummary(done=tuple(sorted(self._done)), failed=failed, stopped=stopped)

    def rehearse(self, index: int) -> None:
        """Run one step of every arm. Raises ExecRefused when an arm, or this node, cannot run."""
        claimed = self._claim(index)
        output = BlockOutput()
        self._display.begins("rehearsal", claimed, output)
        problems = []
        try:
            for sentence in self._runner.rehearse(claimed, _endless(), output):
                self._display.print_line(f"rehearsal: {sentence}")
                problems.append(sentence)
        except BlockBroken as broken:
            raise ExecRefused(f"the rehearsal failed: {broken.message}") from broken
        except BlockStopped as stopped:
            raise ExecRefused(f"the rehearsal was stopped: {stopped.reason}") from stopped
        finally:
            self._display.ends()
            self._folder.drop_work_of(claimed.attempt_id)
        if problems:
            raise ExecRefused("; ".join(problems))

    def _is_open(self, index: int) -> bool:
        return index not in self._done and used_up_by(self._broken, index) is None

    def _why_not(self, stopping: Callable[[], bool]) -> str | None:
        """Return why no further block may start, None if one may."""
        if stopping():
            return "a signal stopped it"
        if self._runner.quarantine is not None:
            return f"this node must be repaired first: {self._runner.quarantine}"
        seconds = sum(self._done.values()) + sum(record.seconds for record in self._broken)
        used = self._plan_file.plan.busy_devices * seconds / 60
        return budget_spent(used, self._plan_file.spec.limits.device_minutes)

    def _rest(self, stopping: Callable[[], bool]) -> None:
        """Wait as long as a service would before the broken block runs again, or until the run has to stop."""
        broken = breaks(self._broken)
        until = time.monotonic() + retry_wait_s(broken, broken[-1])
        while (left_s := until - time.monotonic()) > 0 and not stopping():
            time.sleep(min(left_s, _CHECK_EVERY_S))

    def _claim(self, index: int) -> ClaimedBlock:
        attempt_no = 1 + sum(record.index == index for record in self._broken)
        broken = breaks(self._broken)
        return self._plan_file.claimed(index, attempt_id=new_id("att"), attempt_no=attempt_no, broken=broken)

    def _try(self, index: int) -> str | None:
        """Run a block once; return why the whole run has to stop, None if it may go on.

        After any other exception the next run finds the attempt and records it.
        """
        claimed, started_at = self._claim(index), datetime.now(UTC)
        output, problem = BlockOutput(), None
        self._folder.begin(Attempt(started_at=started_at, ended_at=started_at, **self._names(claimed)))
        self._display.begins(block_name(index, len(self._plan_file.plan.blocks)), claimed, output)
        try:
            receipts = self._runner.run(claimed, _endless(), output)
            attempt = Attempt(started_at=started_at, ended_at=datetime.now(UTC), **self._names(claimed))
            self._folder.keep_block(attempt, receipts)
            self._done[index] = attempt.seconds
            problem = self._first_block_problem(receipts) if len(self._done) == 1 else None
        except BlockBroken as broken:
            self._keep_broken(claimed, started_at, broken)
        except BlockStopped as stopped:
            self._keep_broken(claimed, started_at, BlockBroken(FailureClass.PREEMPTED, f"stopped: {stopped.reason}"))
            self._folder.drop_work_of(claimed.attempt_id)
            return f"it was stopped ({stopped.reason}); {block_name(index)} will run again whole"
        finally:
            self._display.ends(counted=index in self._done)
        self._folder.drop_work_of(claimed.attempt_id)
        return problem

    @staticmethod
    def _first_block_problem(receipts: Sequence[Receipt]) -> str | None:
        """Return why no other block may start; whoever runs the command again goes on with them."""
        ends = [TrialEnd(one.arm, one.role, one.outcome, one.message or "") for one in receipts]
        problem = nothing_to_compare(ends)
        return None if problem is None else f"{problem[0]}, so nothing can be compared: {problem[1][:MESSAGE_LIMIT]}"

    def _keep_broken(self, claimed: ClaimedBlock, started_at: object, broken: BlockBroken) -> None:
        record = BrokenAttempt.model_validate(
            {
                **self._names(claimed),
                "started_at": started_at,
                "ended_at": datetime.now(UTC),
                "failure_class": broken.failure_class,
                "arm": broken.arm,
                "message": broken.message[:MESSAGE_LIMIT],
            }
        )
        self._broken.append(record)
        self._folder.keep_broken(record)
        which = attempt_words(breaks(self._broken), record.as_break)
        self._display.print_line(f"{block_name(record.index)} broke, {which}: {broken.message}")

    def _names(self, claimed: ClaimedBlock) -> dict[str, object]:
        return {
            "index": claimed.block_index,
            "attempt_id": claimed.attempt_id,
            "attempt_no": claimed.attempt_no,
            "node_id": self._node_id,
        }


def _endless() -> Lease:
    """Return a lease that never ends: no other node can claim the block."""
    return Lease(math.inf, sent_at=boot_time_s())

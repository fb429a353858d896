"""Run the trials of one block, one after another or in slices, and make their receipts.

Knows nothing of who asked for the block.
"""

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from experiments.analysis.guards import block_problems, order_problems
from experiments.design.fields import read_config
from experiments.outcomes import BASELINE, FailureClass
from experiments.records.messages import ClaimedBlock, ClaimedTrial
from experiments.records.receipts import Receipt, read_gates
from experiments.records.signing import Signer
from kernels.backends import NodeClass
from workers.devices.device_state import DeviceState, changes
from workers.devices.release import ReleaseProof
from workers.errors import BlockBroken, BlockStopped
from workers.identity.node import Node, load_average
from workers.lease import Lease, StopReason
from workers.paths import WorkPaths, write_whole
from workers.processes.foreign_processes import ProcessTimes, busiest, process_times
from workers.processes.result import TrialOrder, TrialResult, read_result
from workers.processes.runner import Ending, TrialRunner
from workers.processes.slices import SlicedBlock, SlicedTrial
from workers.processes.trial_output import BlockOutput, say_stopped
from workers.receipt import TrialRecord, dead_gate, how_far

_log = logging.getLogger(__name__)


def _say_nothing(_receipt: Receipt) -> None:
    return


@dataclass(frozen=True, kw_only=True)
class NodeContext:
    """What this node runs blocks with, whoever asks for them."""

    node: Node
    node_id: str
    runner: TrialRunner
    paths: WorkPaths
    data_dir: Path
    """Prepared datasets."""
    proof: ReleaseProof
    """That nothing of a trial is left on the devices."""
    signer: Signer | None = None
    """Key that this node signs reports with; None on an air-gapped node that cannot sign."""
    corpus_roots: tuple[Path, ...] | None = None
    """Folders that a corpus may lie in; None for any, where who runs the plan also chose it."""


@dataclass(frozen=True, kw_only=True)
class _Before:
    """What was seen just before a trial."""

    started_at: datetime
    load_average: float
    device: DeviceState | None
    processes: ProcessTimes


class BlockRunner:
    """Runs blocks on this node, and knows what it has prepared and why it may run nothing more."""

    def __init__(self, context: NodeContext, *, on_receipt: Callable[[Receipt], None] = _say_nothing) -> None:
        self._context = context
        self._on_receipt = on_receipt
        self._prepared: dict[str, Path] = {}
        """Dataset folders by what decides their content."""
        self.node_id = context.node_id
        """Another one, once the node had to register again."""

    @property
    def quarantine(self) -> str | None:
        """Why this node must not run anything more, at the last look at its devices."""
        return self._context.proof.last

    def run(self, block: ClaimedBlock, lease: Lease, output: BlockOutput) -> tuple[Receipt, ...]:
        """Run every trial of `block` and return their receipts in the block's order; they also lie on disk.

        Raises:
            BlockBroken: a trial tells nothing about its arm yet; the block is discarded and rerun whole.
            BlockStopped: it was ended from outside.

        """
        if read_config(block.trials[0].config).steps.slice:
            receipts = self._in_slices(block, lease, output)
        else:
            receipts = tuple(self._trial(block, trial, lease, output=output) for trial in block.trials)
        problems = [*block_problems(receipts), *(order_problems(receipts) if block.timed else ())]
        if problems:
            raise BlockBroken(FailureClass.INVALID_MEASUREMENT, "; ".join(problems))
        return receipts

    def rehearse(self, block: ClaimedBlock, lease: Lease, output: BlockOutput) -> Iterator[str]:
        """Run one step of every arm of `block`; yield why arms are refused, in sentences, as soon as it is known.

        Nothing of it is kept but what the node caches: datasets and compiled kernels. A variant that fails for another
        reason than a gate is left to its trial, whose receipt says so; a baseline that fails is refused.
        """
        for trial in block.trials:
            sentence = self._rehearse(block, trial, lease, output=output)
            if sentence is not None:
                yield sentence

    def _rehearse(self, block: ClaimedBlock, trial: ClaimedTrial, lease: Lease, *, output: BlockOutput) -> str | None:
        config = {
            **trial.config,
            "steps": {**trial.config["steps"], "warmup": 0, "warmup_s": 0.0, "timed": 1, "slice": 0, "val_rows": 0},
        }
        order = self._order(block, trial.model_copy(update={"config": config}), lease, output=output)
        order = replace(order, trace_only=self._node_class.compiles_only)
        ending = self._run(order, lease, timeout_s=trial.timeout_s)
        how = "ended without a result" if ending.stopped is None else f"took longer than {trial.timeout_s:.0f} s"
        result = read_result(order.paths.result) or TrialResult(
            failure_class=FailureClass.NO_RECEIPT, message=f"the trial {how}"
        )
        if result.failure_class is FailureClass.GATE_REFUSED:
            return f"arm '{trial.arm}': {result.message}"
        if result.failure_class is not None:
            lost = f"the baseline does not train, so nothing could be compared with it: {result.message}"
            return lost if trial.role == BASELINE else None
        dead = dead_gate(read_gates(trial.gates, result.facts, pattern=config["model"]["pattern"]))
        return None if dead is None else f"arm '{trial.arm}': {dead}"

    def _trial(self, block: ClaimedBlock, trial: ClaimedTrial, lease: Lease, *, output: BlockOutput) -> Receipt:
        """Run one trial; return its receipt and leave it on disk."""
        order = self._order(block, trial, lease, output=output)
        before = self._look_around()
        ending = self._run(order, lease, timeout_s=trial.timeout_s)
        output.is_over(trial.trial_id)
        return self._record(block, trial, before, ending)

    def _in_slices(self, block: ClaimedBlock, lease: Lease, output: BlockOutput) -> tuple[Receipt, ...]:
        """Run the trials of a block in slices; return their receipts and leave them on disk."""
        self._refuse_in_quarantine()
        sliced = SlicedBlock(self._context.runner, lease)
        before: dict[str, _Before] = {}
        receipts: dict[str, Receipt] = {}

        def began(trial_id: str) -> None:
            before[trial_id] = self._look_around()

        def ended(trial: ClaimedTrial, ending: Ending) -> None:
            self._context.proof.survived(ending.survivors)
            self._check(ending)
            output.is_over(trial.trial_id)
            receipts[trial.trial_id] = self._record(block, trial, before[trial.trial_id], ending, but=sliced.pids)

        trials = [
            SlicedTrial(
                order=self._order(block, trial, lease, output=output),
                timeout_s=trial.timeout_s,
                began=partial(began, trial.trial_id),
                goes_on=partial(output.runs, trial.trial_id),
                ended=partial(ended, trial),
            )
            for trial in block.trials
        ]
        try:
            sliced.run(trials, slices=len(read_config(block.trials[0].config).steps.slices))
        finally:
            self._prove_release(block.block_id)
        return tuple(receipts[trial.trial_id] for trial in block.trials)

    def _look_around(self) -> _Before:
        return _Before(
            started_at=datetime.now(UTC),
            load_average=load_average(),
            device=self._look(),
            processes=process_times(),
        )

    def _record(
        self, block: ClaimedBlock, trial: ClaimedTrial, before: _Before, ending: Ending, *, but: Collection[int] = ()
    ) -> Receipt:
        """Return the receipt of a trial that has ended, and leave it on disk; processes `but` are no strangers."""
        paths = self._context.paths.trial(block.attempt_id, trial.trial_id)
        if ending.stopped is not None:
            say_stopped(paths.log, ending.stopped, ending.wall_s, how_far(paths, trial))
        record = TrialRecord(
            block=block,
            trial=trial,
            node=self._context.node,
            node_id=self.node_id,
            paths=paths,
            ending=ending,
            started_at=before.started_at,
            load_average=before.load_average,
            device_events=changes(before.device, self._look()),
            foreign_busiest=busiest(before.processes, process_times(), but=but),
        )
        receipt = record.receipt()
        write_whole(paths.receipt, receipt.model_dump_json(indent=1))
        _log.info("trial %s (%s): %s in %.2f s", trial.trial_id, trial.arm, receipt.outcome, ending.wall_s)
        self._on_receipt(receipt)
        return receipt

    def _order(self, block: ClaimedBlock, trial: ClaimedTrial, lease: Lease, *, output: BlockOutput) -> TrialOrder:
        """Return what a trainer needs for `trial`, its dataset prepared, and follow the trial from here on."""
        paths = self._context.paths.trial(block.attempt_id, trial.trial_id)
        config = read_config(trial.config)
        output.add(trial.trial_id, paths, steps_total=config.steps.total)
        order = TrialOrder(
            trial_id=trial.trial_id,
            config=trial.config,
            paths=paths,
            data_dir=self._context.data_dir,
            device_type=self._node_class.device_type,
            environment=self._node_class.environment,
            topology=self._node_class.topologies.get(config.mesh.devices),
            locks=self._context.node.devices.locks("trainer"),
            corpus_roots=self._context.corpus_roots,
            cold_caches=block.cold_caches,
        )
        if self._node_class.compiles_only:  # reads no data
            return order
        return replace(order, dataset=self._prepare(order, lease, timeout_s=trial.timeout_s))

    @property
    def _node_class(self) -> NodeClass:
        return self._context.node.node_class

    def _look(self) -> DeviceState | None:
        """Ask the driver about the trial's device; None where nothing can be asked."""
        found = self._context.node.devices
        return found.probe.state(found.first.index)

    def _prepare(self, order: TrialOrder, lease: Lease, *, timeout_s: float) -> Path | None:
        """Build the dataset in a process of its own, once, so that no trial's time contains it.

        Returns its folder, or None when it cannot be built: the trial meets the same error and its receipt says so.
        """
        key = _data_key(order)
        known = self._prepared.get(key)
        if known is not None and known.is_dir():
            return known
        ending = self._run(replace(order, prepare_only=True), lease, timeout_s=timeout_s)
        if ending.stopped is not None:
            raise BlockBroken(FailureClass.TIMEOUT, f"the dataset's preparation took longer than {timeout_s:.0f} s")
        result = read_result(order.paths.prepared)
        if result is None:
            raise BlockBroken(FailureClass.INFRA_NODE, "the dataset's preparation ended without a result")
        if result.data_folder is not None:
            self._prepared[key] = result.data_folder
        return result.data_folder

    def _run(self, order: TrialOrder, lease: Lease, *, timeout_s: float) -> Ending:
        """Run a process to its end, which may be that its time was up, and look what it left on the devices.

        What is left there breaks the block before its next process starts; this process has measured all the same.
        """
        self._refuse_in_quarantine()
        ending = self._context.runner.run(order, lease, timeout_s=timeout_s)
        self._context.proof.survived(ending.survivors)
        self._prove_release(order.trial_id)
        self._check(ending)
        return ending

    def _refuse_in_quarantine(self) -> None:
        if self.quarantine is not None:
            raise BlockBroken(FailureClass.INFRA_NODE, f"this node must be repaired first: {self.quarantine}")

    def _prove_release(self, what: str) -> None:
        """Look what was left on the devices by all that has ended; none of this block runs any more."""
        if self._context.proof.problem() is not None:
            _log.error("%s: %s", what, self.quarantine)

    def _check(self, ending: Ending) -> None:
        """Raise BlockBroken or BlockStopped for an end that concerns the block."""
        if ending.survivors:
            raise BlockBroken(FailureClass.INFRA_NODE, f"processes {list(ending.survivors)} survived SIGKILL")
        if ending.stopped not in (None, StopReason.TIMEOUT):
            raise BlockStopped(ending.stopped)


def _data_key(order: TrialOrder) -> str:
    config = read_config(order.config)
    return f"{config.data!r} {config.model.vocab_size}"

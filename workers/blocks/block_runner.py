"""Run the trials of one block, one after another or by turns, and write their receipts.

The caller claims and reports the block: a worker of a service, or an air-gapped run.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ablate.experiments.analysis.guards import block_problems, order_problems
from ablate.experiments.design.kinds.kind import ArmConfig
from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.documents import write_whole
from ablate.experiments.outcomes import BASELINE, FailureClass
from ablate.experiments.records.identity import ClaimedBlock, ClaimedTrial
from ablate.experiments.records.messages import PREPARATION_LIMIT_S
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.records.signing import Signer
from ablate.kernels.backends import NodeClass
from ablate.model.config import StepsConfig
from ablate.workers.blocks.code_cache import CodeCache
from ablate.workers.blocks.receipt import TrialRecord, dead_gate, how_far
from ablate.workers.blocks.slices import SlicedBlock, SlicedTrial
from ablate.workers.blocks.surroundings import Patience, Quiet, Surroundings, busiest, look_around
from ablate.workers.commands.code_copy import data_problem, private_places
from ablate.workers.devices.device_lock import DeviceLock
from ablate.workers.devices.node_health import ReleaseProof
from ablate.workers.devices.probe_types import changes
from ablate.workers.errors import BlockBroken, BlockStopped, DeviceBusy
from ablate.workers.isolation.environment import chosen_caches
from ablate.workers.isolation.node_secrets import Mask, lacks_secret
from ablate.workers.lease import Lease, StopReason
from ablate.workers.node import Node
from ablate.workers.paths import WorkPaths
from ablate.workers.processes.runner import Ending, TrialRunner
from ablate.workers.processes.trial_output import BlockOutput, log_stop
from ablate.workers.trials.result import TrialOrder, TrialResult, read_result

_log = logging.getLogger(__name__)


_RETRY_S = 0.05
BETWEEN_TRIALS_S = 20.0
"""Longest wait for quiet cores inside a block: trials further apart than `MAX_PAUSE_S` are not compared."""


def _ignore(_receipt: Receipt) -> None:
    return


@dataclass(frozen=True, kw_only=True)
class NodeContext:
    """The parts of a node that run blocks, with a service or without."""

    node: Node
    node_id: str
    runner: TrialRunner
    paths: WorkPaths
    data_dir: Path
    """Prepared datasets."""
    proof: ReleaseProof
    signer: Signer | None = None
    """Signs reports; None on an air-gapped node that cannot sign."""
    corpus_roots: tuple[Path, ...] | None = None
    """Folders that may contain a corpus; None for any, where the person who runs the plan also chose the corpus."""
    secret_values: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The operator's secrets for programs, by their variables."""
    secrets: tuple[Path, ...]
    """Files and folders that stay closed to trials."""
    code_roots: tuple[Path, ...] | None = None
    """As `corpus_roots`, for the code of commands."""
    data_roots: tuple[Path, ...] | None = None
    """As `corpus_roots`, for the data of commands."""
    code_cache: CodeCache | None = None
    """Archives of code that was sent; None where nothing can be fetched."""
    environments: Mapping[str, Path] = field(default_factory=dict)
    """Folders of Python environments by the names that specs use."""
    quiet_s: float = 0.0
    """Longest wait for quiet cores before a block whose times decide."""


class BlockRunner:
    """Runs blocks on this node."""

    def __init__(self, context: NodeContext, *, on_receipt: Callable[[Receipt], None] = _ignore) -> None:
        self._context = context
        self._on_receipt = on_receipt
        self._prepared: dict[str, TrialResult] = {}
        """What preparations of the running block left, by the part of a configuration that decides their content. The
        next block reads its corpus again, because files may have changed."""
        self._patience = Patience()
        self._changed: str | None = None
        """Which software of this node changed since the start of this process, after the last block."""
        self.node_id = context.node_id
        """Changes when the node has to register again."""

    @property
    def quarantine(self) -> str | None:
        """Why this node must not run another trial, at the last check of its devices and software."""
        return self._changed or self._context.proof.last

    def run(self, block: ClaimedBlock, lease: Lease, output: BlockOutput) -> tuple[Receipt, ...]:
        """Run every trial of `block`; return the receipts in the block's order and write them to disk.

        Raises:
            BlockBroken: a trial yields no result for its arm yet; the block is discarded and rerun whole.
            BlockStopped: the block was stopped from outside.

        """
        with self._devices_alone(lease, output):
            return self._run_alone(block, lease, output)

    @contextmanager
    def _devices_alone(self, lease: Lease, output: BlockOutput) -> Iterator[None]:
        """Have this machine's devices for a block; wait while a worker of another state folder runs one there.

        Raises BlockStopped if the block has to stop meanwhile.
        """
        lock = DeviceLock(self._context.node.devices.locks("block"))
        while True:
            try:
                lock.take()
                break
            except DeviceBusy as busy:
                output.waits(f"its turn: {busy}")
            reason = self._context.runner.sleep(_RETRY_S, lease)
            if reason is not None:
                raise BlockStopped(reason)
        output.waits(None)
        try:
            yield
        finally:
            lock.release()

    def _run_alone(self, block: ClaimedBlock, lease: Lease, output: BlockOutput) -> tuple[Receipt, ...]:
        self._prepared = {}
        if len({trial.config.prepared for trial in block.trials}) > 1:
            for trial in block.trials:  # a preparation between two trials would delay the later one
                self._order_of(block, trial, lease)
        if block.trials[0].config.takes_turns:
            receipts = self._in_turns(block, lease, output)
        else:
            receipts = tuple(self._trial(block, trial, lease, output=output) for trial in block.trials)
        self._changed = self._context.node.changed()
        if self._changed is not None:
            raise BlockBroken(FailureClass.INFRA_NODE, f"receipts would name the wrong software: {self._changed}")
        problems = [*block_problems(receipts), *(order_problems(receipts) if block.timed else ())]
        if problems:
            raise BlockBroken(FailureClass.INVALID_MEASUREMENT, "; ".join(problems))
        return receipts

    def rehearse(self, block: ClaimedBlock, lease: Lease, output: BlockOutput) -> Iterator[str]:
        """Run one step of every arm of `block`; yield a sentence for every arm that cannot run.

        A rehearsal leaves only caches: datasets and compiled kernels. A variant that fails for a reason other than a
        gate is left to its trial, whose receipt shows the failure. A failing baseline yields a sentence.
        """
        self._prepared = {}
        with self._devices_alone(lease, output):
            for trial in block.trials:
                sentence = self._rehearse(block, trial, lease, output=output)
                if sentence is not None:
                    yield sentence

    def _rehearse(self, block: ClaimedBlock, trial: ClaimedTrial, lease: Lease, *, output: BlockOutput) -> str | None:
        config = trial.config.with_steps(StepsConfig(warmup=0, timed=1, val_rows=0))
        order = self._order(block, trial.model_copy(update={"config": config}), lease, output=output)
        order = replace(order, trace_only=self._node_class.compiles_only)
        ending = self._run(order, lease, timeout_s=trial.timeout_s)
        how = _HOW_IT_ENDED.get(ending.stopped, f"took longer than {trial.timeout_s:.0f} s")
        result = read_result(order.paths.result) or TrialResult.partial(
            failure_class=FailureClass.NO_RECEIPT, message=f"the trial {how}"
        )
        if result.failure_class is FailureClass.GATE_REFUSED:
            return f"arm '{trial.arm}': {result.message}"
        if result.failure_class is not None:
            sentence = f"the baseline does not train, so there is nothing to compare with: {result.message}"
            return sentence if trial.role == BASELINE else None
        dead = dead_gate(config.readings(trial.gates, result.facts))
        return None if dead is None else f"arm '{trial.arm}': {dead}"

    def _trial(self, block: ClaimedBlock, trial: ClaimedTrial, lease: Lease, *, output: BlockOutput) -> Receipt:
        order = self._order(block, trial, lease, output=output)
        self._wait_for_quiet(block, lease, output, first=trial is block.trials[0])
        before = self._look_around(trial)
        ending = self._run(order, lease, timeout_s=trial.timeout_s, arm=trial.arm)
        receipt = self._record(block, trial, before, ending)
        output.end(trial.trial_id, failure=_failure(receipt))
        return receipt

    def _in_turns(self, block: ClaimedBlock, lease: Lease, output: BlockOutput) -> tuple[Receipt, ...]:
        self._check_quarantine()
        self._wait_for_quiet(block, lease, output, first=True)
        sliced = SlicedBlock(self._context.runner, lease)
        before: dict[str, Surroundings] = {}
        receipts: dict[str, Receipt] = {}

        def began(trial: ClaimedTrial) -> None:
            before[trial.trial_id] = self._look_around(trial)

        def ended(trial: ClaimedTrial, ending: Ending) -> None:
            self._context.proof.survived(ending.survivors)
            self._check(ending, trial.arm)
            receipt = self._record(block, trial, before[trial.trial_id], ending, own=sliced.pids)
            output.end(trial.trial_id, failure=_failure(receipt))
            receipts[trial.trial_id] = receipt

        trials = [
            SlicedTrial(
                order=self._isolated(self._order(block, trial, lease, output=output)),
                timeout_s=trial.timeout_s,
                began=partial(began, trial),
                goes_on=partial(output.runs, trial.trial_id),
                ended=partial(ended, trial),
            )
            for trial in block.trials
        ]
        try:
            steps = block.trials[0].config.steps
            sliced.run(trials, slices=len(steps.slices) if steps.slice else None)
        finally:
            for one in trials:
                Mask(one.order.secrets).file(one.order.paths.log)
            self._prove_release(block.block_id)
        return tuple(receipts[trial.trial_id] for trial in block.trials)

    def _wait_for_quiet(self, block: ClaimedBlock, lease: Lease, output: BlockOutput, *, first: bool) -> None:
        """Wait for quiet cores before a trial on the host whose time decides; the later ones of a block only shortly.

        Raises BlockStopped if the block has to stop meanwhile.
        """
        if not (block.timed and self._node_class.on_host):
            return

        def pause(seconds: float) -> None:
            reason = self._context.runner.sleep(seconds, lease)
            if reason is not None:
                raise BlockStopped(reason)

        most_s = self._context.quiet_s if first else min(self._context.quiet_s, BETWEEN_TRIALS_S)
        self._patience.wait(Quiet(pause=pause, says=output.waits), block.max_foreign_load, most_s=most_s)

    def _look_around(self, trial: ClaimedTrial) -> Surroundings:
        return look_around(self._context.node.devices, trial.config.devices)

    def _record(
        self,
        block: ClaimedBlock,
        trial: ClaimedTrial,
        before: Surroundings,
        ending: Ending,
        *,
        own: Collection[int] = (),
    ) -> Receipt:
        """Return the receipt of a finished trial and write it to disk; processes `own` do not count as foreign."""
        paths = self._context.paths.trial(block.attempt_id, trial.trial_id)
        if ending.stopped is not None:
            log_stop(paths.log, ending.stopped, ending.wall_s, how_far(paths, trial))
        if ending.stopped is StopReason.OUTPUT_LIMIT:
            paths.drop_output()
        after = self._look_around(trial)
        receipt = TrialRecord(
            block=block,
            trial=trial,
            node=self._context.node,
            node_id=self.node_id,
            paths=paths,
            ending=ending,
            node_problem=self.quarantine,
            started_at=before.started_at,
            load_average=before.load_average,
            device_events=tuple(map(changes, before.devices, after.devices)),
            foreign_busiest=busiest(before.processes, after.processes, exclude=own),
        ).receipt()
        paths.make_room(paths.receipt)
        write_whole(paths.receipt, receipt.model_dump_json(indent=1))
        _log.info("trial %s (%s): %s in %.2f s", trial.trial_id, trial.arm, receipt.outcome, ending.wall_s)
        self._on_receipt(receipt)
        return receipt

    def _order(self, block: ClaimedBlock, trial: ClaimedTrial, lease: Lease, *, output: BlockOutput) -> TrialOrder:
        """Return the order for a trainer with its dataset prepared; `output` follows the trial from now on."""
        paths = self._context.paths.trial(block.attempt_id, trial.trial_id)
        mask = Mask(self._secrets_of(trial.config))
        output.add(trial.trial_id, paths, steps_total=trial.config.steps.total, mask=mask)
        return self._order_of(block, trial, lease)

    def _order_of(self, block: ClaimedBlock, trial: ClaimedTrial, lease: Lease) -> TrialOrder:
        """Return the order for a trainer with its dataset prepared."""
        paths, workload = self._context.paths.trial(block.attempt_id, trial.trial_id), trial.config
        own_nodes = len(self._context.node.nodes) or 1
        if workload.nodes != own_nodes:
            detail = f"the trial needs {workload.nodes} of a cluster's nodes, and this worker has {own_nodes}"
            raise BlockBroken(FailureClass.INFRA_NODE, f"{detail} (docs/fleet.md, 'Several nodes')")
        order = TrialOrder(
            trial_id=trial.trial_id,
            config=trial.config,
            paths=paths,
            data_dir=self._context.data_dir,
            kernels=self._context.node.kernels(self._context.data_dir),
            caches=chosen_caches(),
            device_type=self._node_class.device_type,
            environment=self._node_class.environment,
            devices=workload.devices,
            nodes=workload.nodes,
            topology=workload.topology(self._node_class),
            locks=self._context.node.devices.locks("trainer", number=workload.devices),
            corpus_roots=self._context.corpus_roots,
            code_roots=self._context.code_roots,
            data_roots=self._context.data_roots,
            cold_caches=block.cold_caches,
            profile=block.profile,
            trace=block.block_index == 0,
        )
        if self._node_class.compiles_only:  # reads no data
            return order
        self._check_data(workload)
        order = replace(order, program_prefix=self._prefix_of(workload), secrets=self._secrets_of(workload))
        if workload.prepared is not None:
            prepared = self._prepare(order, lease, attempt_id=block.attempt_id)
            prefix = prepared.program_prefix or order.program_prefix
            order = replace(order, dataset=prepared.data_folder, program_prefix=prefix)
        judge = workload.judge if isinstance(workload, ProgramArm) else None
        if judge is not None:
            of_judge = replace(order, config=judge)
            prepared = self._prepare(of_judge, lease, attempt_id=block.attempt_id)
            order = replace(order, evaluation=prepared.data_folder)
        return order

    def _fetch_code(self, attempt_id: str, digest: str, lease: Lease) -> None:
        if self._context.code_cache is None:
            raise BlockBroken(FailureClass.USER_ERROR, f"this node has no source of code {digest}")
        self._context.code_cache.need(attempt_id, digest, lease)

    def _prefix_of(self, workload: ArmConfig) -> Path | None:
        """Return the folder of its Python environment. Raises BlockBroken if this node has none of its name."""
        if workload.environment is None:
            return None
        prefix = self._context.environments.get(workload.environment)
        if prefix is None:
            names = ", ".join(sorted(self._context.environments)) or "none"
            detail = f"this node has no Python environment '{workload.environment}'; it has: {names}"
            raise BlockBroken(FailureClass.INFRA_NODE, detail)
        return prefix

    def _check_data(self, workload: ArmConfig) -> None:
        """Raise BlockBroken if a program may not read its data on this node."""
        if isinstance(workload, ProgramArm) and workload.data:
            problem = data_problem(workload, self._context.data_roots, self._context.secrets)
            if problem is not None:
                raise BlockBroken(FailureClass.USER_ERROR, problem)

    def _secrets_of(self, workload: ArmConfig) -> dict[str, str]:
        """Return the secrets of its program by name. Raises BlockBroken if this node lacks one."""
        values = self._context.secret_values
        missing = next((name for name in workload.secrets if name not in values), None)
        if missing is not None:
            detail = lacks_secret(self._context.node.name, missing, values)
            raise BlockBroken(FailureClass.INFRA_NODE, detail)
        return {name: values[name] for name in workload.secrets}

    @property
    def _node_class(self) -> NodeClass:
        return self._context.node.node_class

    def _prepare(self, order: TrialOrder, lease: Lease, *, attempt_id: str) -> TrialResult:
        """Return the result with the dataset or code, which a process of its own makes from the files as they are now.

        No arm answers for a failure here. Raises BlockBroken without an arm.
        """
        workload = order.config
        key = str(workload.prepared)
        if key not in self._prepared:
            if workload.archive is not None:
                self._fetch_code(attempt_id, workload.archive, lease)
            ending = self._run(replace(order, prepare_only=True), lease, timeout_s=PREPARATION_LIMIT_S)
            self._prepared[key] = _prepared(order, workload, ending)
        return self._prepared[key]

    def _run(self, order: TrialOrder, lease: Lease, *, timeout_s: float, arm: str | None = None) -> Ending:
        """Run a process, isolated, to its end or its timeout, and check the devices after it.

        If the process leaves something on the devices, the block breaks before its next process. The measurement of
        this process still counts.
        """
        self._check_quarantine()
        try:
            ending = self._context.runner.run(self._isolated(order), lease, timeout_s=timeout_s)
        finally:
            Mask(order.secrets).file(order.paths.log)
        self._context.proof.survived(ending.survivors)
        self._prove_release(order.trial_id)
        self._check(ending, arm)
        return ending

    def _isolated(self, order: TrialOrder) -> TrialOrder:
        return order.isolated((*self._context.secrets, *private_places())) if self._context.node.isolates else order

    def _check_quarantine(self) -> None:
        if self.quarantine is not None:
            raise BlockBroken(FailureClass.INFRA_NODE, f"this node must be repaired first: {self.quarantine}")

    def _prove_release(self, what: str) -> None:
        """Check the devices while no process of this block runs."""
        if self._context.proof.problem() is not None:
            _log.error("%s: %s", what, self.quarantine)

    def _check(self, ending: Ending, arm: str | None) -> None:
        """Raise BlockBroken or BlockStopped for an ending that concerns the whole block."""
        if ending.survivors:
            raise BlockBroken(FailureClass.INFRA_NODE, f"processes {list(ending.survivors)} survived SIGKILL", arm=arm)
        if ending.stopped not in _OF_THE_TRIAL:
            raise BlockStopped(ending.stopped)


def _failure(receipt: Receipt) -> str | None:
    return None if receipt.failure_class is None else f"{receipt.failure_class}: {receipt.message}"


_OF_THE_TRIAL = (None, StopReason.TIMEOUT, StopReason.OUTPUT_LIMIT, StopReason.PROCESS_LIMIT)
"""Reasons that concern one trial, and not its whole block."""
_HOW_IT_ENDED = {
    None: "ended without a result",
    StopReason.OUTPUT_LIMIT: "used more space than a trial may use",
    StopReason.PROCESS_LIMIT: "had more processes than a trial may have",
}
"""Of a rehearsal; any other reason is its time limit."""


def _prepared(order: TrialOrder, workload: ArmConfig, ending: Ending) -> TrialResult:
    """Return what a preparation left. Raises BlockBroken with the reason why it left no folder."""
    failed = workload.preparation
    if ending.stopped is StopReason.OUTPUT_LIMIT:
        raise BlockBroken(FailureClass.OUTPUT_LIMIT, f"{failed}: its process used too much space")
    if ending.stopped is StopReason.PROCESS_LIMIT:
        raise BlockBroken(FailureClass.USER_ERROR, f"{failed}: it had {ending.excess}")
    if ending.stopped is not None:
        took = f"it took longer than {PREPARATION_LIMIT_S:.0f} s{workload.advice}"
        raise BlockBroken(FailureClass.TIMEOUT, f"{failed}: {took}")
    result = read_result(order.paths.prepared)
    if result is None:
        why = f"the process ended with exit code {ending.exit_code} without a result"
        raise BlockBroken(FailureClass.INFRA_NODE, f"{failed}: {why}")
    if result.data_folder is None:
        raise BlockBroken(result.failure_class or FailureClass.INFRA_NODE, f"{failed}: {result.message}")
    return result

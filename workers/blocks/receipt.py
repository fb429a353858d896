"""The receipt of a finished trial, from its files and its ending."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ablate.experiments import documents
from ablate.experiments.design.kinds.gate_readings import GateReading
from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.errors import ReceiptError
from ablate.experiments.outcomes import FailureClass, Outcome
from ablate.experiments.records.identity import ClaimedBlock, ClaimedTrial, claimed_fields
from ablate.experiments.records.messages import DeviceInfo
from ablate.experiments.records.program_report import printable, unmet_requirement
from ablate.experiments.records.receipt_check import contradictions
from ablate.experiments.records.receipts import (
    DeviceEvents,
    Environment,
    ForeignProcess,
    HeldDevice,
    Memory,
    Receipt,
    is_finite,
    seal,
    summarise,
)
from ablate.experiments.records.trial_guards import cache_problems, load_problem, timing_problems
from ablate.experiments.system.kernel_limits import keeps_signals_in
from ablate.model.measurements import Step, Validation
from ablate.workers.blocks.surroundings import worst_of
from ablate.workers.errors import BlockBroken
from ablate.workers.lease import StopReason
from ablate.workers.node import Node
from ablate.workers.paths import TrialPaths
from ablate.workers.processes.runner import Ending
from ablate.workers.trials import failures
from ablate.workers.trials.result import TrialResult, read_result, read_steps


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """A finished trial with all inputs of its receipt."""

    block: ClaimedBlock
    trial: ClaimedTrial
    node: Node
    node_id: str
    paths: TrialPaths
    ending: Ending
    started_at: datetime
    load_average: float
    device_events: tuple[DeviceEvents | None, ...]
    """Events of each of its devices during the trial; None where the driver has no counters."""
    foreign_busiest: tuple[ForeignProcess, ...]
    """Other processes on the machine during the trial."""
    node_problem: str | None = None
    """What is wrong with the node, from the probe of its devices after the trial."""

    def receipt(self) -> Receipt:
        """Build and seal the receipt. Its outcome is invalid if it breaks a guard and the block may not run again.

        Raises:
            BlockBroken: the ending of the trial is no result of its arm, or none yet.

        """
        receipt = self._judged(self._result())
        load = load_problem(receipt, self.block.max_foreign_load) if self.block.timed else None
        if load is not None:
            self._may_be_final(FailureClass.DISTURBED, load)
        broken = self._broken_guard(receipt)
        if broken is None:
            return receipt
        self._may_be_final(FailureClass.INVALID_MEASUREMENT, broken)
        invalid = {"outcome": Outcome.INVALID, "failure_class": FailureClass.INVALID_MEASUREMENT, "message": broken}
        return documents.seal(receipt.model_copy(update=invalid))

    def _broken_guard(self, receipt: Receipt) -> str | None:
        """Return why the measurement of a trial does not count, None when it does."""
        if receipt.outcome is not Outcome.MEASURED:
            return None
        timing = timing_problems(receipt) if self.block.timed else []
        warm = cache_problems(receipt) if self.block.cold_caches else []
        return next(iter([*contradictions(receipt), *timing, *warm]), None)

    def _judged(self, result: TrialResult) -> Receipt:
        """Return the receipt of a result. A program's result that gives none is the arm's failure."""
        if not self.trial.config.own_process:
            return self._sealed(result)
        try:
            receipt = self._sealed(result)
            problem = None if receipt.outcome is Outcome.MEASURED else next(iter(contradictions(receipt)), None)
        except ReceiptError as error:
            problem = str(error)
        if problem is None:
            return receipt
        message = printable(f"the program's marks and results give no receipt: {problem}")[: failures.MESSAGE_LIMIT]
        return self._sealed(TrialResult.partial(failure_class=FailureClass.USER_ERROR, message=message))

    def _sealed(self, result: TrialResult) -> Receipt:
        config = self.trial.config
        steps = result.program_steps if config.own_process else read_steps(self.paths.steps)
        gates = config.readings(self.trial.gates, result.facts)
        failure, message = _judge(result, steps, gates)
        if failure is None and result.program is not None and isinstance(config, ProgramArm):
            message = unmet_requirement(result.program, config)
            failure = None if message is None else FailureClass.GATE_REFUSED
        steps = _finite(steps)
        outcome = Outcome.MEASURED if failure is None else failure.rule.outcome
        return seal(
            {
                **{name: value for name, value in result if name in Receipt.model_fields},
                **self._identity(result),
                "outcome": outcome,
                "failure_class": failure,
                "message": message,
                "config": config,
                "environment": self._environment(result),
                "gates": gates,
                "steps": steps,
                "validations": _finite_or_none(result.validations),
                "summary": self._summary(steps, result) if steps and _has_window(result, failure) else None,
                "memory": self._memory(result),
                "started_at": self.started_at.isoformat(),
                "wall_s": self.ending.wall_s,
            }
        )

    def _result(self) -> TrialResult:
        """Return the trial's result. Raises BlockBroken for a failure that is no result of the arm yet."""
        result = self._result_file_or_ending()
        if result.failure_class is not None:
            self._may_be_final(result.failure_class, result.message)
        return result

    def _may_be_final(self, failure: FailureClass, message: str | None) -> None:
        """Raise BlockBroken unless `failure` counts as a result of the arm by now."""
        if failure not in self.trial.final_failures:
            raise BlockBroken(failure, f"arm '{self.trial.arm}': {message}", arm=self.trial.arm)

    def _result_file_or_ending(self) -> TrialResult:
        """Return the trial's own result, or a failure that follows from its ending."""
        if self.ending.stopped is StopReason.TIMEOUT:
            message = f"the trial took longer than {self.trial.timeout_s:.0f} s{self._how_far()}"
            return TrialResult.partial(failure_class=FailureClass.TIMEOUT, message=message)
        if self.ending.stopped is StopReason.OUTPUT_LIMIT:
            message = f"the trial's files use more space than a trial may use{self._how_far()}"
            return TrialResult.partial(failure_class=FailureClass.OUTPUT_LIMIT, message=message)
        if self.ending.stopped is StopReason.PROCESS_LIMIT:
            message = f"the trial had {self.ending.excess}{self._how_far()}"
            return TrialResult.partial(failure_class=FailureClass.USER_ERROR, message=message)
        own_process = self.trial.config.own_process
        result = read_result(self.paths.result)
        if result is not None and not (own_process and self.ending.exit_code):  # then the program may have written it
            return self._of_node(result)
        # a trial that only compiles need not fit into this machine's memory
        oom_kills = 0 if self.node.node_class.compiles_only else self.ending.oom_kills
        failure, message = failures.classify_exit(
            self.ending.exit_code,
            oom_kills=oom_kills,
            disk_full=failures.disk_is_full(self.paths.folder),
            may_kill_itself=own_process and not keeps_signals_in(),
            has_own_files=own_process,
        )
        return TrialResult.partial(failure_class=failure, message=f"{message}{self._how_far()}")

    def _of_node(self, result: TrialResult) -> TrialResult:
        """Return the result; the node answers for a program that a signal ended while the node turned out broken."""
        program = result.program
        if self.node_problem is None or result.failure_class is not FailureClass.USER_ERROR or program is None:
            return result
        if program.exit_code >= 0 and (program.evaluation is None or program.evaluation.exit_code >= 0):
            return result
        message = f"{result.message}; after it, {self.node_problem}"
        return result.model_copy(update={"failure_class": FailureClass.INFRA_NODE, "message": message})

    def _how_far(self) -> str:
        """Return a phrase for an early end with the number of steps; empty for a trial that only compiles."""
        if self.node.node_class.compiles_only:
            return ""
        return f", after {how_far(self.paths, self.trial)}"

    def _identity(self, result: TrialResult) -> dict[str, Any]:
        """Return the ids of the trial from its claim, and the digests of code and data."""
        fields = claimed_fields(self.block, self.trial, node_id=self.node_id)
        fields["ids"]["device"] = f"{self.node.name}/{','.join(f'{device.index}' for device in self._held)}"
        own = {"code": self.node.code.digest, "data": result.data_digest or "", "validation": result.val_digest}
        fields["digests"] |= own
        return fields

    def _environment(self, result: TrialResult) -> Environment:
        device = self._held[0]
        return Environment(
            node_name=self.node.name,
            node_class=self.node.node_class.name,
            device_name=device.name,
            device_serial=device.serial,
            git_commit=self.node.code.git_commit,
            git_dirty_digest=self.node.code.git_dirty_digest,
            versions=self.node.versions,
            cpu_threads=self.trial.config.threads or self.node.cores,
            peak_flops=self._peak_flops(),
            load_average_before=self.load_average,
            foreign_load=result.foreign_load,
            stolen_load=result.stolen_load,
            foreign_busiest=self.foreign_busiest,
            throttle=worst_of((*self.device_events, *(one.events for node in result.nodes for one in node.devices))),
            devices=self._several(),
            nodes=result.nodes or None,
        )

    @property
    def _held(self) -> tuple[DeviceInfo, ...]:
        return self.node.devices.held(self.trial.config.devices)

    def _several(self) -> tuple[HeldDevice, ...] | None:
        """Return each device of a trial that has several."""
        held = zip(self._held, self.device_events, strict=True)
        devices = tuple(HeldDevice(name=one.name, serial=one.serial, events=events) for one, events in held)
        return devices if len(devices) > 1 else None

    def _memory(self, result: TrialResult) -> Memory | None:
        limit = self.node.trial_memory_limit_bytes
        if result.peak_allocated_bytes is not None and result.peak_reserved_bytes is not None:
            return Memory(
                peak_allocated_bytes=result.peak_allocated_bytes,
                peak_reserved_bytes=result.peak_reserved_bytes,
                limit_bytes=limit,
            )
        peak = self.ending.peak_rss_bytes
        if peak is None or not self.node.node_class.on_host:
            return None
        return Memory(peak_allocated_bytes=peak, peak_reserved_bytes=peak, limit_bytes=limit)

    def _summary(self, steps: tuple[Step, ...], result: TrialResult) -> Any:
        return summarise(
            steps,
            flops_per_step=result.flops_per_step,
            loss_val=result.loss_val,
            peak_flops=self._peak_flops(),
            validations=result.validations,
            document_flops_per_step=result.document_flops_per_step,
        )

    def _peak_flops(self) -> float | None:
        return self.trial.config.peak_flops(self.node.node_class)


def how_far(paths: TrialPaths, trial: ClaimedTrial) -> str:
    """Return the number of finished steps in words, for example "5 of 14 steps", and whether the evaluation runs."""
    done, program = len(read_steps(paths.steps)), trial.config if isinstance(trial.config, ProgramArm) else None
    unmarked = program is not None and program.needs == "process" and not done
    steps = "no marked step" if unmarked else f"{done:,} of {trial.config.steps.total:,} steps"
    own = None if program is None else program.evaluate
    return steps if own is None or not os.path.isdir(paths.evaluation) else f"{steps}, in {own.title}"  # noqa: PTH112 - the trial may have closed its folder


def _judge(
    result: TrialResult, steps: tuple[Step, ...], gates: Mapping[str, GateReading]
) -> tuple[FailureClass | None, str | None]:
    """Return the failure class and its message; (None, None) for a complete measurement."""
    if result.failure_class is not None:
        return result.failure_class, result.message
    dead = dead_gate(gates)
    if dead is not None:
        return FailureClass.GATE_REFUSED, dead
    if len(_finite(steps)) < len(steps):
        return FailureClass.NUMERICS, f"step {len(_finite(steps))} has a loss or gradient norm that is not finite"
    if result.loss_val is not None and not math.isfinite(result.loss_val):
        return FailureClass.NUMERICS, "the validation loss is not finite"
    if _finite_or_none(result.validations) != result.validations:
        return FailureClass.NUMERICS, "a validation loss is not finite"
    return None, None


def dead_gate(gates: Mapping[str, GateReading]) -> str | None:
    """Return a sentence about the first requested gate that is not live, None when all are live."""
    dead = sorted(name for name, reading in gates.items() if not reading.live)
    if not dead:
        return None
    reading = gates[dead[0]]
    return f"gate '{dead[0]}' was requested as {reading.requested!r}, observed {reading.observed!r} ({reading.how})"


def _has_window(result: TrialResult, failure: FailureClass | None) -> bool:
    """Return whether the trial ran its whole window, even if a gate was not live."""
    whole = result.failure_class is None and failure in (None, FailureClass.GATE_REFUSED)
    return whole and result.compilation is None


def _finite(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return the steps before the first one with a non-finite number, which JSON cannot represent."""
    for index, step in enumerate(steps):
        if not is_finite(step):
            return steps[:index]
    return steps


def _finite_or_none(validations: tuple[Validation, ...] | None) -> tuple[Validation, ...] | None:
    """Return the validations; None if a loss is not finite, which JSON cannot represent."""
    return validations if all(math.isfinite(one.loss) for one in validations or ()) else None

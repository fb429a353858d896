"""What a trial leaves behind, written by a test: for what a worker makes of it."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ablate.experiments.documents import write_whole
from ablate.experiments.records.identity import ClaimedBlock
from ablate.model.counts import step_flops
from ablate.workers.blocks.receipt import TrialRecord
from ablate.workers.devices.probe_types import changes
from ablate.workers.node import Node
from ablate.workers.paths import WorkPaths
from ablate.workers.processes.runner import Ending
from ablate.workers.trials.result import TrialResult
from tests.factories import make_steps, make_validations, observed_facts


def left_behind(block: ClaimedBlock, node: Node, folder: Path, **result: Any) -> TrialRecord:
    """Leave what the first trial of `block` leaves, and return it with what was seen from outside.

    `result` replaces what the trial says of itself; steps as in `TrialResult`'s steps file.
    """
    trial = block.trials[0]
    paths = WorkPaths(home=folder).trial(block.attempt_id, trial.trial_id)
    config = trial.config
    steps = result.pop("steps", None) or make_steps(trial.config, tokens_per_s=5000.0, loss_step1=8.0, seed=1)
    paths.steps.write_text("".join(step.model_dump_json() + "\n" for step in steps))
    values: dict[str, Any] = {
        "facts": observed_facts(trial.gates),
        "flops_per_step": step_flops(config),
        "loss_val": 7.5,
        "validations": make_validations(trial.config, steps, [7.5]),
        "data_digest": "sha256:d",
        "peak_allocated_bytes": 10**6,
        "peak_reserved_bytes": 10**8,
        "foreign_load": 0.01,
        "warmup_passes": (config.steps.warmup_s,) if config.steps.warmup_s else (),
        "training_s": 1.9,
    }
    write_whole(paths.result, TrialResult.partial(**{**values, **result}).model_dump_json())
    ending: dict[str, Any] = {"stopped": None, "exit_code": 0, "oom_kills": 0, "peak_rss_bytes": None, "survivors": ()}
    state = node.devices.probe.state(node.devices.first.index)
    return TrialRecord(
        block=block,
        trial=trial,
        node=node,
        node_id="nod_1",
        paths=paths,
        ending=Ending(wall_s=2.0, **ending),
        started_at=datetime.now(UTC),
        load_average=0.1,
        device_events=(changes(state, state),),
        foreign_busiest=(),
    )

"""Rehearse a block: an arm that trains, one whose gate is not live, a baseline and a variant that cannot train."""

import json
import math
import sys
from pathlib import Path

from ablate.workers import node as nodes
from ablate.workers.blocks.block_runner import BlockRunner, NodeContext
from ablate.workers.lease import Lease, boot_time_s
from ablate.workers.paths import WorkPaths
from ablate.workers.processes.forkserver import ForkServer
from ablate.workers.processes.guardian import Guardian
from ablate.workers.processes.runner import TrialRunner
from ablate.workers.processes.trial_output import BlockOutput
from ablate.workers.processes.wake_event import WakeEvent
from tests.integration.worker_service import block, built_in_arm, corpus


def main() -> None:
    """Print the refusals, and the progress of the trial at each of them, as JSON."""
    home = Path(sys.argv[1])
    config = built_in_arm(corpus(home / "corpus"))
    claimed = block([config, config], attempt="rehearsal")
    first, second = claimed.trials
    second = second.model_copy(update={"gates": {**second.gates, "loss": "chunked"}})
    with Guardian() as guardian:
        runner = TrialRunner(ForkServer(), guardian, WakeEvent(), grace_s=1.0, preempted=lambda: False)
        node = nodes.find_node("here", "cpu")
        context = NodeContext(
            node=node,
            node_id="nod_1",
            runner=runner,
            paths=WorkPaths(home=home),
            data_dir=home / "data",
            proof=node.devices.proof(),
            secrets=(home,),
        )
        third = first.model_copy(update={"trial_id": "trl_fails", "timeout_s": 0.05})
        fourth = third.model_copy(update={"trial_id": "trl_variant", "role": "variant"})
        claimed = claimed.model_copy(update={"trials": (first, second, third, fourth)})
        lease = Lease(math.inf, sent_at=boot_time_s())
        output = BlockOutput()
        refused, progress = [], []
        for sentence in BlockRunner(context).rehearse(claimed, lease, output):
            refused.append(sentence)
            running = output.progress()
            progress += [(running.trial_id, running.steps_done, running.steps_total)] if running else []
    sys.stdout.write(json.dumps({"refused": refused, "progress": progress}))


if __name__ == "__main__":
    main()

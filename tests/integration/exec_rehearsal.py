"""Rehearse a block: an arm that trains, one whose gate is not live, a baseline and a variant that cannot train."""

import json
import sys
from pathlib import Path

from ablate.workers.processes.trial_output import BlockOutput
from tests.integration.block_runners import block_runner, endless_lease
from tests.integration.worker_service import block, built_in_arm, corpus


def main() -> None:
    """Print the refusals, and the progress of the trial at each of them, as JSON."""
    home = Path(sys.argv[1])
    config = built_in_arm(corpus(home / "corpus"))
    claimed = block([config, config], attempt="rehearsal")
    first, second = claimed.trials
    second = second.model_copy(update={"gates": {**second.gates, "loss": "chunked"}})
    third = first.model_copy(update={"trial_id": "trl_fails", "timeout_s": 0.05})
    fourth = third.model_copy(update={"trial_id": "trl_variant", "role": "variant"})
    claimed = claimed.model_copy(update={"trials": (first, second, third, fourth)})
    output = BlockOutput()
    refused, progress = [], []
    with block_runner(home) as runner:
        for sentence in runner.rehearse(claimed, endless_lease(), output):
            refused.append(sentence)
            running = output.progress()
            progress += [(running.trial_id, running.steps_done, running.steps_total)] if running else []
    sys.stdout.write(json.dumps({"refused": refused, "progress": progress}))


if __name__ == "__main__":
    main()

"""`python -m tests.bench.isolation`: what isolation costs a trial, outside of its steps and in them.

Trials of one configuration run in pairs on a real fork server, one isolated and one not, in turns of the order. The
first pair, which compiles and fills caches, does not count. A step is the median of the timed ones. Outside means the
time from the order to the end of the process without its steps. The program prints means of the differences in each
pair with their standard errors.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from experiments.design.recipes import RECIPES
from model.config import StepsConfig, TrainConfig
from workers.errors import WorkerError
from workers.identity.node import Node, find_node
from workers.lease import Lease, boot_time_s
from workers.paths import WorkPaths
from workers.processes.result import TrialOrder, TrialResult, read_result, read_steps
from workers.processes.runner import TrialRunner, start_processes
from workers.processes.wake_event import WakeEvent

TIMEOUT_S = 500.0


def main() -> None:
    """Run the pairs and print one line for each, then the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="hybrid-tiny")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--timed", type=int, default=30, help="timed steps of a trial")
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.recipe]
    node = find_node("bench")
    steps = StepsConfig(warmup=5, timed=arguments.timed, val_rows=0)
    with (
        tempfile.TemporaryDirectory() as folder,
        start_processes(WakeEvent(), grace_s=1.0, preempted=lambda: False) as runner,
    ):
        home = Path(folder)
        bench = _Bench(node, runner, home, replace(recipe.config, steps=steps))
        rows = [bench.pair(number) for number in range(arguments.pairs + 1)][1:]
    sys.stdout.write(json.dumps({"node": node.versions, "pairs": len(rows), **_summary(rows)}, indent=1) + "\n")


class _Bench:
    def __init__(self, node: Node, runner: TrialRunner, home: Path, config: TrainConfig) -> None:
        self._node, self._runner, self._home = node, runner, home
        self._config = TypeAdapter(TrainConfig).dump_python(config, mode="json")
        self._dataset: Path | None = None
        preparation = self._run(replace(self._order("prepares"), prepare_only=True))
        self._dataset = preparation.data_folder

    def pair(self, number: int) -> dict[str, float]:
        """Return the differences of a pair: isolated less not isolated."""
        seconds: dict[bool, tuple[float, float]] = {}
        for isolated in (False, True) if number % 2 else (True, False):
            order = self._order(f"trial-{number}-{isolated}")
            order = order.isolated((self._home / "keys",)) if isolated else order
            ending = self._runner.run(order, Lease(1e6, sent_at=boot_time_s()), timeout_s=TIMEOUT_S)
            result, steps = read_result(order.paths.result), read_steps(order.paths.steps)
            if result is None or result.failure_class is not None:
                raise WorkerError(f"{order.trial_id}: {result and result.message}; {order.paths.log.read_text()}")
            timed = [step.seconds for step in steps if step.phase == "timed"]
            seconds[isolated] = ending.wall_s - sum(step.seconds for step in steps), statistics.median(timed)
        (outside, step), (plain_outside, plain_step) = seconds[True], seconds[False]
        row = {"outside_s": outside - plain_outside, "log_step": math.log(step / plain_step)}
        sys.stdout.write(f"{number}: {plain_outside:.3f} s outside and {plain_step:.4f} s a step plain; {row}\n")
        sys.stdout.flush()
        return row

    def _order(self, name: str) -> TrialOrder:
        return TrialOrder(
            trial_id=name,
            config=self._config,
            paths=WorkPaths(home=self._home).trial("att", name),
            data_dir=self._home / "data",
            kernels=self._node.kernels(self._home / "data"),
            device_type=self._node.node_class.device_type,
            environment=self._node.node_class.environment,
            dataset=self._dataset,
        )

    def _run(self, order: TrialOrder) -> TrialResult:
        self._runner.run(order, Lease(1e6, sent_at=boot_time_s()), timeout_s=TIMEOUT_S)
        result = read_result(order.paths.prepared)
        if result is None or result.data_folder is None:
            raise WorkerError(f"no dataset: {result and result.message}")
        return result


def _summary(rows: list[dict[str, float]]) -> dict[str, float]:
    summary = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        summary[name] = statistics.mean(values)
        summary[f"{name}_error"] = statistics.stdev(values) / math.sqrt(len(values))
    return summary


if __name__ == "__main__":
    main()

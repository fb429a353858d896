"""A trial that runs a program of the test, isolated as a real one: where it is forked, before it runs anything."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ablate.experiments.design.kinds.built_in import BuiltInArm
from ablate.experiments.system.isolation import use_temporary
from ablate.workers.paths import WorkPaths
from ablate.workers.processes.forkserver import ForkServer
from ablate.workers.processes.trial import _detach
from ablate.workers.trials.result import TrialOrder

PREAMBLE = """
import errno, json, os, shutil, signal, socket, subprocess, sys, time
from pathlib import Path
home, folder, worker = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
"""


@dataclass(frozen=True, kw_only=True)
class AttackArm(BuiltInArm):
    """What the attacker is to do; the worker isolates it as the built-in model."""

    home: str
    program: str
    worker: int


def server() -> ForkServer:
    """Return a fork server that starts `attack` instead of a trial."""
    return ForkServer(preload="tests.integration.adopting_preload", target=attack)


def attack(order: TrialOrder) -> None:
    """Become the program of the order."""
    _detach(order)
    if order.isolation is not None:
        use_temporary(order.paths.temporary)
        order.isolation.enter()
    home, program = order.config.home, PREAMBLE + order.config.program
    arguments = [home, str(order.paths.folder), str(order.config.worker)]
    os.execv(sys.executable, [sys.executable, "-c", program, *arguments])  # noqa: S606 - the attacker


def order_of(home: Path, program: str, *, isolated: bool = True, trial_id: str = "trl_attacks") -> TrialOrder:
    """Return the order for a program in a home with a dataset, and the secrets of a node."""
    paths = WorkPaths(home=home).trial("att_1", trial_id)
    order = TrialOrder(
        trial_id=paths.folder.name,
        config=AttackArm(home=str(home), program=program, worker=os.getpid()),
        paths=paths,
        data_dir=home / "data",
        kernels=home / "data" / "kernels" / "v1",
        device_type="cpu",
        dataset=home / "data" / "rows",
    )
    return order.isolated((home,)) if isolated else order

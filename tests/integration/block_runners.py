"""A runner of blocks in real processes on this machine, without a service."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ablate.workers.blocks.block_runner import BlockRunner, NodeContext
from ablate.workers.blocks.code_cache import CodeCache, CodeSource
from ablate.workers.lease import Lease, boot_time_s
from ablate.workers.node import find_node
from ablate.workers.paths import WorkPaths
from ablate.workers.processes.forkserver import ForkServer
from ablate.workers.processes.guardian import Guardian
from ablate.workers.processes.runner import TrialRunner
from ablate.workers.processes.wake_event import WakeEvent


@contextmanager
def block_runner(home: Path, code_source: CodeSource | None = None) -> Iterator[BlockRunner]:
    """Yield the runner of a CPU node whose state folder is `home`, which gets archives of code from `code_source`."""
    with Guardian() as guardian:
        node = find_node("here", "cpu")
        yield BlockRunner(
            NodeContext(
                node=node,
                node_id="nod_1",
                runner=TrialRunner(ForkServer(), guardian, WakeEvent(), grace_s=1.0, preempted=lambda: False),
                paths=WorkPaths(home=home),
                data_dir=home / "data",
                proof=node.devices.proof(),
                secrets=(home,),
                code_cache=None if code_source is None else CodeCache(home / "data", code_source),
            )
        )


def endless_lease() -> Lease:
    """Return a lease that never ends."""
    return Lease(math.inf, sent_at=boot_time_s())

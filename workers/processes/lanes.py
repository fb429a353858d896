"""Test the lanes of this node's class, and on a GPU the back ends of other parts: each by a small problem.

A lane runs a small scan, a back end such as attention=fa4 its own problem (model/back_ends.py), forward and backward in
a fresh process. The results are stored in the state folder. All run again when code, versions or devices change;
otherwise only those that failed run again. So a node without the official kernels (lane peer) does not rerun the others
at each start.
"""

import json
import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ablate.experiments.design.gates import BACK_ENDS
from ablate.experiments.digest import digest
from ablate.experiments.documents import write_whole
from ablate.experiments.system.processes import die_with_parent
from ablate.kernels.backends import Lane, NodeClass
from ablate.workers.devices.device_lock import TRAINER_PATIENCE_S, DeviceLock
from ablate.workers.environment_variables import peer_site
from ablate.workers.errors import PreloadError
from ablate.workers.isolation.environment import chosen_caches, keep_kernels, use_environment
from ablate.workers.node import Node
from ablate.workers.processes.forkserver import ForkServer

FILE = "lanes.json"
"""Below the state folder."""

_PATIENCE_S = 600.0
"""Includes the compilation of kernels."""
_MESSAGE_LIMIT = 500  # characters

LaneResults = Mapping[str, str | None]
"""By lane and back end: None for correct results, else "refused: ", "wrong: " or "crashed: " with the reason."""


@dataclass(frozen=True, kw_only=True)
class LaneOrder:
    """The task of one process."""

    name: str
    """A lane or a back end."""
    device_type: str
    environment: Mapping[str, str]
    locks: tuple[str, ...]
    kernels: Path
    """Caches of compilers on disk."""
    caches: Mapping[str, str]
    """Those that the operator has chosen instead, by their environment variables."""


def stored_lanes(node: Node, home: Path) -> frozenset[str]:
    """Return the lanes that worked here before, if nothing has changed since."""
    try:
        stored = json.loads((home / FILE).read_bytes())
        lanes = frozenset(lane for lane, problem in stored["lanes"].items() if problem is None)
        return lanes if stored["of"] == _digest(node) else frozenset()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return frozenset()  # no file, or one of other code


def run_lanes(
    node: Node,
    server: ForkServer,
    *,
    data_dir: Path,
    works: Collection[str] = frozenset(),
    only: Collection[str] | None = None,
) -> LaneResults | None:
    """Run every lane and back end of the node's class, or `only` these, except those in `works`.

    Returns None on a node that executes nothing.
    """
    node_class = node.node_class
    if node_class.compiles_only:
        return None
    orders = [
        LaneOrder(
            name=name,
            device_type=node_class.device_type,
            environment=node_class.environment,
            locks=() if node_class.on_host else node.devices.locks("trainer"),  # another worker may have the cores
            kernels=node.kernels(data_dir),
            caches=chosen_caches(),
        )
        for name in tried_on(node_class)
        if only is None or name in only
    ]
    return {order.name: None if order.name in works else _ask(server, order) for order in orders}


def tried_on(node_class: NodeClass) -> tuple[str, ...]:
    """Return the names of everything that a node of the class tries."""
    return (*map(str, node_class.lanes), *(BACK_ENDS if node_class.device_type == "cuda" else ()))


def keep_lanes(node: Node, results: LaneResults, home: Path) -> None:
    """Store the results for the next start."""
    home.mkdir(parents=True, exist_ok=True)
    write_whole(home / FILE, json.dumps({"of": _digest(node), "lanes": dict(results)}, indent=1))


def _digest(node: Node) -> str:
    """Return a digest of everything that the results depend on."""
    devices = [device.model_dump(mode="json") for device in node.devices.devices]
    site = peer_site()
    packages = sorted(path.name for path in site.glob("*")) if site is not None else []  # with their versions
    return digest([node.code.digest, node.versions, devices, str(site), packages])


def _ask(server: ForkServer, order: LaneOrder) -> str | None:
    try:
        answer = server.call(_answer, order, patience_s=_PATIENCE_S)
    except PreloadError as error:
        return f"crashed: {error}"
    return None if answer is None else str(answer)[:_MESSAGE_LIMIT]


def _answer(order: LaneOrder) -> str | None:
    """Run the lane in this process; return the problem, if there is one."""
    die_with_parent()
    lock = DeviceLock(order.locks)  # released by the end of this process
    try:
        lock.take(patience_s=TRAINER_PATIENCE_S)
        return _run(order)
    except Exception as error:  # the boundary of a process that answers with a sentence
        traceback.print_exc()
        return f"crashed: {type(error).__name__}: {error}"


def _run(order: LaneOrder) -> str | None:
    from ablate.model import back_ends
    from ablate.model.layers import mamba3
    from ablate.workers.built_in.training import find_device

    use_environment(order.environment)
    keep_kernels(order.kernels, order.caches)
    device = find_device(order.device_type)
    if order.name in BACK_ENDS:
        return back_ends.problem(order.name, device)
    mamba3.use_lane(Lane(order.name), peer_site())
    return mamba3.lane_problem(Lane(order.name), device)

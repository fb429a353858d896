"""The part of a trial on one of several nodes: srun starts it on each node of the allocation.

It reads its order from standard input, isolates itself as a trial on one node does, and runs the program. It prints the
program's messages and its end for the trial's process, which started srun. Its standard error is the trial's log.
"""

import fcntl
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from ablate.experiments.records.receipts import HeldDevice, HeldNode
from ablate.experiments.system.isolation import remove_short_links, short_link, use_temporary
from ablate.experiments.system.kernel_limits import own_ipc
from ablate.experiments.system.processes import adopt_orphans, descendants_of, die_with_parent, end_all
from ablate.workers.commands.program import program_folders, run_marked
from ablate.workers.commands.program_end import ProgramRun
from ablate.workers.commands.program_socket import ProgramMessage
from ablate.workers.devices.inventory import find_devices
from ablate.workers.devices.probe_types import changes
from ablate.workers.environment_variables import named_class, slurm_task
from ablate.workers.isolation.environment import use_environment
from ablate.workers.node import find_node
from ablate.workers.paths import TrialPaths, limit_files
from ablate.workers.trials.failures import describe
from ablate.workers.trials.result import TrialOrder

_LINE_BYTES = 900
"""Slurm keeps shorter lines whole, and tears and mixes longer ones."""
_FOLDER = "ablate-part-"
"""How the folders of parts begin, among the temporary files of a node."""
MORE, LAST = "+", "."
"""First letter of a line: of a part of a message, and of its last part."""


@dataclass(frozen=True, kw_only=True)
class PartOrder:
    """The order of a trial for every node."""

    order: TrialOrder
    port: int
    """At which the ranks meet, on the first node."""


@dataclass(frozen=True, kw_only=True)
class FactsOrder:
    """The order to describe the node, before any trial."""

    shared: Path
    """A folder that all nodes have to see."""


def main() -> int:
    """Do what standard input says; print the answer."""
    order = pickle.load(sys.stdin.buffer)  # noqa: S301 - srun passes on what the trial's process wrote
    printer = _Printer(os.dup(1))
    os.dup2(2, 1)  # whatever else is printed belongs to the log
    if isinstance(order, FactsOrder):
        printer.print({"facts": _facts(order)})
        return 0
    return _in_a_child(order, printer)


class _Printer:
    """Prints messages as lines that Slurm keeps whole."""

    def __init__(self, output: int) -> None:
        self._output = output

    def print(self, message: Mapping[str, Any]) -> None:
        """Print one message."""
        text = json.dumps({"node": slurm_task().node, **message})
        pieces = [text[start : start + _LINE_BYTES] for start in range(0, len(text), _LINE_BYTES)]
        marks = [*[MORE] * (len(pieces) - 1), LAST]
        lines = "".join(f"{mark}{piece}\n" for mark, piece in zip(marks, pieces, strict=True)).encode("ascii")
        while lines:
            lines = lines[os.write(self._output, lines) :]


def _facts(order: FactsOrder) -> dict[str, str]:
    """Return what has to be equal on all nodes of an allocation, by name."""
    node = find_node("", named_class())
    return {
        "class": node.node_class.name,
        "code": node.code.digest,
        "number of cores": str(node.cores),
        "devices": ", ".join(device.name for device in node.devices.devices),
        f"file {order.shared}": "there" if order.shared.exists() else "missing",
        **node.versions,
    }


def _in_a_child(part: PartOrder, printer: _Printer) -> int:
    """Run the part in a child, which isolates itself; then end what it left, and remove its files."""
    folder = _own_folder()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    adopt_orphans()
    child = os.fork()
    if child == 0:
        os._exit(_run(part, printer, folder))
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        end_all(lambda: descendants_of([os.getpid()]), grace_s=0)
        short_link(child).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _own_folder() -> Path:
    """Make a locked folder for the part; remove those that killed parts left on this node."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        if _lock(left):
            remove_short_links(left)
            shutil.rmtree(left, ignore_errors=True)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
        if _lock(folder) and folder.exists():  # else another part took it for left, before it was locked
            return folder


def _lock(folder: Path) -> bool:
    """Lock a folder until this process and its children end; return False if others have it, or it is gone."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        os.close(descriptor)
    return False


def _run(part: PartOrder, printer: _Printer, folder: Path) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    adopt_orphans()
    own_ipc()
    try:
        printer.print(_ran(part, printer, replace(part.order, paths=TrialPaths(folder=folder))))
    except Exception as error:  # the task boundary, as that of a trial
        failure, message = describe(error, most_bytes=part.order.most_bytes)
        printer.print({"failed": [failure, message]})
        return 1
    return 0


def _ran(part: PartOrder, printer: _Printer, order: TrialOrder) -> dict[str, Any]:
    """Run the program, isolated; return its end."""
    devices = find_devices(named_class())
    own_devices = devices.held(order.config.devices)
    before = [devices.probe.state(device.index) for device in own_devices]
    order.paths.log.touch()
    limit_files(order.most_bytes)
    use_temporary(order.paths.temporary)
    if order.isolation is not None:
        order = order.isolated(order.isolation.hidden)
        order.isolation.enter()  # type: ignore[union-attr]  # just made
    use_environment(order.environment)
    with order.paths.log.open("a+b") as log, order.paths.log.open("rb") as written:
        forward = _Forward(printer, written)
        folders = program_folders(order)
        ran = run_marked(order, folders, log, variables=_meeting(part), forward=forward)
        forward(())
    after = [devices.probe.state(device.index) for device in own_devices]
    events = map(changes, before, after)
    own = HeldNode(
        name=slurm_task().node,
        foreign_load=ran.measured.get("foreign_load"),
        stolen_load=ran.measured.get("stolen_load"),
        devices=tuple(
            HeldDevice(name=device.name, serial=device.serial, events=event)
            for device, event in zip(own_devices, events, strict=True)
        ),
    )
    return {**_end(ran), "held": own.model_dump(mode="json")}


class _Forward:
    """Passes on the program's messages, and what is new in its log."""

    def __init__(self, printer: _Printer, log: BinaryIO) -> None:
        self._printer, self._log = printer, log

    def __call__(self, messages: Sequence[ProgramMessage]) -> None:
        for message in messages:
            mark = {"mark": message.content.decode("latin-1"), "seen": message.seen, "sender": message.sender}
            self._printer.print(mark)
        new = self._log.read()
        while new:
            new = new[os.write(2, new) :]


def _meeting(part: PartOrder) -> dict[str, str]:
    """Return the variables by which the ranks of all nodes meet; torchrun reads those that begin with PET."""
    task = slurm_task()
    own = {"NNODES": task.num_nodes, "NODE_RANK": task.number}
    own |= {"MASTER_ADDR": task.launcher, "MASTER_PORT": str(part.port)}
    return own | {f"PET_{name}": value for name, value in own.items()}


def _end(ran: ProgramRun) -> dict[str, Any]:
    """Return how the program ended on this node, as JSON."""
    end = {name: value for name, value in asdict(replace(ran.end, loops={}, failed=None)).items() if name != "loops"}
    return {"end": end, "measured": ran.measured, "clocks": ran.samples.clocks, "peak": ran.samples.peak_bytes}

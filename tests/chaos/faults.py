"""The faults, their targets, and the plan of a seed."""

import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.people import People
from tests.chaos.processes import signal_all
from tests.chaos.proxies import Trick
from tests.chaos.system import BACKGROUNDS, System

TRICKS = ("lose_request", "lose_answer", "double", "late", "replay")
_VERBS = ("claim", "heartbeat", "report")
_BELOW_NODE = ("trainer", "forkserver", "guardian")

Begun = AbstractContextManager[object] | None
"""Ends the fault when it is left; None if its target is absent."""


@dataclass(frozen=True)
class Fault:
    """One fault of a plan."""

    kind: str
    target: str
    seconds: float
    pause_s: float
    """Pause after the previous fault of the plan."""

    @property
    def room(self) -> str:
        """Its part of the system: two faults in one room would hide each other or excuse each other's damage."""
        if self.kind == "clock":
            return "clock"
        node = self.target.rpartition(":")[2]
        return (
            node if self.kind in ("kill", "freeze", "end", "fill", "remove", "damage") else f"{self.kind}:{self.target}"
        )

    def begin(self, system: System, people: People) -> Begun:
        """Start the fault; return None if the target is absent."""
        act = _trick if self.kind in TRICKS else _ACTS[self.kind]
        return act(self, system, people)


def plan(seed: str, system: System, *, pace_s: float) -> Iterator[Fault]:
    """Yield faults for ever, the same for the same seed: every entry of the catalogue once, shuffled, then again."""
    chance = random.Random(seed)  # noqa: S311 - a seeded run, no secret
    while True:
        entries = list(catalogue(system))
        chance.shuffle(entries)
        for kind, target in entries:
            longest = (1.8 if kind == "freeze" else 0.8) * system.lease_s
            yield Fault(kind, target, chance.uniform(0.3, longest), chance.uniform(0.1, 1.9) * pace_s)


def catalogue(system: System) -> Iterator[tuple[str, str]]:
    """Yield every (kind, target) that can happen on this machine and store."""
    below = [f"{part}:{node}" for part in _BELOW_NODE for node in system.nodes]
    servers = ["database"] if system.database.part is not None else []
    for target in ["api", *BACKGROUNDS, "broker", "mlflow", *servers, *system.nodes, *below]:
        yield "kill", target
        yield "freeze", target
    for target in ["api", *BACKGROUNDS, *system.nodes]:
        yield "end", target
    for target in [*system.nodes, "broker", *servers]:
        yield "cut", target
        yield "silence", target
        yield "slow", target
    if not servers:
        yield "slow", "database"
    else:
        yield "kill", "session:database"
    for node in system.nodes:
        yield from ((trick, f"{verb}:{node}") for trick in TRICKS for verb in _VERBS)
        yield "remove", f"attempts:{node}"
        yield "damage", f"lanes:{node}"
        yield "damage", f"attempts:{node}"
    yield from (("fill", name) for name, disk in system.disks.items() if disk.mounted)
    yield from [
        ("flush", "broker"),
        ("remove", "data"),
        ("damage", "data"),
        ("cancel", "ablation"),
        ("cancel", "ablation"),
    ]
    if system.clock is not None:
        yield from [("clock", "forwards"), ("clock", "backwards")]


def _kill(fault: Fault, system: System, _people: People) -> Begun:
    kind, _, part = fault.target.partition(":")
    pids = system.pids(part)[1:] if kind == "session" else system.pids(fault.target)
    victim = pids[-1:] if kind == "session" else pids[:1]
    return nullcontext() if signal_all(victim, signal.SIGKILL) else None


def _end(fault: Fault, system: System, _people: People) -> Begun:
    return nullcontext() if signal_all(system.pids(fault.target)[:1], signal.SIGTERM) else None


def _freeze(fault: Fault, system: System, _people: People) -> Begun:
    pids = system.pids(fault.target)
    return _frozen(pids) if signal_all(pids, signal.SIGSTOP) else None


@contextmanager
def _frozen(pids: list[int]) -> Iterator[None]:
    yield
    signal_all(pids, signal.SIGCONT)


def _link(fault: Fault, system: System, _people: People) -> Begun:
    if fault.target == "database" and fault.kind == "slow":
        return system.database.slow(fault.seconds)
    proxies = {**system.links, "broker": system.broker_link}
    proxy = system.database.proxy if fault.target == "database" else proxies[fault.target]
    how: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "cut": proxy.cut,
        "silence": proxy.silent,
        "slow": lambda: proxy.slow(fault.seconds / 8),
    }
    return how[fault.kind]()


def _trick(fault: Fault, system: System, _people: People) -> Begun:
    verb, _, node = fault.target.partition(":")
    return _armed(system.links[node].tricks, Trick(f":{verb}", fault.kind, fault.seconds))


@contextmanager
def _armed(tricks: list[Trick], trick: Trick) -> Iterator[Trick]:
    tricks.append(trick)
    yield trick
    tricks.remove(trick)


def _fill(fault: Fault, system: System, _people: People) -> Begun:
    return system.disks[fault.target].full()


def _flush(_fault: Fault, system: System, _people: People) -> Begun:
    return nullcontext() if system.broker_says("FLUSHALL") else None


def _remove(fault: Fault, system: System, _people: People) -> Begun:
    what, _, node = fault.target.partition(":")
    folder = system.home / "data" if what == "data" else system.disks[node].folder / "work"
    if not folder.is_dir():
        return None
    shutil.rmtree(folder, ignore_errors=True)
    return nullcontext()


def _damage(fault: Fault, system: System, _people: People) -> Begun:
    """Damage a disposable file as a power failure does, and kill the part that reads it when it starts again."""
    what, _, node = fault.target.partition(":")
    folder = system.home if not node else system.disks[node].folder
    patterns = {"lanes": "lanes.json", "attempts": "work/*/*/*", "data": "data/rows-*/*"}
    files = sorted(path for path in folder.glob(patterns[what]) if path.is_file())
    if not files:
        return None
    chance = random.Random(fault.seconds)  # noqa: S311 - the plan's own number, no secret
    with suppress(OSError):  # the part may remove the file first
        _garble(chance.choice(files), chance)
    return nullcontext() if not node or signal_all(system.pids(node)[:1], signal.SIGKILL) else None


def _garble(path: Path, chance: random.Random) -> None:
    """Empty a file, cut it, or append bytes that it cannot contain; a process that has it mapped keeps the old one."""
    content = path.read_bytes()
    damaged = chance.choice((b"", content[: len(content) // 2], content + chance.randbytes(37)))
    fresh = path.with_name(path.name + ".damage")
    fresh.write_bytes(damaged)
    fresh.replace(path)


def _cancel(_fault: Fault, _system: System, people: People) -> Begun:
    if not people.open:
        return None
    people.cancel(people.open[-1])
    return nullcontext()


def _clock(fault: Fault, system: System, _people: People) -> Begun:
    return _shifted(system, 20.0 if fault.target == "forwards" else -20.0)


@contextmanager
def _shifted(system: System, seconds: float) -> Iterator[None]:
    system.clock_was_set = True
    system.set_clock(seconds)
    yield
    system.set_clock(0)


_ACTS: dict[str, Callable[[Fault, System, People], Begun]] = {
    "kill": _kill,
    "end": _end,
    "freeze": _freeze,
    "cut": _link,
    "silence": _link,
    "slow": _link,
    "fill": _fill,
    "flush": _flush,
    "remove": _remove,
    "damage": _damage,
    "cancel": _cancel,
    "clock": _clock,
}

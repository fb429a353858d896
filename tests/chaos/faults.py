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
from tests.chaos.proxies import FORGED, Trick
from tests.chaos.system import BACKGROUNDS, System

TRICKS = ("lose_request", "lose_answer", "double", "late", "replay", "forge")
_VERBS = ("claim", "heartbeat", "report")
_BELOW_NODE = ("trainer", "forkserver", "guardian")

_FORGED = 1 / 3
"""Share of the foreign answers in one round of the catalogue, which has more of them than of anything else."""
_OF_PARTS = ("kill", "freeze", "end", "fill", "remove", "damage", "power")
CLOCKS = {"behind": -20.0, "ahead": 20.0, "hours behind": -7200.0, "hours ahead": 21_600.0}
"""Steps of a clock in seconds, all longer than a lease."""

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
        part = self.target.rpartition(":")[2]
        if self.kind in ("clock", *TRICKS):
            return f"{self.kind}:{part}"
        if self.kind in ("cut", "silence", "slow", "strand"):
            return f"link:{part}"
        return part if self.kind in _OF_PARTS else f"{self.kind}:{self.target}"

    def begin(self, system: System, people: People) -> Begun:
        """Start the fault; return None if the target is absent."""
        act = _trick if self.kind in TRICKS else _ACTS[self.kind]
        return act(self, system, people)


def plan(seed: str, system: System, *, pace_s: float) -> Iterator[Fault]:
    """Yield faults for ever, the same for the same seed: the whole catalogue, shuffled, then again."""
    chance = random.Random(seed)  # noqa: S311 - a seeded run, no secret
    while True:
        entries = [entry for entry in catalogue(system) if entry[0] != "forge" or chance.random() < _FORGED]
        chance.shuffle(entries)
        for kind, target in entries:
            longest = (1.8 if kind == "freeze" else 0.8) * system.lease_s
            yield Fault(kind, target, chance.uniform(0.3, longest), chance.uniform(0.1, 1.9) * pace_s)


def catalogue(system: System) -> Iterator[tuple[str, str]]:
    """Yield every (kind, target) that can happen on this machine and store."""
    below = [f"{part}:{node}" for part in _BELOW_NODE for node in system.nodes]
    servers = ["database"] if system.database.part is not None else []
    for target in [*system.apis, *BACKGROUNDS, "broker", "mlflow", *servers, *system.nodes, *below]:
        yield "kill", target
        yield "freeze", target
    for target in [*system.apis, *BACKGROUNDS, *system.nodes]:
        yield "end", target
    yield from ((kind, target) for target in system.all_links() for kind in ("cut", "silence", "slow", "strand"))
    if not servers:
        yield "slow", "database"
    else:
        yield "kill", "session:database"
    for node in system.nodes:
        yield from ((trick, f"{verb}:{node}") for trick in TRICKS if trick != "forge" for verb in _VERBS)
        yield from (("forge", f"{answer}:{verb}:{node}") for answer in FORGED for verb in _VERBS)
        yield "remove", f"attempts:{node}"
        yield "damage", f"lanes:{node}"
        yield "damage", f"attempts:{node}"
    for name, disk in system.disks.items():
        if disk.mounted:
            yield from [("fill", name), ("power", name)]
    yield from [
        ("flush", "broker"),
        ("remove", "data"),
        ("damage", "data"),
        ("cancel", "ablation"),
        ("cancel", "ablation"),
    ]
    if system.clock.can_be_set:
        yield from (("clock", f"{step}:{clock}") for step in CLOCKS for clock in system.clocks)


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
    proxy = system.all_links()[fault.target]
    if fault.kind == "strand":
        proxy.strand()  # the injector breaks these connections at the end of its round
        return nullcontext()
    how: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "cut": proxy.cut,
        "silence": proxy.silent,
        "slow": lambda: proxy.slow(fault.seconds / 8),
    }
    return how[fault.kind]()


def _trick(fault: Fault, system: System, _people: People) -> Begun:
    rest, _, node = fault.target.rpartition(":")
    forged, _, verb = rest.rpartition(":")
    delivers = int(fault.seconds * 1000) % 2 == 0  # as good as drawn
    trick = Trick(f":{verb}", fault.kind, fault.seconds, forged=forged, delivers=delivers)
    return _armed(system.links[node].tricks, trick)


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
    step, _, clock = fault.target.partition(":")
    return _shifted(system, clock, CLOCKS[step])


@contextmanager
def _shifted(system: System, clock: str, seconds: float) -> Iterator[None]:
    system.clock_was_set |= clock in ("service", "database")
    system.clock.set(clock, seconds)
    yield
    system.clock.set(clock, 0)


def _power(fault: Fault, system: System, _people: People) -> Begun:
    return nullcontext() if system.cut_power(fault.target) else None


_ACTS: dict[str, Callable[[Fault, System, People], Begun]] = {
    "kill": _kill,
    "end": _end,
    "freeze": _freeze,
    "cut": _link,
    "silence": _link,
    "slow": _link,
    "strand": _link,
    "power": _power,
    "fill": _fill,
    "flush": _flush,
    "remove": _remove,
    "damage": _damage,
    "cancel": _cancel,
    "clock": _clock,
}

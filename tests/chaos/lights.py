"""Compares the light of `/readyz` with the truth: what an API process really does for its clients.

A light may be late by the age of its answer and the patience of its checks. Green after that, while a part does not
work, is a problem. Red or degraded while everything works is counted only.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

import httpx

from tests.chaos.faults import Fault
from tests.chaos.people import People
from tests.chaos.system import ADMIN, BACKGROUNDS, System

PARTS = ("reads", "writes", "background", "broker", "mlflow")
EVERY_S = 0.7
PATIENCE_S = 5.0
"""A probe without an answer for so long failed."""
LATE_S = 6.0
"""An answer of `/readyz` is at most two seconds old, and its checks wait for three."""
DARK, RED = "no answer", "red"


@dataclass(frozen=True)
class Probe:
    """The truth about one part: one try to use it."""

    api: str
    part: str
    began_s: float
    ended_s: float
    works: bool


@dataclass(frozen=True)
class Light:
    """One answer of `/readyz`."""

    api: str
    began_s: float
    ended_s: float
    names: frozenset[str]
    """Names of degraded checks, or RED, or DARK; empty is green."""

    def shows(self, part: str) -> bool:
        """Return whether the light says that a part fails."""
        name = {"reads": "database"}.get(part, part)
        more = {"writes"} if part == "reads" else set()  # whoever cannot read cannot write a row either
        return bool(self.names & {DARK, RED, name, *more})


@dataclass(frozen=True)
class Outage:
    """Probes of one part that failed one after another, without a success between them."""

    api: str
    part: str
    began_s: float
    ended_s: float

    def must_show(self, light: Light, *, lease_s: float) -> bool:
        """Return whether a light of this process can know of the outage, and the outage lasts until its answer."""
        late_s = LATE_S + (lease_s if self.part == "background" else 0.0)
        return light.api == self.api and light.began_s - self.began_s > late_s and light.ended_s <= self.ended_s


@dataclass
class Row:
    """One part of the table of truth and light."""

    outages: int = 0
    """Times without the part that were longer than the light may be late."""
    failed_s: float = 0.0
    late_s: list[float] = field(default_factory=list)
    """From the first failed probe to the light, of these outages."""
    false_green: int = 0
    false_alarms: int = 0
    """Lights for the part while it works, before and after."""


def outages(probes: Sequence[Probe]) -> list[Outage]:
    """Return the outages of every part; a single failed probe is none."""
    by_part: dict[tuple[str, str], list[Probe]] = defaultdict(list)
    for probe in probes:
        by_part[probe.api, probe.part].append(probe)
    return [
        Outage(*key, failed[0].began_s, failed[-1].ended_s)
        for key, row in by_part.items()
        for works, group in groupby(row, key=attrgetter("works"))
        if not works and len(failed := list(group)) > 1
    ]


def wrong_greens(probes: Sequence[Probe], lights: Sequence[Light], *, lease_s: float) -> Iterator[str]:
    """Yield a sentence for every green light after a part had failed for too long."""
    for outage in outages(probes):
        for light in lights:
            if outage.must_show(light, lease_s=lease_s) and not light.shows(outage.part):
                shown = ", ".join(sorted(light.names)) or "green"
                after_s = light.began_s - outage.began_s
                yield f"/readyz of {light.api} shows {shown} for {outage.part}, {after_s:.1f} s after it failed"


def table(probes: Sequence[Probe], lights: Sequence[Light], *, lease_s: float) -> dict[str, Row]:
    """Return the table of truth and light."""
    rows = {part: Row() for part in PARTS}
    everything = outages(probes)
    for outage in everything:
        row, own = rows[outage.part], [light for light in lights if light.api == outage.api]
        due = [light for light in own if outage.must_show(light, lease_s=lease_s)]
        shown = [light.ended_s for light in own if light.shows(outage.part) and light.ended_s > outage.began_s]
        if due:
            row.outages += 1
            row.failed_s += outage.ended_s - outage.began_s
            row.late_s.append(min(shown, default=outage.ended_s) - outage.began_s)
            row.false_green += sum(not light.shows(outage.part) for light in due)
    failed = [probe for probe in probes if not probe.works]
    for light in lights:
        for part in PARTS:
            near = (one for one in failed if (one.api, one.part) == (light.api, part))
            named = {"reads": "database"}.get(part, part) in light.names
            if named and not any(abs(one.ended_s - light.ended_s) < 2 * LATE_S + lease_s for one in near):
                rows[part].false_alarms += 1
    return rows


class Lights:
    """Threads that look at every API process until the end."""

    def __init__(self, system: System) -> None:
        self.probes: list[Probe] = []
        self.lights: list[Light] = []
        self._system = system
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=run, args=(api, part), daemon=True)
            for api in system.apis
            for part, run in [*((part, self._probe) for part in PARTS), ("light", self._look)]
        ]

    def __enter__(self) -> "Lights":
        for api in self._system.apis:
            with self._system.client(api) as client:
                client.post("/v1/nodes", json={"name": _probe_of(api)}, timeout=60).raise_for_status()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _probe(self, api: str, part: str) -> None:
        probe: Callable[[], bool] = {
            "reads": lambda: self._answers(api, "GET", "/v1/ablations?limit=1"),
            "writes": lambda: self._answers(api, "POST", f"/v1/nodes/{_probe_of(api)}:rotate-key", json={"grace_s": 0}),
            "background": self._system.has_background,
            "broker": self._system.broker_pongs,
            "mlflow": self._mlflow_answers,
        }[part]
        while not self._over.wait(EVERY_S):
            began_s = time.monotonic()
            works = probe()
            self.probes.append(Probe(api, part, began_s, time.monotonic(), works))

    def _look(self, api: str, _part: str) -> None:
        while not self._over.wait(EVERY_S):
            began_s = time.monotonic()
            names = self._names(api)
            self.lights.append(Light(api, began_s, time.monotonic(), names))

    def _answers(self, api: str, method: str, path: str, **options: Any) -> bool:
        with suppress(httpx.HTTPError), self._system.client(api) as client:
            return client.request(method, path, timeout=PATIENCE_S, **options).is_success
        return False

    def _mlflow_answers(self) -> bool:
        with suppress(httpx.HTTPError):
            url = f"{self._system.mlflow_url}/health"
            return httpx.get(url, timeout=PATIENCE_S, trust_env=False).is_success
        return False

    def _names(self, api: str) -> frozenset[str]:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        try:
            with self._system.client(api) as client:
                answer = client.get("/readyz", headers=headers, timeout=PATIENCE_S)
                content = answer.json()
        except (httpx.HTTPError, ValueError):
            return frozenset({DARK})
        return frozenset({RED}) if answer.status_code != httpx.codes.OK else frozenset(content["degraded"])


def _probe_of(api: str) -> str:
    return f"probe-of-{api}"


HELD: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("freeze", BACKGROUNDS),
    *(("freeze", (part,)) for part in ("broker", "mlflow", "database", "api")),
    *((kind, (link,)) for link in ("broker", "mlflow", "database") for kind in ("cut", "silence")),
    ("slow", ("database",)),
    ("strand", ("database",)),
    ("fill", ("database",)),
)
"""Faults that are held one after another: kind and targets. `slow` is a lock of another process on SQLite."""
HOLD_S = 16.0


@dataclass(frozen=True)
class HeldRow:
    """What one held fault broke, and what the lights said."""

    fault: str
    failed: frozenset[str]
    """Parts that failed in any process for a whole probe."""
    shown: frozenset[str]
    first_s: float | None
    """Seconds until the first light; None without any."""
    green_s: float | None
    """Seconds from the end of the fault until all works and all lights are green; None if that took too long."""


def held(system: System, people: People, lights: Lights) -> Iterator[HeldRow]:
    """Hold every fault of HELD alone, and compare truth and light."""
    possible = {*system.parts, *system.all_links()} | {"database"}
    for kind, targets in HELD:
        if possible.issuperset(targets) and (system.database.part is not None or _on_sqlite(kind, targets)):
            _all_green(lights, system, patience_s=120)
            yield _held(kind, targets, system, people, lights)


def _on_sqlite(kind: str, targets: tuple[str, ...]) -> bool:
    return targets != ("database",) or kind in ("slow", "fill")


def _held(kind: str, targets: tuple[str, ...], system: System, people: People, lights: Lights) -> HeldRow:
    hold_s = HOLD_S + (system.lease_s if targets == BACKGROUNDS else 0.0)
    with ExitStack() as stack:
        for target in targets:
            begun = Fault(kind, target, hold_s, 0.0).begin(system, people)
            if begun is not None:
                stack.enter_context(begun)
        began_s = time.monotonic()
        _pass_time(system, hold_s)
    for link in system.all_links().values():
        link.end_stranded()
    lit = [light for light in lights.lights if light.began_s > began_s and light.names]
    return HeldRow(
        fault=f"{kind} {' and '.join(targets)}",
        failed=frozenset(one.part for one in lights.probes if one.began_s > began_s and not one.works),
        shown=frozenset(name for light in lit for name in light.names),
        first_s=round(lit[0].ended_s - began_s, 1) if lit else None,
        green_s=_all_green(lights, system, patience_s=120),
    )


def _pass_time(system: System, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        system.tick()
        time.sleep(0.1)


def _all_green(lights: Lights, system: System, *, patience_s: float) -> float | None:
    """Wait until every part works and every light is green; return how long it took."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < patience_s:
        _pass_time(system, EVERY_S)
        probes = {(one.api, one.part): one.works for one in lights.probes if one.began_s > began_s}
        newest = {light.api: light.names for light in lights.lights if light.began_s > began_s}
        complete = newest.keys() >= set(system.apis) and len(probes) == len(system.apis) * len(PARTS)
        if complete and all(probes.values()) and not any(newest.values()):
            return round(time.monotonic() - began_s, 1)
    return None

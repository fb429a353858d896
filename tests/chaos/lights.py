"""Compares the light of `/readyz` with the truth: what an API process really does for its clients, every second.

A light may be late by the age of its answer and the patience of its checks. Green after that, while a part does not
work, is a problem. Red or degraded while everything works is counted only.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.faults import Fault
from tests.chaos.people import People
from tests.chaos.system import ADMIN, BACKGROUNDS, System

PARTS = ("reads", "writes", "background", "broker", "mlflow")
EVERY_S = 1.0
PATIENCE_S = 5.0
"""A probe without an answer for so long failed."""
LATE_S = 6.0
"""An answer of `/readyz` is at most two seconds old, and its checks wait for three."""
DARK, RED = "no answer", "red"


@dataclass(frozen=True)
class Sample:
    """One look at one API process."""

    api: str
    began_s: float
    ended_s: float
    works: dict[str, bool]
    """The truth, by part."""
    lit_s: float
    """When `/readyz` had answered; other probes of the sample may take longer."""
    light: frozenset[str]
    """Names that `/readyz` gave as degraded, or RED, or DARK; empty is green."""

    def shows(self, part: str) -> bool:
        """Return whether the light says that a part fails."""
        name = {"reads": "database"}.get(part, part)
        more = {"writes"} if part == "reads" else set()  # whoever cannot read cannot write a row either
        return bool(self.light & {DARK, RED, name, *more})


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
    """Samples with a light for the part while it works, before and after."""


def wrong_greens(samples: Sequence[Sample], *, lease_s: float) -> Iterator[str]:
    """Yield a sentence for every green light after a part had failed for too long."""
    for api, part, failed_at, sample in _failing(samples):
        late_s = _may_be_late_s(part, lease_s)
        if not sample.shows(part) and sample.began_s - failed_at > late_s:
            at = f"{sample.began_s - failed_at:.1f} s after its first failure"
            yield f"/readyz of {api} shows {sorted(sample.light) or 'green'} for {part}, {at}"


def _may_be_late_s(part: str, lease_s: float) -> float:
    return LATE_S + (lease_s if part == "background" else 0.0)


def _failing(samples: Sequence[Sample]) -> Iterator[tuple[str, str, float, Sample]]:
    """Yield API process, part, time of the first failure and sample for each sample in which a part fails."""
    since: dict[tuple[str, str], float] = {}
    for sample in samples:
        for part, works in sample.works.items():
            if works:
                since.pop((sample.api, part), None)
            else:
                yield sample.api, part, since.setdefault((sample.api, part), sample.began_s), sample


def table(samples: Sequence[Sample], *, lease_s: float) -> dict[str, Row]:
    """Return the table of truth and light."""
    rows = {part: Row() for part in PARTS}
    outages: dict[tuple[str, str, float], list[Sample]] = defaultdict(list)
    for api, part, failed_at, sample in _failing(samples):
        outages[api, part, failed_at].append(sample)
        rows[part].false_green += not sample.shows(part) and sample.began_s - failed_at > _may_be_late_s(part, lease_s)
    for (_, part, failed_at), failing in outages.items():
        lasted_s = failing[-1].ended_s - failed_at
        if lasted_s > _may_be_late_s(part, lease_s):
            rows[part].outages += 1
            rows[part].failed_s += lasted_s
            rows[part].late_s += [next((s.lit_s - failed_at for s in failing if s.shows(part)), lasted_s)]
    for part in PARTS:
        rows[part].false_alarms = sum(
            _false_alarms([s for s in samples if s.api == api], part) for api in _apis(samples)
        )
    return rows


def _false_alarms(samples: Sequence[Sample], part: str) -> int:
    failed = [sample.ended_s for sample in samples if not sample.works[part]]
    named = [sample for sample in samples if {"reads": "database"}.get(part, part) in sample.light]
    return sum(not any(abs(at - sample.ended_s) < 2 * LATE_S for at in failed) for sample in named)


def _apis(samples: Sequence[Sample]) -> set[str]:
    return {sample.api for sample in samples}


class Lights:
    """Threads that look at every API process until the end."""

    def __init__(self, system: System) -> None:
        self.samples: list[Sample] = []
        self._system = system
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(api,), daemon=True) for api in system.apis]

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

    def _run(self, api: str) -> None:
        probes: dict[str, Callable[[], bool]] = {
            "reads": lambda: self._answers(api, "GET", "/v1/ablations?limit=1"),
            "writes": lambda: self._answers(api, "POST", f"/v1/nodes/{_probe_of(api)}:rotate-key", json={"grace_s": 0}),
            "background": self._system.has_background,
            "broker": self._system.broker_pongs,
            "mlflow": self._mlflow_answers,
        }
        with ThreadPoolExecutor(len(probes) + 1) as pool:
            while not self._over.wait(EVERY_S):
                began_s = time.monotonic()
                light = pool.submit(self._light, api)
                works = {part: pool.submit(probe) for part, probe in probes.items()}
                told = {part: answer.result() for part, answer in works.items()}
                names, lit_s = light.result()
                self.samples.append(Sample(api, began_s, time.monotonic(), told, lit_s, names))

    def _answers(self, api: str, method: str, path: str, **options: Any) -> bool:
        with suppress(httpx.HTTPError), self._system.client(api) as client:
            return client.request(method, path, timeout=PATIENCE_S, **options).is_success
        return False

    def _mlflow_answers(self) -> bool:
        with suppress(httpx.HTTPError):
            url = f"http://127.0.0.1:{self._system.mlflow_link.port}/health"
            return httpx.get(url, timeout=PATIENCE_S, trust_env=False).is_success
        return False

    def _light(self, api: str) -> tuple[frozenset[str], float]:
        names = self._names(api)
        return names, time.monotonic()

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
    during = [sample for sample in lights.samples if sample.began_s > began_s]
    lit = [sample for sample in during if sample.light]
    return HeldRow(
        fault=f"{kind} {' and '.join(targets)}",
        failed=frozenset(part for sample in during for part, works in sample.works.items() if not works),
        shown=frozenset(name for sample in lit for name in sample.light),
        first_s=round(lit[0].lit_s - began_s, 1) if lit else None,
        green_s=_all_green(lights, system, patience_s=120),
    )


def _pass_time(system: System, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        system.tick()
        time.sleep(0.1)


def _all_green(lights: Lights, system: System, *, patience_s: float) -> float | None:
    """Wait until the newest sample of every API process is green and true; return how long it took."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < patience_s:
        _pass_time(system, EVERY_S)
        newest = {sample.api: sample for sample in lights.samples if sample.began_s > began_s}
        if newest.keys() >= set(system.apis) and not any(
            one.light or not all(one.works.values()) for one in newest.values()
        ):
            return round(time.monotonic() - began_s, 1)
    return None

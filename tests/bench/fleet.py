"""`python -m tests.bench.fleet`: 1,000 nodes and 10,000 queued ablations, from costs that are measured here first.

Part one asks a real API process on a database with that queue what every call of a worker costs in processor time and
what a block leaves on disk. Part two is the fleet on paper: how busy each resource is, which one is full first. Part
three simulates it, call by call, for what paper does not say: how long calls wait. The page is docs/fleet.md.
"""

import argparse
import heapq
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tests.bench.costs import CALLS, Costs, measure
from tests.bench.processes import say
from tests.stopping import leave_when_told

PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"
YEAR_S = 365 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A fleet and how it is configured."""

    name: str
    nodes: int = 1000
    queued: int = 10_000
    """Ablations."""
    blocks: int = 6
    """Of an ablation."""
    block_s: float = 300.0
    """Wall time of a block."""
    heartbeat_s: float = 1.0
    poll_s: float = 5.0
    """Of a node that has nothing to do."""
    api_processes: int = 1
    idle_share: float = 0.0
    """Nodes that find nothing to do."""


FLEETS = (
    Fleet(name="as it comes: one API process, a heartbeat every second"),
    Fleet(name="heartbeat every 10 s", heartbeat_s=10.0),
    Fleet(name="heartbeat every 10 s, 4 API processes", heartbeat_s=10.0, api_processes=4),
    Fleet(
        name="blocks of 10 s, heartbeat every 10 s, 4 API processes", heartbeat_s=10.0, api_processes=4, block_s=10.0
    ),
    Fleet(name="nothing to do: 1,000 nodes that only poll", idle_share=1.0),
)


def rates(fleet: Fleet) -> dict[str, float]:
    """Return calls per second by name, when every busy node runs one block after another."""
    busy, idle = fleet.nodes * (1 - fleet.idle_share), fleet.nodes * fleet.idle_share
    blocks = busy / fleet.block_s
    return {
        "claim": blocks,
        "heartbeat": busy / fleet.heartbeat_s,
        "report": blocks,
        "poll": idle / fleet.poll_s,
        "settle": blocks / fleet.blocks,
    }


def demands(fleet: Fleet, costs: Costs) -> dict[str, float]:
    """Return how busy every resource is, 1 meaning always: a utilisation law, resource by resource."""
    rate = rates(fleet)
    api_s = sum(rate[call] * costs.api_ms[call] for call in CALLS) / 1000
    return {
        f"API ({fleet.api_processes} processes)": api_s / fleet.api_processes,
        "database": sum(rate[call] * costs.database_ms[call] for call in CALLS) / 1000,
        "background: verdict and report": rate["settle"] * costs.settle_s,
        "background: MLflow": rate["settle"] * costs.project_s,
    }


def simulate(fleet: Fleet, costs: Costs, *, seconds: float, seed: int = 1) -> dict[str, list[float]]:
    """Run the fleet call by call against its API processes; return each call's answer time in ms.

    A node sends one call after another and never two at once; a call takes the next free process and its measured cost.
    """
    chance = random.Random(seed)  # noqa: S311 - a simulation
    free = [0.0] * fleet.api_processes
    heapq.heapify(free)
    found: dict[str, list[float]] = {call: [] for call in CALLS}
    busy = round(fleet.nodes * (1 - fleet.idle_share))
    waiting = [(chance.uniform(0, fleet.poll_s), n, _life(fleet, n < busy, chance)) for n in range(fleet.nodes)]
    heapq.heapify(waiting)
    while waiting and waiting[0][0] < seconds:
        now, number, life = heapq.heappop(waiting)
        call, pause_s = next(life)
        begin = max(now, heapq.heappop(free))
        end = begin + chance.expovariate(1000 / max(costs.api_ms[call], 1e-6))
        heapq.heappush(free, end)
        found[call].append(1000 * (end - now))
        heapq.heappush(waiting, (end + pause_s, number, life))
    return found


def _life(fleet: Fleet, is_busy: bool, chance: random.Random) -> Iterator[tuple[str, float]]:
    """Yield a node's calls, each with the pause after it."""
    while True:
        if not is_busy:
            yield "poll", fleet.poll_s
            continue
        yield "claim", fleet.heartbeat_s
        left_s = fleet.block_s * chance.uniform(0.9, 1.1) - fleet.heartbeat_s
        while left_s > 0:
            yield "heartbeat", min(left_s, fleet.heartbeat_s)
            left_s -= fleet.heartbeat_s
        yield "report", 0.0


def page(stores: Mapping[str, Costs], seconds: float) -> str:
    """Write the page."""
    lines = [_INTRODUCTION, *_measured(stores), "", "## On paper", ""]
    for kind, costs in stores.items():
        lines += [*_paper(kind, costs), ""]
    lines += [_MOVED_BY, "## Simulated", "", f"{seconds:.0f} simulated seconds, call by call.", ""]
    for kind, costs in stores.items():
        lines += [*_simulated(kind, costs, seconds), ""]
    return "\n".join([*lines, *_size(stores)]) + "\n"


_INTRODUCTION = """# A large fleet

Written by `make bench-fleet`: 1,000 nodes and 10,000 queued ablations of six blocks and three arms, simulated from
costs that were measured on one machine. The costs are of that machine; what is full first, and what moves it, is not.

## Measured
"""

_MOVED_BY = """## What moves it

| full | what moves it |
|---|---|
| API | `ABLATE_HEARTBEAT_S` and `ABLATE_CLAIM_POLL_S` (fewer calls); on PostgreSQL more API processes |
| database | the same two settings |
| background: MLflow | no setting: the leader projects alone; nothing waits for it |
| background: verdict and report | no setting: the leader judges alone |
"""


def _measured(stores: Mapping[str, Costs]) -> list[str]:
    lines = [f"| processor time, ms | {' | '.join(stores)} |", "|---|" + "---|" * len(stores)]
    for call in CALLS:
        told = " | ".join(f"{c.api_ms[call]:.2f} API, {c.database_ms[call]:.2f} database" for c in stores.values())
        lines.append(f"| {call} | {told} |")
    lines.append(
        "| verdict and report of an ablation, s | " + " | ".join(f"{c.settle_s:.2f}" for c in stores.values()) + " |"
    )
    lines.append(
        "| its projection into MLflow, s | " + " | ".join(f"{c.project_s:.2f}" for c in stores.values()) + " |"
    )
    lines.append("| bytes that a block leaves | " + " | ".join(f"{c.block_bytes:,.0f}" for c in stores.values()) + " |")
    return lines


def _paper(kind: str, costs: Costs) -> list[str]:
    names = [name.partition(" (")[0] for name in demands(FLEETS[0], costs)]
    lines = [f"How busy each resource would be with {kind}; above 1 it cannot keep up.", ""]
    lines += [f"| fleet | claims/s | {' | '.join(names)} | full first |", "|---|---|" + "---|" * (len(names) + 1)]
    for fleet in FLEETS:
        busy = demands(fleet, costs)
        first = max(busy, key=lambda name: busy[name])
        cells = " | ".join(f"{value:.2f}" for value in busy.values())
        lines.append(f"| {fleet.name} | {rates(fleet)['claim']:.1f} | {cells} | {first.partition(' (')[0]} |")
    return lines


def _simulated(kind: str, costs: Costs, seconds: float) -> list[str]:
    lines = [f"| {kind}: fleet | call | calls/s | median, ms | 99 %, ms |", "|---|---|---|---|---|"]
    for fleet in FLEETS:
        for call, took in simulate(fleet, costs, seconds=seconds).items():
            if took:
                took.sort()
                late = took[int(0.99 * len(took))]
                rate = len(took) / seconds
                lines.append(f"| {fleet.name} | {call} | {rate:.1f} | {statistics.median(took):.1f} | {late:.1f} |")
    return lines


def _size(stores: Mapping[str, Costs]) -> list[str]:
    lines = ["## A year", "", "| store | block of 5 minutes, 1,000 nodes always busy | of 1 hour |", "|---|---|---|"]
    for kind, costs in stores.items():
        cells = [
            f"{costs.block_bytes * rates(replace(FLEETS[0], block_s=block_s))['claim'] * YEAR_S / 1e12:.2f} TB"
            for block_s in (300.0, 3600.0)
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Measure, simulate and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queued", type=int, default=10_000, help="ablations in the queue while costs are measured")
    parser.add_argument("--calls", type=int, default=300, help="calls of each kind that are measured")
    parser.add_argument("--seconds", type=float, default=300.0, help="simulated seconds of each fleet")
    given = parser.parse_args()
    leave_when_told()
    stores = {}
    with ExitStack() as stack:
        for kind in ("sqlite", "postgresql"):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ablate-fleet-")))
            stores[kind] = measure(kind, folder, queued=given.queued, calls=given.calls)
            say(f"{kind}: {stores[kind]}")
    PAGE.write_text(page(stores, given.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())

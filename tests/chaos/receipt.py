"""The outcome of a run, and the page that records it."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.books import Books
from tests.chaos.injector import Injector
from tests.chaos.lights import HeldRow, Lights, Row, table
from tests.chaos.people import People
from tests.chaos.system import System


@dataclass
class Outcome:
    """One run on one store."""

    store: str
    seed: str
    count: int
    problems: list[str] = field(default_factory=list)
    settled_s: list[float] = field(default_factory=list)
    """Seconds of each round from the last repair until all work was done."""
    books: dict[str, Any] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    lights: dict[str, Row] = field(default_factory=dict)
    held: list[HeldRow] = field(default_factory=list)

    def count_books(self, books: Books) -> None:
        """Count the work and how it ended."""
        ablations, attempts = books.tables["ablations"], books.tables["attempts"]
        self.books = {
            "ablations": dict(Counter(row["state"] for row in ablations)),
            "blocks": dict(Counter(row["state"] for row in books.tables["blocks"])),
            "receipts": len(books.tables["receipts"]),
            "attempts": dict(Counter(f"{row['state']} {row['failure_class'] or ''}".strip() for row in attempts)),
            "events": len(books.tables["events"]),
            "mlflow runs": len(books.runs),
            "trainers seen": len(books.spans),
        }

    def close(self, system: System, people: People, injector: Injector, lights: Lights, *, seconds: float) -> None:
        """Record the injected faults, and the table of truth and light."""
        self.faults = injector.history()
        self.lights = table(lights.probes, lights.lights, lease_s=system.lease_s)
        self.facts = {
            "seconds": round(seconds),
            "nodes": len(system.nodes),
            "API processes": len(system.apis),
            "calls recorded": len(system.history.calls),
            "faults without a target": len(injector.missed),
            "restarts": {name: part.ends for name, part in system.parts.items() if part.ends},
            "nodes resumed": people.resumed,
            "settled after each round, s": self.settled_s,
            "not possible here": system.lacks(),
        }


def write_receipt(folder: Path, outcomes: list[Outcome]) -> None:
    """Write README.md with the totals, details.md, and the list of faults of every store."""
    folder.mkdir(parents=True, exist_ok=True)
    for outcome in outcomes:
        (folder / f"faults-{outcome.store}.json").write_text(
            "[\n" + ",\n".join(json.dumps(fault) for fault in outcome.faults) + "\n]\n"
        )
    total = sum(len(outcome.faults) for outcome in outcomes)
    wrong = sum(len(outcome.problems) for outcome in outcomes)
    lines = [
        f"# {total} faults, {wrong} problems",
        "",
        *_totals(outcomes),
        "",
        "[details.md](details.md) has the rest.",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")
    details = ["# Faults by store", "", *[line for one in outcomes for line in _lines(one)]]
    (folder / "details.md").write_text("\n".join(details))


def _totals(outcomes: list[Outcome]) -> list[str]:
    return [
        "| store | faults | seed | receipts | problems |",
        "|---|---|---|---|---|",
        *(
            f"| {one.store} | {len(one.faults)} | {one.seed} | {one.books['receipts']} | {len(one.problems)} |"
            for one in outcomes
        ),
    ]


def _lines(outcome: Outcome) -> list[str]:
    kinds = Counter(f"{fault['kind']} {fault['target'].replace(':', ' of ')}" for fault in outcome.faults)
    return [
        f"## {outcome.store}, seed {outcome.seed}",
        "",
        *(f"- {name}: {_shown(value)}" for name, value in (outcome.books | outcome.facts).items()),
        *(f"- PROBLEM: {problem}" for problem in outcome.problems),
        "",
        *_table(outcome.lights),
        "",
        *(_held_table(outcome.held) if outcome.held else []),
        "| fault | times |",
        "|---|---|",
        *(f"| {name} | {times} |" for name, times in sorted(kinds.items())),
        "",
    ]


def _table(lights: dict[str, Row]) -> list[str]:
    return [
        "| part | outages that the light must show | seconds | latest light, s | green too late | false alarms |",
        "|---|---|---|---|---|---|",
        *(
            f"| {part} | {row.outages} | {row.failed_s:.0f} | {max(row.late_s, default=0):.1f} "
            f"| {row.false_green} | {row.false_alarms} |"
            for part, row in lights.items()
        ),
    ]


def _held_table(rows: list[HeldRow]) -> list[str]:
    lines = ["| held fault | did not work | light | first light, s | all green after it, s |", "|---|---|---|---|---|"]
    for row in rows:
        parts, names = (", ".join(sorted(names)) or "-" for names in (row.failed, row.shown))
        first, green = ("never" if value is None else f"{value:.1f}" for value in (row.first_s, row.green_s))
        lines.append(f"| {row.fault} | {parts} | {names} | {first} | {green} |")
    return [*lines, ""]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in sorted(value.items())) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return str(value)

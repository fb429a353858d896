"""The outcome of a run, and the page that records it."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.books import Books
from tests.chaos.injector import Injector
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

    def close(self, system: System, people: People, injector: Injector, *, seconds: float) -> None:
        """Record the injected faults."""
        self.faults = injector.history()
        self.facts = {
            "seconds": round(seconds),
            "nodes": len(system.nodes),
            "faults without a target": len(injector.missed),
            "restarts": {name: part.ends for name, part in system.parts.items() if part.ends},
            "nodes resumed": people.resumed,
            "settled after each round, s": self.settled_s,
            "not possible here": system.lacks(),
        }


def write_receipt(folder: Path, outcomes: list[Outcome]) -> None:
    """Write README.md, and the list of faults of every store."""
    folder.mkdir(parents=True, exist_ok=True)
    for outcome in outcomes:
        (folder / f"faults-{outcome.store}.json").write_text(
            "[\n" + ",\n".join(json.dumps(fault) for fault in outcome.faults) + "\n]\n"
        )
    total = sum(len(outcome.faults) for outcome in outcomes)
    wrong = sum(len(outcome.problems) for outcome in outcomes)
    lines = [f"# {total} faults, {wrong} problems", "", *[line for one in outcomes for line in _lines(one)]]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def _lines(outcome: Outcome) -> list[str]:
    kinds = Counter(f"{fault['kind']} {fault['target'].replace(':', ' of ')}" for fault in outcome.faults)
    return [
        f"## {outcome.store}, seed {outcome.seed}",
        "",
        *(f"- {name}: {_shown(value)}" for name, value in (outcome.books | outcome.facts).items()),
        *(f"- PROBLEM: {problem}" for problem in outcome.problems),
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {name} | {times} |" for name, times in sorted(kinds.items())),
        "",
    ]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in sorted(value.items())) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return str(value)

"""`python -m tests.golden.freeze_readings`: store how drawn gates and facts read in receipts of a new version."""

import json
import random
import sys
from pathlib import Path
from typing import Any

from ablate.experiments.design.gates import GATES
from ablate.experiments.design.kinds.gate_readings import read_gates
from ablate.experiments.records.receipts import SCHEMA_VERSION
from ablate.kernels.scan_switches import ScanFact
from ablate.model.facts import ModelFact

GOLDEN = Path(__file__).with_name("readings.json")
ADVICE = "raise SCHEMA_VERSION of receipts, then run `make golden`"
_DRAWS = 40
_COUNTS = (0, 1, 256)
_FACTS: dict[str, tuple[Any, ...]] = {
    **{gate.attested_by.removeprefix("fact "): gate.values for gate in GATES.values()},
    ScanFact.PSIV_SAVED_BYTES: _COUNTS,
    ScanFact.PSIV_RECOMPUTES: _COUNTS,
    ScanFact.PSIV_CACHE: (False, True),
    ScanFact.SUPERCHUNK_OF_SIZES: _COUNTS,
    ScanFact.HEADS_IN_TURN_OF_SIZES: (1, 2, 4),
    ModelFact.LAYERS_IN_LOOPS: _COUNTS,
    ModelFact.COMPILED_GRAPHS: _COUNTS,
    ModelFact.HIDDEN_DTYPE: GATES["dtype"].values,
    ScanFact.DTYPE: GATES["dtype"].values,
}


def readings(requested: dict[str, Any], facts: dict[str, Any], pattern: str) -> dict[str, Any]:
    """Return observed value, liveness and source of each gate."""
    read = read_gates(requested, facts, pattern=pattern)
    return {name: [reading.observed, reading.live, reading.how] for name, reading in read.items()}


def text() -> str:
    """Return the golden file: the schema version, then one draw per line."""
    draw = random.Random(SCHEMA_VERSION)  # noqa: S311 - a reproducible draw
    lines = []
    for _ in range(_DRAWS):
        requested = {name: draw.choice([gate.default, *gate.values]) for name, gate in GATES.items()}
        agreeing = {gate.attested_by.removeprefix("fact "): requested[name] for name, gate in GATES.items()}
        facts = {
            name: agreeing[name] if name in agreeing and draw.random() < 0.5 else draw.choice(values)
            for name, values in _FACTS.items()
            if " and " not in name and draw.random() < 0.8
        }
        pattern = draw.choice(["MA", "M", "A"])
        row = {
            "requested": requested,
            "facts": facts,
            "pattern": pattern,
            "readings": readings(requested, facts, pattern),
        }
        lines.append(json.dumps(row))
    return f'{{"schema_version": {SCHEMA_VERSION}, "draws": [\n' + ",\n".join(lines) + "\n]}\n"


def changed() -> bool:
    """Say whether a stored draw of the current schema version reads otherwise now."""
    stored = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return stored["schema_version"] == SCHEMA_VERSION and any(
        readings(draw["requested"], draw["facts"], draw["pattern"]) != draw["readings"] for draw in stored["draws"]
    )


if __name__ == "__main__":
    if changed():
        sys.exit(f"receipts of schema version {SCHEMA_VERSION} would no longer verify: {ADVICE}")
    GOLDEN.write_text(text(), encoding="utf-8")

"""`python -m tests.golden.freeze_verdicts`: store the verdicts on fixed receipts again, after an intended change."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ablate.experiments.analysis.judge import judge
from ablate.experiments.records.circumstances import CALIBRATED, UNCALIBRATED
from tests.factories import GIB, make_plan, make_receipt, make_receipts, make_spec

GOLDEN = Path(__file__).with_name("verdicts.json")

_REQUIRE = [
    {"metric": "peak_allocated_gib", "max_delta": 0.25},
    {"metric": "loss_step1", "max_delta": 0.001},
]
_DESIGNS: dict[str, dict[str, Any]] = {
    "six-blocks": {},
    "ten-blocks": {"design__blocks": {"count": 10}},
    "requirements": {"verdict__require": _REQUIRE, "design__blocks": {"count": 8}},
    "step-seconds": {"verdict__primary": {"metric": "step_s", "margin": "0.5%", "adopt_if": "1.5%"}},
}
_SPEEDS = {"faster": 1.03, "slower": 0.96, "equal": 1.0, "near-the-margin": 1.006}


def verdicts() -> dict[str, Any]:
    """Return all golden verdicts by name, as plain JSON."""
    return {name: _rounded(_without_gate_count(verdict)) for name, verdict in _judged()}


def text() -> str:
    """Return the golden file: one verdict per line."""
    lines = (f"{json.dumps(name)}: {json.dumps(verdict, sort_keys=True)}" for name, verdict in verdicts().items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _without_gate_count(verdict: dict[str, Any]) -> dict[str, Any]:
    """Replace the number of gates, which a new gate changes, by that of gates not live; drop the digest and names."""
    del verdict["digest"]
    for variant in verdict["variants"]:
        counted = variant["gates_live"].partition(", not observed here: ")[0]
        variant["gates_live"] = re.sub(r"(\d+)/(\d+)", _not_live, counted)
    return verdict


def _not_live(count: re.Match[str]) -> str:
    return f"{int(count[2]) - int(count[1])} not live"


def _rounded(value: Any) -> Any:
    """Round numbers to nine digits, on which all processors agree."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _judged() -> Iterator[tuple[str, Any]]:
    for design, changes in _DESIGNS.items():
        spec = make_spec(**changes)
        plan = make_plan(spec)
        for seed, (effect, speed) in enumerate(_SPEEDS.items()):
            receipts = make_receipts(plan, {"psiv-on": speed}, sd=0.002, seed=seed)
            for calibrated in (True, False):
                verdict = judge(plan, spec, receipts, CALIBRATED if calibrated else UNCALIBRATED)
                yield f"{design} {effect} calibrated={calibrated}", verdict.model_dump(mode="json")
        receipts = [receipt for receipt in receipts if (receipt.ids.block_index, receipt.arm) != (0, "chunk-32")]
        fat = make_receipt(plan, 0, "chunk-32", outcome="oom", message="out of memory", peak_bytes=15 * GIB)
        yield f"{design} out of memory", judge(plan, spec, [*receipts, fat], CALIBRATED).model_dump(mode="json")


if __name__ == "__main__":
    GOLDEN.write_text(text())

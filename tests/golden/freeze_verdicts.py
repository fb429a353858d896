"""`python -m tests.golden.freeze_verdicts`: store what the judge says of fixed receipts, after a wanted change."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.analysis.judge import judge
from experiments.records.circumstances import CALIBRATED, UNCALIBRATED
from tests.factories import GIB, make_plan, make_receipt, make_receipts, make_spec

GOLDEN = Path(__file__).with_name("verdicts.json")

_REQUIRE = [
    {"metric": "peak_allocated_gib", "max_delta": 0.25},
    {"metric": "loss_step1", "rule": "as_claimed"},
]
_DESIGNS: dict[str, dict[str, Any]] = {
    "six-blocks": {},
    "ten-blocks": {"design__blocks": {"count": 10}},
    "requirements": {"verdict__require": _REQUIRE, "design__blocks": {"count": 8}},
    "step-seconds": {"verdict__primary": {"metric": "step_s", "margin": "0.5%", "adopt_if": "1.5%"}},
}
_SPEEDS = {"faster": 1.03, "slower": 0.96, "equal": 1.0, "near-the-margin": 1.006}


def verdicts() -> dict[str, Any]:
    """Return every golden verdict by name, as plain JSON; numbers to nine digits, which all processors agree on."""
    return {name: _rounded(found) for name, found in _made()}


def text() -> str:
    """Return the golden file: one verdict a line."""
    lines = (f"{json.dumps(name)}: {json.dumps(found, sort_keys=True)}" for name, found in verdicts().items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _made() -> Iterator[tuple[str, Any]]:
    for design, changes in _DESIGNS.items():
        spec = make_spec(**changes)
        plan = make_plan(spec)
        for seed, (effect, speed) in enumerate(_SPEEDS.items()):
            receipts = make_receipts(plan, {"psiv-on": speed}, sd=0.002, seed=seed)
            for calibrated in (True, False):
                found = judge(plan, spec, receipts, CALIBRATED if calibrated else UNCALIBRATED)
                yield f"{design} {effect} calibrated={calibrated}", found.model_dump(mode="json")
        receipts = [receipt for receipt in receipts if (receipt.ids.block_index, receipt.arm) != (0, "chunk-32")]
        fat = make_receipt(plan, 0, "chunk-32", outcome="oom", message="out of memory", peak_bytes=15 * GIB)
        yield f"{design} out of memory", judge(plan, spec, [*receipts, fat], CALIBRATED).model_dump(mode="json")


if __name__ == "__main__":
    GOLDEN.write_text(text())

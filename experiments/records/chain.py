"""How a receipt is chained to its ablation: the fields that say where it belongs, and whether they say what they must.

Paths such as "digests/spec" reach into the receipt as JSON.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.records.messages import ClaimedBlock, ClaimedTrial


def expected_fields(block: ClaimedBlock, trial: ClaimedTrial, *, node_id: str) -> dict[str, Any]:
    """Return what the receipt of `trial` must say, by path."""
    return {
        "ids/ablation": block.ablation_id,
        "ids/block": block.block_id,
        "ids/block_index": block.block_index,
        "ids/position": trial.position,
        "ids/trial": trial.trial_id,
        "ids/attempt": block.attempt_id,
        "ids/node": node_id,
        "arm": trial.arm,
        "role": trial.role,
        "seed": block.seed,
        "digests/spec": block.spec_digest,
        "digests/rule": block.rule_digest,
        "digests/arm": trial.arm_digest,
    }


def mismatches(receipt: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, sentence) for every field of `receipt` that is not as `expected`."""
    for path, wanted in expected.items():
        given = read_path(receipt, path)
        if given != wanted:
            yield path, f"is {given!r}; expected {wanted!r}"


def read_path(value: Any, path: str) -> Any:
    """Return the plain value at `path`, None when there is none."""
    for part in path.split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, str | int | float | None) else repr(value)

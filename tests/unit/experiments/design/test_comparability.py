from dataclasses import asdict
from typing import Any

import pytest

from experiments.design.arms import resolve
from experiments.design.config_fields import replace_fields
from experiments.design.gate import Claim
from experiments.design.gates import GATES
from experiments.design.metrics import METRICS
from experiments.design.recipes import HYBRID_TINY
from experiments.design.rule import other_model, other_work
from model.config import TrainConfig
from model.errors import ConfigError
from tests.factories import make_spec

CHANGES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "rows": ({"micro_batch": 4}, True, False),
    "wider": ({"model.d_model": 256}, False, True),
    "vocabulary": ({"model.vocab_size": 8192}, False, True),
    "rank": ({"model.mamba.mimo_rank": 2}, False, True),
    "state": ({"model.mamba.d_state": 64}, False, True),
    "deeper": ({"model.pattern": "MMMAF"}, False, True),
    "mlp": ({"model.mlp_ratio": 4.0}, False, True),
    "longer rows": ({"data.seq_len": 512}, True, True),
    "rows for tokens": ({"data.seq_len": 512, "micro_batch": 1}, False, True),
    "learning rate": ({"optim.learning_rate": 0.1}, False, False),
    "dtype": ({"dtype": "bfloat16"}, False, False),
    "chunk": ({"model.scan.chunk_size": 32}, False, False),
    "psiv": ({"model.scan.psiv_cache": True}, False, False),
    "loss": ({"loss": "chunked"}, False, False),
    "threads": ({"threads": 2}, False, False),
}
"""What is changed, whether a step then has other tokens, and whether a token then takes other FLOPs (pattern MMAF)."""


def json_of(config: TrainConfig) -> dict[str, Any]:
    values = asdict(config)
    del values["seed"]
    return values


@pytest.mark.parametrize("name", CHANGES)
def test_other_work_is_seen_where_the_metric_counts_it_and_only_there(name: str) -> None:
    changes, tokens, flops = CHANGES[name]
    base = HYBRID_TINY.config
    pair = json_of(replace_fields(base, changes)), json_of(base)
    counted = {alike: other_work(_metric(alike), *pair) is not None for alike in ("step", "token", "nothing")}
    assert counted == {"step": tokens or flops, "token": flops, "nothing": False}


def _metric(alike: str) -> Any:
    return next(metric for metric in METRICS.values() if metric.alike == alike)


def test_a_gate_that_changes_work_says_that_it_changes_the_model() -> None:
    """The rule names other work only where a variant names such a gate."""
    wrong = []
    base = HYBRID_TINY.config
    for gate in GATES.values():
        for value in gate.values:
            try:
                changed = gate.apply(base, value)
            except ConfigError:
                continue
            if other_work(METRICS["step_s"], json_of(changed), json_of(base)) and gate.claim is not Claim.CHANGES_MODEL:
                wrong.append((gate.name, value))
    assert wrong == []


def test_another_model_is_named_gate_by_gate() -> None:
    spec = make_spec(variants={"both": {"gates": {"micro_batch": 4, "dtype": "bfloat16", "chunk_size": 32}}})
    base, both = resolve(spec).arms
    assert other_model(both, base) == "micro_batch 4 instead of 2, dtype bfloat16 instead of float32"
    assert other_model(base, base) is None

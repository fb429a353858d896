import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import pytest

from ablate.experiments.design.arms import resolve
from ablate.experiments.design.checks import other_model, other_work
from ablate.experiments.design.equal_work import resolve_with_steps
from ablate.experiments.design.gate import Claim, replace_fields
from ablate.experiments.design.gates import GATES, with_gates
from ablate.experiments.design.kinds.built_in import BuiltInArm
from ablate.experiments.design.metrics import METRICS
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.recipes import HYBRID_TINY
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.model.errors import ConfigError
from tests.factories import make_spec
from tests.unit.experiments.design.flop_oracle import step_flops, step_tokens

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


@pytest.mark.parametrize("name", CHANGES)
def test_other_work_is_seen_where_the_metric_counts_it_and_only_there(name: str) -> None:
    changes, tokens, flops = CHANGES[name]
    base = HYBRID_TINY.config
    pair = BuiltInArm(**vars(replace_fields(base, changes))), BuiltInArm(**vars(base))
    counted = {
        alike: other_work(_metric(alike), *pair, equal="steps") is not None for alike in ("step", "token", "nothing")
    }
    assert counted == {"step": tokens or flops, "token": flops, "nothing": False}
    counted = {alike: other_work(_metric(alike), *pair, equal="parameters") is not None for alike in counted}
    assert counted == {"step": tokens, "token": False, "nothing": False}


def _metric(alike: str) -> Any:
    return next(metric for metric in METRICS.values() if metric.alike == alike and metric.kind != "loss")


def test_a_gate_that_changes_work_says_that_it_changes_the_model() -> None:
    """The rule names other work only where a variant names such a gate."""
    wrong = []
    base = HYBRID_TINY.config
    for gate in GATES.values():
        for value in gate.values:
            start = with_gates(base, gate.needs(value))
            try:
                changed = with_gates(start, {gate.name: value})
            except ConfigError:
                continue
            pair = BuiltInArm(**vars(changed)), BuiltInArm(**vars(start))
            if other_work(METRICS["step_s"], *pair, equal="steps") and gate.claim is not Claim.CHANGES_MODEL:
                wrong.append((gate.name, value))
    assert wrong == []


def test_another_model_is_named_gate_by_gate() -> None:
    spec = make_spec(variants={"both": {"gates": {"micro_batch": 4, "dtype": "bfloat16", "chunk_size": 32}}})
    base, both = resolve(spec).arms
    assert other_model(both, base) == "micro_batch 4 instead of 2, dtype bfloat16 instead of float32"
    assert other_model(base, base) is None


SPEEDS = ("tokens_per_s", "step_s", "model_tflops_per_s")
LOSSES = ("loss_val", "loss_final", "loss_step1")


def _drawn(chance: random.Random) -> dict[str, Any]:
    """Draw values from the whole range, edges included, that a small model can have."""
    choices: dict[str, Any] = {
        "micro_batch": chance.choice((1, 4096, chance.randint(2, 64))),
        "d_model": 64 * chance.choice((1, 2, 3, 256)),
        "pattern": "".join(chance.choices("MAF", k=chance.choice((1, 2, 256)))),
        "expand": chance.randint(1, 8),
        "d_state": 4 * chance.choice((2, 64, chance.randint(3, 63))),
        "mimo_rank": chance.choice((1, 2, 4, 8)),
        "mlp_ratio": chance.choice((0.5, 8.0, chance.uniform(0.5, 8.0))),
        "learning_rate": chance.choice((1e-8, 1.0)),
        "norm": "layer",
        "rope_theta": chance.choice((100.0, 1e8)),
        "lr_warmup_steps": chance.choice((0, 1_000_000)),
        "seq_len": chance.choice((16, 64, 1_048_576, chance.randint(16, 2048))),
        "vocab_size": chance.choice((257, 262_144)),
        "documents": "joined",
        "corpus": "torch-python",
        "second_corpus": "/data/more",
        "val_fraction": chance.choice((0.001, 0.5)),
    }
    return {name: choices[name] for name in chance.sample(sorted(choices), chance.randint(1, 4))}


def _alike(metric: str, own: BuiltInArm, base: BuiltInArm, *, required: bool) -> bool:
    """Say by a count of its own whether a metric compares two arms."""
    totals = [c.steps.total for c in (own, base)]
    tokens, flops = [step_tokens(c) for c in (own, base)], [step_flops(c) for c in (own, base)]
    if metric in LOSSES:
        trained = [tokens[n] * totals[n] for n in (0, 1)]
        apart = abs(flops[0] * totals[0] - flops[1] * totals[1])
        equal = trained[0] == trained[1] or 1000 * apart <= flops[1] * totals[1]
        data = [{**asdict(c.data), "vocab_size": c.model.vocab_size, "rows": c.micro_batch} for c in (own, base)]
        if metric == "loss_val":
            data = [{**one, "rows": 0, "seq_len": 0, "val_seq_len": 0, "documents": ""} for one in data]
        return equal and data[0] == data[1]
    per_token = [Fraction(f, t) for f, t in zip(flops, tokens, strict=True)]
    same_step = tokens[0] == tokens[1]
    if required:
        return metric != "step_s" or same_step
    pairs = {"tokens_per_s": [per_token], "step_s": [tokens, per_token], "model_tflops_per_s": []}[metric]
    return all(one == other for one, other in pairs)


@pytest.mark.parametrize(
    ("values", "refused"), [({"corpus": "torch-python"}, True), ({"micro_batch": 4}, False), ({"seq_len": 64}, False)]
)
def test_metrics_of_curves_need_equal_validation_rows_only(values: dict[str, Any], refused: bool) -> None:
    spec = make_spec(
        workload__steps={"warmup": 1, "warmup_s": 0, "timed": 40, "val_rows": 2, "val_every": 10},
        baseline={},
        variants={"other": {"overrides": values}},
        design={"seeds": 6, "blocks": {"count": 6}},
        verdict__primary={"metric": "loss_val_at_time", "margin": "1%"},
        verdict__require=[{"metric": "tokens_to_loss", "not_worse_by": "5%", "target": "6 nats"}],
    )
    where = ["#/verdict/primary/metric", "#/verdict/require/0/metric"]
    assert [problem.pointer for problem in _problems(spec)] == (where if refused else [])


def _problems(spec: AblationSpec) -> Sequence[SpecProblem]:
    try:
        make_plan(spec)
    except SpecError as error:
        return error.problems
    return ()


def test_drawn_arms_are_refused_exactly_where_a_metric_of_the_rule_does_not_compare_them() -> None:
    chance, seen = random.Random(6), Counter[bool]()  # noqa: S311  # not for secrets
    for _ in range(120):
        primary, second = chance.choice((*SPEEDS, *LOSSES)), chance.choice((*SPEEDS, *LOSSES))
        bound = {"max_delta": 1.0} if second in LOSSES and chance.random() < 0.3 else {"not_worse_by": "5%"}
        spec = make_spec(
            workload__steps={"warmup": 1, "warmup_s": 0, "timed": chance.randint(20, 300), "val_rows": 2}
            | chance.choice(({}, {"equal": "tokens"}, {"equal": "flops"})),
            baseline={},
            variants={"other": {"overrides": _drawn(chance)}},
            design={"seeds": 6, "blocks": {"count": 12}},
            verdict__primary={"metric": primary, "margin": "1%"},
            verdict__require=[{"metric": second, **bound}],
        )
        arms = resolve_with_steps(spec).arms
        if not arms:  # values that fit no model, or steps that do not divide, have tests of their own
            continue
        base, own = (arm.config for arm in arms)
        expected = set() if _alike(primary, own, base, required=False) else {"#/verdict/primary/metric"}
        expected |= set() if _alike(second, own, base, required=True) else {"#/verdict/require/0/metric"}
        problems = _problems(spec)
        assert {problem.pointer for problem in problems} == expected, (primary, second, spec.variants)
        assert all("fair: " in str(problem.hint) and "'other'" in problem.detail for problem in problems)
        seen[bool(problems)] += 1
    assert min(seen[True], seen[False]) > 20

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from ablate.experiments.catalog.files import catalog_names, read_catalog_file
from ablate.experiments.design.arms import resolve
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import block_difference, draw_seeds, make_plan, orders
from ablate.experiments.design.rule import rule_digest
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import SeedOrigin
from ablate.model.config import StepsConfig, TrainConfig
from tests.factories import catalog_spec, make_spec

REFUSED = "demo-refused"


@pytest.mark.parametrize("name", [name for name in catalog_names() if name != REFUSED])
def test_catalog_file_plans(name: str) -> None:
    plan = make_plan(catalog_spec(name))
    assert plan.ablation == name
    assert len(plan.arms) >= 2


def test_catalog_file_of_the_refused_demo_is_refused_for_its_gates() -> None:
    with pytest.raises(SpecError) as caught:
        make_plan(parse_spec(read_catalog_file(REFUSED), "application/yaml"))
    assert {problem.pointer for problem in caught.value.problems} == {
        f"#/variants/tma-warps/gates/{gate}" for gate in ("layout_2d", "tma", "warp_specialize")
    }


def test_read_catalog_file_names_the_known_ones() -> None:
    with pytest.raises(SpecError) as caught:
        read_catalog_file("demos")
    (problem,) = caught.value.problems
    assert problem.detail.startswith("no catalog spec is named 'demos'; known: command, demo, ")
    assert problem.hint == "did you mean 'demo'?"


def test_make_plan_is_deterministic_and_follows_the_order_seed() -> None:
    assert make_plan(make_spec()) == make_plan(make_spec())
    plans = [make_plan(make_spec(design__order_seed=seed)) for seed in range(9)]
    assert len({tuple(block.order for block in plan.blocks) for plan in plans}) > 4


def test_make_plan_cycles_seeds_and_holds_every_arm_once_per_block() -> None:
    plan = make_plan(make_spec(design__seeds=[5, 6, 7], design__blocks={"count": 7}))
    assert [block.seed for block in plan.blocks] == [5, 6, 7, 5, 6, 7, 5]
    assert all(sorted(block.order) == ["baseline", "chunk-32", "psiv-on"] for block in plan.blocks)
    assert plan.baseline.role == "baseline"


def test_make_plan_resolves_gates_into_the_configuration() -> None:
    overrides = {"seq_len": 128, "loss_chunk_tokens": 64}
    spec = make_spec(baseline__gates={"chunk_size": 64, "loss": "chunked"}, workload__overrides=overrides)
    baseline, psiv, chunk = make_plan(spec).arms
    assert baseline.gates["chunk_size"] == psiv.gates["chunk_size"] == 64
    assert (chunk.gates["chunk_size"], chunk.gates["loss"]) == (32, "chunked")
    assert psiv.config.model.scan.psiv_cache is True
    assert psiv.config.data.seq_len == 128
    assert psiv.config.steps == StepsConfig(warmup=1, warmup_s=0.0, timed=4, slice=0, val_rows=2, val_every=0)
    assert set(TrainConfig.__dataclass_fields__) - set(psiv.model_dump()["config"]) == {"seed"}
    assert len({arm.digest for arm in (baseline, psiv, chunk)}) == 3


def test_make_plan_inherits_what_a_variant_makes_useless() -> None:
    plan = make_plan(make_spec(variants={"steps": {"gates": {"schedule": "sequential"}}}))
    assert plan.arms[1].gates["chunk_size"] == 16


def test_make_plan_rule_digest_covers_the_rule_and_not_the_question() -> None:
    base = rule_digest(make_spec())
    assert rule_digest(make_spec(question="Another?")) == base
    for changes in ({"verdict__primary__margin": "0.6%"}, {"design__seeds": [1]}, {"design__blocks": {"count": 7}}):
        assert rule_digest(make_spec(**changes)) != base


def test_make_plan_states_the_detectable_effect() -> None:
    assert make_plan(make_spec()).mde_pct_per_sd_pct == pytest.approx(1.99, abs=0.01)
    assert make_plan(make_spec()).expected_device_minutes is None


def test_the_demo_stays_small_enough_for_three_minutes_on_two_quiet_cores() -> None:
    """18 trials of 16 steps took 86 s there, start-up included."""
    plan = make_plan(parse_spec(read_catalog_file("demo"), "application/yaml"))
    steps = plan.baseline.config.steps
    trials = len(plan.blocks) * len(plan.arms)
    assert not plan.timed, "an exact metric decides: it needs no quiet machine"
    assert trials <= 18
    assert trials * (1 + steps.warmup + steps.timed) <= 18 * 16


@pytest.mark.parametrize(
    ("node_class", "given", "baseline", "variant", "message"),
    [
        ("cpu", 2, 1, 4, "gate 'devices' = 4, and placement.devices gives a block 2"),
        ("cpu", 2, 1, 1, "a block gets 2 devices, and no arm uses more than 1"),
        ("cpu", 1, 1, 2, "gate 'devices' = 2, and placement.devices gives a block 1"),
        ("xla-cpu", 2, 2, 1, "a step of lane xla uses all 2 devices of its block"),
    ],
)
def test_an_arm_asks_for_devices_that_its_block_has(
    node_class: str, given: int, baseline: int, variant: int, message: str
) -> None:
    lane = {"lane": "xla"} if node_class == "xla-cpu" else {}
    with pytest.raises(SpecError, match=message):
        make_plan(
            make_spec(
                baseline={"gates": {"devices": baseline, "micro_batch": 4, **lane}},
                variants={"other": {"gates": {"devices": variant, "micro_batch": 8}}},
                placement={"node_class": node_class, "devices": given},
                workload__overrides={"micro_batch": 4},
            )
        )


def test_devices_of_the_placement_are_the_mesh_of_every_arm_and_share_its_rows() -> None:
    asked = {
        "baseline": {"gates": {"lane": "xla"}},
        "variants": {"whole": {"gates": {"sharding": "replicated"}}},
        "placement": {"node_class": "xla-cpu", "devices": 2},
    }
    plan = make_plan(make_spec(**asked))
    assert {arm.config.mesh.devices for arm in plan.arms} == {2}
    assert [arm.config.mesh.sharding for arm in plan.arms] == ["fsdp", "replicated"]
    asked["placement"] = {"node_class": "xla-cpu", "devices": 4}  # the recipe has two rows
    with pytest.raises(SpecError, match="micro_batch is 2; allowed: a multiple of the 4 devices"):
        make_plan(make_spec(**asked))


@pytest.mark.parametrize(
    ("gates", "overrides", "problem"),
    [
        (
            {"scan_layers": True},
            {"pattern": "MM"},
            "scan_layers is true; a loop cannot be divided over 4",
        ),
        ({"schedule": "sequential"}, {}, "schedule is sequential, which runs on one device, not on 4"),
        ({"attention": "flash"}, {"pattern": "MA"}, "attention is flash, a kernel that cannot be divided over 4 dev"),
    ],
    ids=["scan_layers", "schedule", "attention"],
)
def test_gates_that_several_devices_cannot_share_are_refused_at_the_gate(
    gates: dict[str, Any], overrides: dict[str, Any], problem: str
) -> None:
    asked: dict[str, Any] = {
        "workload__overrides": {"micro_batch": 4, **overrides},
        "baseline": {"gates": {"lane": "xla"}},
        "variants": {"tried": {"gates": gates}},
        "verdict": {"primary": {"metric": "hbm_peak_gib", "margin": "1%"}},
    }
    make_plan(make_spec(placement={"node_class": "tpu-v6e-compile"}, **asked))
    with pytest.raises(SpecError) as caught:
        make_plan(make_spec(placement={"node_class": "tpu-v6e-compile", "devices": 4}, **asked))
    (refusal,) = caught.value.problems
    assert refusal.pointer == f"#/variants/tried/gates/{next(iter(gates))}"
    assert refusal.detail.startswith(f"the gates do not fit together: {problem}")


@pytest.mark.parametrize(
    ("pattern", "attention", "reason"),
    [
        ("MFA", "sdpa", "no group of adjacent blocks repeats in pattern MFA"),
        ("MAMF", "sdpa", "no group of adjacent blocks repeats in pattern MAMF"),
        ("MAMA", "flash", "no group of adjacent blocks without attention by kernel 'flash' repeats in pattern MAMA"),
        ("MAMA", "sdpa", None),
        ("MFMFA", "flash", None),
    ],
)
def test_loops_over_layers_of_a_pattern_without_a_repeated_group_are_refused(
    pattern: str, attention: str, reason: str | None
) -> None:
    spec = make_spec(
        workload__overrides={"pattern": pattern, "seq_len": 128},
        baseline={"gates": {"lane": "xla", "attention": attention}},
        variants={"looped": {"gates": {"scan_layers": True}}},
        placement={"node_class": "tpu-v6e-compile"},
        verdict={"primary": {"metric": "hbm_peak_gib", "margin": "1%"}},
    )
    if reason is None:
        assert len(make_plan(spec).variants) == 1
        return
    with pytest.raises(SpecError) as refused:
        make_plan(spec)
    (problem,) = refused.value.problems
    assert problem.pointer == "#/variants/looped/gates/scan_layers"
    assert (
        f"scan_layers is true; {reason}, so there is no loop; allowed: false, or a pattern such as MF" in problem.detail
    )


def test_dividing_over_one_device_is_refused_at_the_gate() -> None:
    asked = {"baseline": {"gates": {"lane": "xla"}}, "placement": {"node_class": "xla-cpu"}}
    with pytest.raises(SpecError) as caught:
        make_plan(make_spec(variants={"whole": {"gates": {"sharding": "replicated"}}}, **asked))
    (problem,) = caught.value.problems
    assert problem.pointer == "#/variants/whole/gates/sharding"
    assert "no two devices have different tokens: nothing to divide" in problem.detail


@pytest.mark.parametrize(("tokens", "is_refused"), [(256, True), (512, True), (255, False), (16, False)])
def test_a_chunked_loss_of_one_chunk_is_refused(tokens: int, is_refused: bool) -> None:
    asked = {"seq_len": 128, "micro_batch": 2, "loss_chunk_tokens": tokens}
    spec = make_spec(variants={"chunked": {"gates": {"loss": "chunked"}}}, workload__overrides=asked)
    if not is_refused:
        assert len(make_plan(spec).variants) == 1
        return
    with pytest.raises(SpecError) as refused:
        make_plan(spec)
    (problem,) = refused.value.problems
    assert problem.pointer == "#/variants/chunked/gates/loss"
    assert "a step has 256 tokens, one chunk; allowed: workload/overrides/loss_chunk_tokens below 256" in problem.detail


@pytest.mark.parametrize("seed", range(30))
def test_a_chunk_longer_than_a_row_is_refused_where_there_are_chunks(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  # not for secrets
    tokens, chunk = chance.choice((8, 15, 16, 60, 64, 127, 128, 255, 256, 500)), chance.choice((8, 32, 64, 128, 256))
    pattern, schedule = chance.choice(("MA", "FA", "M")), chance.choice(("sequential", "chunk_parallel"))
    asked = {"seq_len": tokens, "pattern": pattern}
    base = {"gates": {"schedule": "chunk_parallel", "chunk_size": 8}} if "M" in pattern else {}
    gates = {"chunk_size": chunk, "psiv_cache": True, "schedule": schedule} if "M" in pattern else {"loss": "dense"}
    if schedule == "sequential":
        gates.pop("chunk_size", None)
    spec = make_spec(baseline=base, variants={"asked": {"gates": gates}}, workload__overrides=asked)
    details = [problem.detail for problem in resolve(spec).problems if "padded" in problem.detail]
    refused = "M" in pattern and schedule == "chunk_parallel" and chunk > tokens
    assert bool(details) is refused
    if refused:
        assert details[0].startswith(
            f"the gates do not fit together: chunk_size {chunk} is longer than a row of {tokens}"
        )
        assert details[0].endswith(f"allowed: {', '.join(str(c) for c in (8, 16, 32, 64, 128, 256) if c <= tokens)}")


ARMS = {number: [f"arm{index}" for index in range(number)] for number in range(2, 10)}


@pytest.mark.parametrize("number", range(2, 10))
@pytest.mark.parametrize("blocks", [6, 7, 13, 20])
def test_orders_differ_by_at_most_one_in_every_position(number: int, blocks: int) -> None:
    rows = orders(ARMS[number], blocks=blocks, seed=3)
    assert all(sorted(row) == ARMS[number] for row in rows)
    for position in range(number):
        counts = Counter(row[position] for row in rows)
        assert max(counts.values()) - min(counts[arm] for arm in ARMS[number]) <= 1


@pytest.mark.parametrize("number", range(2, 10))
def test_orders_balance_who_follows_whom_over_full_squares(number: int) -> None:
    rows = orders(ARMS[number], blocks=number if number % 2 == 0 else 2 * number, seed=11)
    follows = Counter(pair for row in rows for pair in pairwise(row))
    assert len(follows) == number * (number - 1)
    assert len(set(follows.values())) == 1


def test_orders_are_random_in_the_seed_and_the_same_for_one_seed() -> None:
    first = orders(ARMS[3], blocks=6, seed=1)
    assert first == orders(ARMS[3], blocks=6, seed=1)
    assert len({tuple(orders(ARMS[3], blocks=6, seed=seed)) for seed in range(30)}) > 20


def test_orders_are_the_same_on_every_machine() -> None:
    assert orders(["a", "b"], blocks=4, seed=20261120) == [("b", "a"), ("a", "b"), ("a", "b"), ("b", "a")]


def problems_of(recipe: str, gates: dict[str, Any], **changes: Any) -> list[tuple[str, str]]:
    """Return pointer and detail of all problems of one variant on an H100."""
    asked: dict[str, Any] = {"workload__recipe": recipe, "baseline": {"gates": {}}, "variants": {"v": {"gates": gates}}}
    asked |= {"placement": {"node_class": "h100"}, **changes}
    return [(problem.pointer, problem.detail) for problem in resolve(make_spec(**asked)).problems]


@pytest.mark.parametrize(
    ("recipe", "gates", "overrides", "pointer", "problem"),
    [
        ("hybrid-tiny", {"projections": "fp8"}, {}, "variants/v/gates/projections", "requires dtype = bfloat16"),
        (
            "hybrid-ref-h200",
            {"projections": "fp8"},
            {"d_model": 768},
            "variants/v/gates/projections",
            "multiples of 16; the width of the mixer's input projection is 3,672",
        ),
        ("hybrid-tiny", {"lane": "cuda"}, {}, "variants/v/gates/lane", "allowed with dtype float32: reference"),
        ("hybrid-tiny", {"attention": "fa4"}, {}, "variants/v/gates/attention", "fa4, which takes bfloat16"),
        (
            "hybrid-ref-h200",
            {"attention": "flash"},
            {"softcap": 30.0},
            "variants/v/gates/attention",
            "cannot cap scores",
        ),
        ("hybrid-ref-h200", {"attention": "cudnn"}, {}, "variants/v/gates/attention", "runs in no trial"),
        ("hybrid-ref-h200", {"loss": "chunked"}, {"num_heads": 32}, "workload/recipe", "numbers; these have 16"),
        (
            "hybrid-ref-h200",
            {"cuda_graph": True, "loss": "liger"},
            {},
            "variants/v/gates/cuda_graph",
            "allowed with loss liger: false",
        ),
    ],
)
def test_what_every_trial_would_refuse_is_refused_in_the_plan(
    recipe: str, gates: dict[str, Any], overrides: dict[str, Any], pointer: str, problem: str
) -> None:
    problems = problems_of(recipe, gates, workload__overrides=overrides)
    assert (f"#/{pointer}", True) in [(where, problem in detail) for where, detail in problems], problems


def test_float8_counts_the_tokens_of_the_last_validation_batch() -> None:
    def problems(val_rows: int) -> list[tuple[str, str]]:
        steps = {"warmup": 2, "timed": 8, "val_rows": val_rows}
        asked: dict[str, Any] = {"workload__overrides": {"seq_len": 1000}, "workload__steps": steps}
        return problems_of("hybrid-ref-h200", {"projections": "fp8"}, **asked)

    ((pointer, detail),) = problems(9)
    assert pointer == "#/variants/v/gates/projections"
    assert "a validation batch (rows: 1) is 1,000" in detail
    assert problems(8) == []


def test_rows_are_divided_by_the_devices_that_compute_different_ones() -> None:
    asked: dict[str, Any] = {
        "workload__overrides": {"micro_batch": 1, "seq_len": 65536},
        "placement": {"node_class": "h100", "devices": 2},
    }
    shared = asked | {"baseline": {"gates": {"context_parallel": 2}}}
    assert problems_of("hybrid-ref-h200", {"loss": "chunked"}, **shared) == []
    ((pointer, detail),) = problems_of("hybrid-ref-h200", {"loss": "chunked"}, **asked)
    assert pointer == "#/workload/overrides/micro_batch"
    assert detail == "override 'micro_batch' is 1; allowed: a multiple of the 2 devices that compute different rows"
    own = {"variants": {"v": {"gates": {"loss": "chunked"}, "overrides": {"micro_batch": 3}}}}
    problems = problems_of("hybrid-ref-h200", {}, **asked | own | {"workload__overrides": {}})
    assert [pointer for pointer, _ in problems] == ["#/variants/v/overrides/micro_batch"]


def test_experts_are_shared_by_devices_with_different_tokens_in_equal_numbers() -> None:
    def problems(expert_parallel: int, num_experts: int, pattern: str = "EF", **placement: Any) -> list[str]:
        gates = {"expert_parallel": expert_parallel}
        overrides = {"num_experts": num_experts, "pattern": pattern, "micro_batch": 4}
        asked = {"workload__overrides": overrides, "placement": {"node_class": "h100", "devices": 4} | placement}
        return [detail for _, detail in problems_of("hybrid-tiny", gates, **asked)]

    assert problems(4, 8) == problems(2, 6) == []
    (indivisible,) = problems(4, 6)
    assert indivisible.endswith("expert_parallel is 4; allowed with 6 experts (num_experts): 1, 2")
    (alone,) = problems(2, 8, devices=1)
    assert alone.endswith("it does not divide the number of devices with different tokens, 1; allowed: 1")
    (without,) = problems(2, 8, pattern="MF")
    assert without == "gate 'expert_parallel' needs a block of kind E (mixture of experts); pattern 'MF' has none"


@pytest.mark.parametrize(
    ("gates", "detail", "hint"),
    [
        (
            {"adamw_moments": "bfloat16"},
            "adamw_moments is bfloat16; allowed with adamw_update fused: float32",
            "add adamw_update: compiled",
        ),
        (
            {"residual": "bfloat16"},
            "residual is bfloat16; allowed with dtype float32: float32",
            "add dtype: bfloat16",
        ),
        (
            {"optimizer": "muon", "adamw_update": "compiled"},
            "adamw_update is compiled, which Muon's update cannot do; allowed with optimizer muon: fused, foreach",
            "add optimizer: adamw",
        ),
    ],
)
def test_gates_that_do_not_fit_are_named_as_in_a_spec_with_what_they_need(
    gates: dict[str, Any], detail: str, hint: str
) -> None:
    (problem,) = resolve(make_spec(baseline={"gates": {}}, variants={"v": {"gates": gates}})).problems
    assert problem.detail == f"the gates do not fit together: {detail}"
    assert problem.hint == hint


def test_a_gate_of_a_variant_named_overrides_is_a_gate() -> None:
    asked: dict[str, Any] = {"baseline": {"gates": {}}, "variants": {"overrides": {"gates": {"residual": "bfloat16"}}}}
    (problem,) = resolve(make_spec(**asked)).problems
    assert problem.pointer == "#/variants/overrides/gates/residual"
    assert problem.detail.startswith("the gates do not fit together: residual is bfloat16")


def test_drawn_seeds_are_distinct_new_and_cycle_through_the_blocks() -> None:
    before: set[int] = set()
    for number in (1, 2, 3, 6, 7, 20, 64):
        spec = make_spec(design__seeds=number, design__blocks={"count": 7})
        plan = draw_seeds(make_plan(spec))
        seeds = [block.seed for block in plan.blocks]
        assert len(set(seeds)) == min(number, 7)
        assert seeds == [seeds[index % number] for index in range(7)]
        assert before.isdisjoint(seeds)
        assert all(0 <= seed < 2**31 for seed in seeds)
        before |= {*seeds}
        orders = [[block.order for block in one.blocks] for one in (plan, make_plan(spec))]
        assert (orders[0] == orders[1], block_difference(spec, plan), draw_seeds(plan)) == (True, None, plan)
    listed = make_spec(design__seeds=[5, 6])
    assert draw_seeds(make_plan(listed)) == make_plan(listed)


@pytest.mark.parametrize("number", [1, 2, 5, 7, 9])
def test_blocks_that_no_draw_can_give_are_named(number: int) -> None:
    spec = make_spec(design__seeds=number, design__blocks={"count": 7})
    plan = draw_seeds(make_plan(spec))
    for place in range(7):
        for seed in {3, *(block.seed for block in plan.blocks)} - {plan.blocks[place].seed}:
            blocks = [*plan.blocks]
            blocks[place] = blocks[place].model_copy(update={"seed": seed})
            found = block_difference(spec, plan.model_copy(update={"blocks": tuple(blocks)}))
            alone = number >= 7 or [block.seed for block in plan.blocks].count(plan.blocks[place].seed) == 1
            is_a_draw = alone and seed == 3
            assert (found is None) == is_a_draw, (place, seed)
    for own, origin in ((spec, SeedOrigin.CHOSEN), (make_spec(design__seeds=[5, 6]), SeedOrigin.DRAWN)):
        changed = make_plan(own).model_copy(update={"seeds": origin})
        assert str(block_difference(own, changed)).startswith(f"the seeds are {origin}, and the spec")

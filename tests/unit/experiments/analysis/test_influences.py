"""Influences beside a verdict, against drawn data: steadier arms, trials that act on the next one, and nodes."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ablate.experiments.analysis.comparing import Sample
from ablate.experiments.analysis.evidence import WholeBlocks, evidence_of
from ablate.experiments.analysis.influences import LEVEL, carry_over, follows, influences, node_effects
from ablate.experiments.analysis.sample_checks import spread_ratio
from ablate.experiments.design.plan import Plan
from ablate.experiments.records.receipts import Receipt
from tests.factories import make_plan, make_receipt, make_spec

RNG = np.random.default_rng(20261126)


def sample_of(own: Any, base: Any, places: Any = None) -> Sample:
    d, sums = np.subtract(own, base), np.add(own, base)
    x = tuple(1 if index % 2 else -1 for index in range(len(d))) if places is None else tuple(places)
    return Sample(differences=tuple(d.tolist()), sums=tuple(sums.tolist()), places=x)


def test_the_interval_of_a_spread_ratio_holds_as_often_as_it_says() -> None:
    for true, blocks, shared in ((1.0, 6, 0.0), (3.0, 10, 0.5), (0.25, 20, -0.4), (1.5, 64, 0.9)):
        reported, misses = 0, 0
        for _ in range(1000):
            own, base = RNG.multivariate_normal([0, 0], [[true**2, shared * true], [shared * true, 1.0]], blocks).T
            ratio = spread_ratio(sample_of(own, base))
            t = stats.t.ppf(0.975, blocks - 2)
            r = stats.pearsonr(own / true + base, own / true - base).statistic
            misses += abs(r) * np.sqrt((blocks - 2) / (1 - r**2)) > t  # Pitman and Morgan's test of the true ratio
            reported += ratio is not None
            if ratio is not None:
                assert ratio[1] < ratio[0] < ratio[2]
                assert not ratio[1] <= 1 <= ratio[2]
                assert ratio[0] == pytest.approx(np.std(own, ddof=1) / np.std(base, ddof=1))
                inside = ratio[1] <= true <= ratio[2]
                assert inside == (abs(r) * np.sqrt((blocks - 2) / (1 - r**2)) <= t)
        assert misses / 1000 == pytest.approx(0.05, abs=0.02)
        if true == 1.0:
            assert reported / 1000 == pytest.approx(0.05, abs=0.02)
    assert spread_ratio(sample_of([1.0] * 6, [1.0] * 6)) is None


def test_what_a_trial_does_to_the_next_one_is_told_from_effect_and_place() -> None:
    for _ in range(200):
        blocks = int(RNG.integers(6, 40))
        places, after = RNG.choice([-1, 1], blocks), RNG.choice([-1, 0, 1], blocks)
        effect, slope, carried = RNG.normal(0, 0.02, 3)
        d = effect + slope * places + carried * after + RNG.normal(0, 0.002, blocks)
        columns = np.column_stack([np.ones(blocks), places, after])
        fitted = carry_over(sample_of(d, np.zeros(blocks), places), after.tolist())
        if np.linalg.matrix_rank(columns) < 3:
            assert fitted is None
            continue
        values, (squares,), *_ = np.linalg.lstsq(columns, d, rcond=None)
        error = np.sqrt(squares / (blocks - 3) * np.linalg.inv(columns.T @ columns)[2, 2])
        assert fitted is not None
        assert (float(fitted.fit.mean), fitted.carried) == pytest.approx((values[0], values[2]))
        assert fitted.p == pytest.approx(2 * stats.t.sf(abs(values[2]) / error, blocks - 3), abs=1e-12)
        own_error = np.sqrt(squares / (blocks - 3) * np.linalg.inv(columns.T @ columns)[0, 0])
        assert float(fitted.fit.p_different()) == pytest.approx(
            2 * stats.t.sf(abs(values[0]) / own_error, blocks - 3), abs=1e-12
        )
    assert carry_over(sample_of([0.1] * 6, [0.0] * 6), [0, -1] * 3) is None, "place and trial before are one"


def test_no_carry_over_is_reported_as_rarely_as_the_level_says() -> None:
    hits = 0
    for _ in range(1000):
        after = RNG.choice([-1, 0, 1], 10)
        fitted = carry_over(sample_of(RNG.normal(0, 0.01, 10), np.zeros(10)), after.tolist())
        hits += fitted is not None and fitted.p <= LEVEL
    assert hits / 1000 == pytest.approx(LEVEL, abs=0.02)


def test_effects_by_node_are_means_and_the_test_is_an_analysis_of_variance() -> None:
    for _ in range(200):
        count = int(RNG.integers(2, 5))
        nodes = [f"n{index}" for index in range(count) for _ in range(int(RNG.integers(2, 9)))]
        d = RNG.normal(0, 0.01, len(nodes)) + RNG.normal(0, 0.01) * np.array([node == "n0" for node in nodes])
        groups = [d[[node == name for node in nodes]] for name in sorted(set(nodes))]
        effects = node_effects(nodes, sample_of(d, np.zeros(len(d)), [0] * len(d)))
        if len(nodes) - count < 2:
            assert effects is None
            continue
        assert effects is not None
        assert list(effects.by_node.values()) == pytest.approx([group.mean() for group in groups])
        assert effects.p == pytest.approx(stats.f_oneway(*groups).pvalue)
    flat = sample_of([0.01] * 6, [0.0] * 6)
    assert node_effects(["a"] * 6, flat) is None
    assert node_effects(["a"] * 5 + ["b"], flat) is None
    same = node_effects(["a", "b"] * 3, flat)
    assert same is not None
    assert same.p == 1.0


def _receipts(
    plan: Plan, seconds: float, node: Callable[[int], str] = lambda _index: "node-a", pause: float = 0.0
) -> list[Receipt]:
    """Return receipts whose trials start one after the other in the plan's order."""
    receipts, clock = [], 0.0
    for block in plan.blocks:
        for name in block.order:
            receipt = make_receipt(plan, block, name, environment={"node_name": node(block.index)})
            started = (datetime(2026, 11, 26, tzinfo=UTC) + timedelta(seconds=clock)).isoformat()
            receipts.append(receipt.model_copy(update={"started_at": started, "wall_s": 10.0, "digest": started}))
            clock += seconds + pause
    return receipts


def test_the_trial_before_is_that_of_the_clock_and_of_the_same_device() -> None:
    spec = make_spec(variants={"psiv-on": {"gates": {"psiv_cache": True}}}, design__blocks={"count": 12})
    plan = make_plan(spec)
    order = [name for block in plan.blocks for name in block.order]

    def expected(gap: bool) -> list[int]:
        differences = []
        for index in range(12):
            own, base = (2 * index + plan.blocks[index].order.index(name) for name in ("psiv-on", "baseline"))
            before = [place > 0 and not gap and order[place - 1] == "psiv-on" for place in (own, base)]
            differences.append(int(before[0]) - int(before[1]))
        return differences

    for pause, gap in ((0.0, False), (200.0, True)):
        whole = WholeBlocks(plan, _receipts(plan, 10.0, pause=pause))
        assert follows(evidence_of(plan.variants[0], whole), whole) == expected(gap)
    assert any(expected(False))


def test_notes_name_the_nodes_and_the_factor() -> None:
    spec = make_spec(variants={"psiv-on": {"gates": {"psiv_cache": True}}}, design__blocks={"count": 12})
    plan = make_plan(spec)
    whole = WholeBlocks(plan, _receipts(plan, 10.0, node=lambda index: f"node-{'ab'[index % 2]}"))
    evidence = evidence_of(plan.variants[0], whole)
    own = np.where(np.arange(12) % 2, 0.03, 0.01) + RNG.normal(0, 0.0005, 12)
    notes = list(influences(evidence, whole, sample_of(own, RNG.normal(0, 0.0005, 12))))
    assert any("effect by node: node-a +1.0" in note and "they differ" in note for note in notes), notes
    steady = sample_of(RNG.normal(0, 0.001, 12), RNG.normal(0, 0.02, 12))
    (note, *_) = influences(evidence, whole, steady)
    assert note.startswith("the variant's runs are steadier by a factor of ")

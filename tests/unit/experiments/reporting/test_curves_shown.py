"""Validation curves in the report and in MLflow, compared with numpy."""

import dataclasses

import numpy as np
import pytest

from ablate.experiments.analysis.curves import band_of
from ablate.experiments.design.plan import make_plan
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.reporting.mlflow.runs import children
from ablate.experiments.reporting.pictures.curves import distances, validation_curves
from ablate.experiments.reporting.view import AblationView
from tests import views
from tests.factories import make_receipt, make_spec

POINTS = 12


def curve_view(
    seeds: int, blocks: int, variants: int = 1, every: int = 1
) -> tuple[AblationView, dict[str, list[Receipt]]]:
    """Return a view with drawn curves: those of a seed's blocks are the same."""
    rng = np.random.default_rng([seeds, blocks, variants])
    gates = [{"chunk_size": size} for size in (8, 32, 64, 128)] + [{"psiv_cache": True}, {"loss": "chunked"}]
    gates += [{"dtype": "bfloat16"}, {"chunk_size": 32, "psiv_cache": True}, {"chunk_size": 64, "psiv_cache": True}]
    spec = make_spec(
        workload__steps={"warmup": 1, "warmup_s": 0, "timed": POINTS * every, "val_rows": 2, "val_every": every},
        variants={f"v{index}": {"gates": own} for index, own in enumerate(gates[:variants])},
        design__seeds=seeds,
        design__blocks={"count": blocks},
        verdict__primary={"metric": "loss_val", "margin": "1%"},
        verdict__require=[],
    )
    plan = make_plan(spec)
    curves = {
        (seed, arm.name): np.sort(rng.uniform(3, 8, POINTS))[::-1].tolist()
        for seed in range(1, seeds + 1)
        for arm in plan.arms
    }
    receipts = [
        make_receipt(
            plan,
            block,
            arm,
            val_losses=curves[block.seed, arm],
            tokens_per_s=float(rng.uniform(4000, 6000)),
            wall_s=600.0,
        )
        for block in plan.blocks
        for arm in block.order
    ]
    by_arm = {arm.name: [one for one in receipts if one.arm == arm.name] for arm in plan.arms}
    return views.judged_view(spec, plan, receipts), by_arm


@pytest.mark.parametrize(("seeds", "blocks"), [(6, 6), (7, 16), (12, 12)])
def test_a_band_has_the_mean_and_the_quartiles_of_the_seeds(seeds: int, blocks: int) -> None:
    _, by_arm = curve_view(seeds, blocks)
    own, base = by_arm["v0"], by_arm["baseline"]
    first = {receipt.seed: receipt for receipt in own}
    losses = np.array([[point.loss for point in one.summary.curve] for one in first.values()])  # type: ignore[union-attr]
    band = band_of(own)
    assert [point.mean for point in band] == pytest.approx(losses.mean(axis=0))
    assert [point.low for point in band] == pytest.approx(np.percentile(losses, 25, axis=0))
    assert [point.high for point in band] == pytest.approx(np.percentile(losses, 75, axis=0))
    assert [point.tokens for point in band] == [point.tokens for point in own[0].summary.curve]  # type: ignore[union-attr]
    others = {receipt.seed: receipt for receipt in base}
    theirs = np.array([[point.loss for point in others[seed].summary.curve] for seed in first])  # type: ignore[union-attr]
    gaps = distances(own, base)
    assert [point.mean for point in gaps] == pytest.approx((losses - theirs).mean(axis=0))
    assert [point.high for point in gaps] == pytest.approx(np.percentile(losses - theirs, 75, axis=0))
    assert all(point.mean == 0 for point in distances(base, base))


def test_the_picture_has_every_arm_both_axes_with_units_and_the_omission() -> None:
    view, _ = curve_view(6, 6, variants=8)
    picture = validation_curves(view)
    assert picture is not None
    for text in ("thousand tokens", "training time, seconds", "validation loss, nats", *(f"v{i}" for i in range(8))):
        assert f">{text}</text>" in picture.svg, text
    assert picture.svg.count("fill-opacity: 0.14") >= 9 + 9 + 8
    assert "Not drawn" not in picture.caption
    many = validation_curves(curve_view(6, 6, variants=9)[0])
    assert many is not None
    assert "Not drawn: 1 more arm." in many.caption


def test_nothing_is_drawn_or_projected_without_a_schedule() -> None:
    view = views.cpu_view()
    assert validation_curves(view) is None
    assert not any(point.key.startswith("curve/") for run in children(view) for point in run.points)
    shown = curve_view(6, 6)[0]
    blind = dataclasses.replace(
        shown, trials=tuple(dataclasses.replace(trial, receipt=None) for trial in shown.trials if trial.arm != "v0")
    )
    assert validation_curves(blind) is None


def test_mlflow_gets_the_curves_of_trials_and_the_bands_of_arms_with_tokens_as_the_step() -> None:
    view, by_arm = curve_view(6, 6)
    runs = {run.identity: run for run in children(view)}
    trial = next(trial for trial in view.trials if trial.arm == "v0")
    assert trial.receipt is not None
    assert trial.receipt.summary is not None
    assert trial.receipt.summary.curve is not None
    points = {
        (p.key, p.step): p.value for p in runs[f"{trial.trial_id}/{trial.attempt_id}"].points if "curve/" in p.key
    }
    expected = {("curve/loss_val", point.tokens): point.loss for point in trial.receipt.summary.curve}
    expected |= {("curve/loss_val_seconds", point.tokens): point.seconds for point in trial.receipt.summary.curve}
    assert points == expected
    arm = {(p.key, p.step): p.value for p in runs["arm/v0"].points if "curve/" in p.key}
    band = band_of(by_arm["v0"])
    assert len(arm) == 4 * POINTS
    for point in band:
        assert arm["curve/loss_val_mean", point.tokens] == point.mean
        assert arm["curve/loss_val_low", point.tokens] == point.low
        assert arm["curve/loss_val_high", point.tokens] == point.high
    assert any(p.key == "curve/loss_val_mean" for p in runs["arm/baseline"].points)

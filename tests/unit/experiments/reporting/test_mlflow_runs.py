"""What reviewers find in MLflow: names by which they filter, metrics that are the same everywhere, states."""

import dataclasses
import math
from collections.abc import Iterator

import pytest

from ablate.experiments.analysis.noise.calibrate import calibrate
from ablate.experiments.analysis.statistics import percent
from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.outcomes import AblationState, Outcome, TrialState, VerdictWord
from ablate.experiments.records.circumstances import Admission, Circumstances
from ablate.experiments.reporting.mlflow.content import NOTE_TAG, RunContent
from ablate.experiments.reporting.mlflow.parent import parent
from ablate.experiments.reporting.mlflow.runs import DIFFERENCE, children, trial_runs
from ablate.experiments.reporting.view import AblationView
from tests import views
from tests.calibrations import KEY, noisy_blocks


def tags(names: str) -> set[str]:
    """Return names of tags; those without a dot belong to "ablation."."""
    return {name if "." in name else f"ablation.{name}" for name in names.split()}


OF_EVERY_RUN = tags("id name run kind spec_digest node_class mlflow.source.name mlflow.source.type mlflow.user")
OF_WHAT_RAN = tags("mlflow.source.git.commit mlflow.source.git.dirty")
OF_THE_PARENT = tags(
    "state rule_digest gates verdict metric variant effect interval verdict_digest calibrated broken_attempts asking"
    " nodes mlflow.note.content"
)
OF_AN_ARM = tags("arm role arm_digest nodes mlflow.note.content")
OF_A_VARIANT = tags("verdict decision gates metric")
OF_A_TRIAL = tags(
    "trial attempt arm role block order arm_digest seed outcome receipt_digest code_digest data_digest node device"
)
OF_A_FAILED_TRIAL = tags("failure_class mlflow.note.content")
OF_STATISTICS = {"effect_pct", "ci_low_pct", "ci_high_pct", "mde_pct", "sd_pct", "blocks", DIFFERENCE}


@pytest.fixture(scope="module")
def view() -> AblationView:
    return views.view(num_blocks=6, timed=4)


@pytest.fixture(scope="module")
def runs(view: AblationView) -> list[RunContent]:
    return list(children(view))


def of_kind(runs: list[RunContent], kind: str) -> dict[str, RunContent]:
    return {run.identity: run for run in runs if run.tags["ablation.kind"] == kind}


def metrics(run: RunContent) -> dict[str, float]:
    return {point.key: point.value for point in run.points}


def judged(view: AblationView) -> Verdict:
    assert view.verdict is not None
    return view.verdict


def test_runs_have_these_tags(view: AblationView, runs: list[RunContent]) -> None:
    every = OF_EVERY_RUN | OF_WHAT_RAN
    assert set(parent(view, "").tags) == every | OF_THE_PARENT
    trial = frozenset(every | OF_A_TRIAL)
    assert {frozenset(run.tags) for run in of_kind(runs, "trial").values()} == {trial, trial | OF_A_FAILED_TRIAL}
    arms = of_kind(runs, "arm")
    own = every | OF_AN_ARM
    assert set(arms.pop("arm/baseline").tags) == own
    assert {frozenset(run.tags) for run in arms.values()} == {frozenset(own | OF_A_VARIANT)}


def test_every_arm_is_one_run_with_the_numbers_of_the_verdict(view: AblationView, runs: list[RunContent]) -> None:
    arms = of_kind(runs, "arm")
    assert set(arms) == {f"arm/{arm.name}" for arm in view.plan.arms}
    for variant in judged(view).variants:
        run = arms[f"arm/{variant.arm}"]
        sent, primary = metrics(run), variant.primary
        assert run.tags["ablation.verdict"] == variant.verdict
        assert (run.status == "FAILED") == (variant.verdict in {"refused", "oom"})
        if primary is None:
            assert not OF_STATISTICS & set(sent)
            continue
        assert set(sent) >= OF_STATISTICS
        assert (sent["effect_pct"], sent["mde_pct"]) == (primary.delta_pct, primary.mde_pct)
        assert sent["blocks"] == primary.blocks
        assert (sent["ci_low_pct"], sent["ci_high_pct"]) == (primary.ci_low_pct, primary.ci_high_pct)
        curve = [(point.step, point.value) for point in run.points if point.key == DIFFERENCE]
        assert curve == [(number, pytest.approx(d)) for number, d in enumerate(primary.differences_pct, start=1)]


def test_the_names_of_metrics_do_not_depend_on_the_arms() -> None:
    metric_names = {
        frozenset(metrics(run))
        for names in (["psiv-on"], ["psiv-on", "chunk-32"])
        for run in of_kind(list(children(some_arms(*names))), "arm").values()
        if run.tags["ablation.role"] == "variant"
    }
    assert len(metric_names) == 1
    of_ablations = [set(metrics(parent(some_arms(*names), ""))) for names in (["psiv-on"], ["psiv-on", "chunk-32"])]
    assert of_ablations[0] == of_ablations[1], "a column of the list of ablations for each"
    assert {"effect_pct", "ci_low_pct", "blocks", "variants_adopt", "baseline_tokens_per_s"} <= of_ablations[0]


def some_arms(*names: str) -> AblationView:
    return views.view(arms={name: views.EFFECTS[name] for name in ("baseline", *names)}, num_blocks=6, timed=4)


def test_the_baseline_shows_the_noise_of_its_device(view: AblationView) -> None:
    known = calibrate(KEY, noisy_blocks(8))
    noisy = Circumstances(admission=Admission(calibrations=(known,), refused_because=None))
    changed = judged(view).model_copy(update={"circumstances": noisy})
    arms = of_kind(list(children(dataclasses.replace(view, verdict=changed))), "arm")
    curve = [(p.step, p.value) for p in arms["arm/baseline"].points if p.key == DIFFERENCE]
    assert curve == [(n, percent(sample.difference)) for n, sample in enumerate(known.samples, start=1)]
    assert metrics(arms["arm/baseline"])["sd_pct"] == known.sd_pct
    run_tags = parent(dataclasses.replace(view, verdict=changed), "").tags
    assert run_tags["ablation.calibrations"] == known.digest


def test_exact_metrics_have_their_effect_too() -> None:
    view = views.view(primary="peak_allocated_gib", calibrated=False, num_blocks=6, timed=4)
    arms = of_kind(list(children(view)), "arm")
    for variant in judged(view).variants:
        if variant.exact is not None and variant.exact.seeds:
            assert metrics(arms[f"arm/{variant.arm}"])["effect_pct"] == variant.exact.seeds[0].change_pct
            assert DIFFERENCE in metrics(arms[f"arm/{variant.arm}"])


@pytest.mark.parametrize(("metric", "sign"), [("tokens_per_s", 1), ("step_s", -1), ("peak_allocated_gib", -1)])
def test_variants_are_sorted_by_how_much_better_they_are_whatever_their_metric(metric: str, sign: int) -> None:
    view = views.view(primary=metric, num_blocks=6, timed=4)
    arms = [run for run in children(view) if run.tags.get("ablation.metric")]
    assert {run.tags["ablation.metric"] for run in arms} == {metric}
    sent = [metrics(run) for run in arms if "effect_pct" in metrics(run)]
    assert len(sent) == 2
    assert [one["improvement_pct"] for one in sent] == [sign * one["effect_pct"] for one in sent]
    assert sent == sorted(sent, key=lambda one: -one["improvement_pct"]), "the best is the newest"


def test_name_and_note_begin_with_the_answer(view: AblationView) -> None:
    run = parent(view, "")
    assert run.name == "psiv-cache: adopt psiv-on +2.49\N{NO-BREAK SPACE}%; reject 2; invalid 1"
    lines = run.tags[NOTE_TAG].split("\n")
    assert lines[0].startswith("| variant | verdict | effect | ")
    assert "MDE" not in lines[0], "few columns, so that no row wraps"
    assert sum(line.startswith("| `") for line in lines[: lines.index("")]) == 4, "MLflow folds what comes later"
    assert lines[lines.index("") + 1] == f"**{view.lead}**"
    assert run.tags["ablation.variant"] == "psiv-on"
    assert metrics(run)["effect_pct"] == pytest.approx(2.49, abs=0.01)
    assert [metrics(run)[f"variants_{word}"] for word in ("adopt", "reject", "invalid")] == [1, 2, 1]
    assert view.question in run.tags[NOTE_TAG]
    assert run.tags["ablation.gates"].startswith("psiv_cache false → true (psiv-on); chunk_size 16 → 32 (chunk-32)")
    assert run.tags["ablation.verdict"].startswith("▲ better (psiv-on); ▼ worse (chunk-32)"), "MLflow cuts the end"
    alone = parent(views.view(arms={name: views.EFFECTS[name] for name in ("baseline", "psiv-on")}, num_blocks=6), "")
    assert (alone.tags["ablation.verdict"], alone.tags["ablation.gates"]) == ("▲ better", "psiv_cache false → true")
    assert run.tags["ablation.effect"].startswith("+2.49\N{NO-BREAK SPACE}% (psiv-on); ")


def test_the_parent_carries_what_it_was_made_from(view: AblationView) -> None:
    run = parent(view, "<html>")
    assert run.texts["spec.json"] == view.spec_text
    assert set(run.texts) == {"spec.json", "plan.json", "verdict.json", "report.html"}
    assert run.params["recipe"] == "hybrid-ref-h200"
    assert run.params["gate.psiv_cache"] == "false; psiv-on: true; psiv-chunk-64: true"
    assert run.params["shape.seq_len"] == "4096"
    assert "shape.chunk_size" not in run.params, "it is not the same for all arms"
    assert [one.name for one in run.datasets] == ["torch-headers"]
    assert "mlflow.source.git.commit" in run.tags


def test_nothing_that_a_gate_sets_is_there_twice_but_sizes(runs: list[RunContent]) -> None:
    for run in runs:
        gates = {name.removeprefix("gate."): value for name, value in run.params.items() if name.startswith("gate.")}
        assert all(value.isdigit() for name, value in gates.items() if f"shape.{name}" in run.params)


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (AblationState.QUEUED, "SCHEDULED"),
        (AblationState.RUNNING, "RUNNING"),
        (AblationState.CANCELLING, "RUNNING"),
        (AblationState.CANCELLED, "KILLED"),
        (AblationState.FAILED, "FAILED"),
    ],
)
def test_states_mean_what_mlflow_means(state: AblationState, status: str) -> None:
    view = views.unfinished(state, done_blocks=1)
    run, below = parent(view, None), list(children(view))
    assert (run.status, run.name) == (status, f"psiv-cache: {state}")
    is_over = state in {AblationState.CANCELLED, AblationState.FAILED}
    assert ("plan.json" in run.texts) is is_over, "its seeds are secret until their blocks are claimed"
    assert (run.ended_ms is not None) == is_over
    assert bool(below) == is_over, "trials are shown once they cannot change"
    assert "report.html" not in run.texts


def lost(view: AblationView) -> Iterator[RunContent]:
    trials = tuple(
        dataclasses.replace(trial, state=TrialState.FAILED, receipt=None, reason="timeout: 90 s (timeout 2 of 2)")
        for trial in view.trials
    )
    return trial_runs(dataclasses.replace(view, trials=trials, verdict=None))


def test_a_trial_without_a_receipt_says_why(view: AblationView) -> None:
    for run in lost(view):
        assert run.status == "FAILED"
        assert run.name.endswith(": failed")
        assert run.tags[NOTE_TAG] == "timeout: 90 s (timeout 2 of 2)"


def test_a_trial_that_did_not_measure_is_named_with_its_outcome(view: AblationView, runs: list[RunContent]) -> None:
    trials = of_kind(runs, "trial")
    for trial in view.trials:
        run, receipt = trials[f"{trial.trial_id}/{trial.attempt_id}"], trial.receipt
        assert receipt is not None
        measured = receipt.outcome is Outcome.MEASURED
        assert run.name.endswith(f": {receipt.outcome}") == (not measured)
        assert run.tags.get(NOTE_TAG) == (None if measured else receipt.message)


def test_words_without_numbers_fail_and_say_why(view: AblationView, runs: list[RunContent]) -> None:
    arms = of_kind(runs, "arm")
    for variant in judged(view).variants:
        if variant.verdict in {VerdictWord.REFUSED, VerdictWord.OOM}:
            run = arms[f"arm/{variant.arm}"]
            assert (run.name, variant.reason in run.tags[NOTE_TAG]) == (f"{variant.arm}: {variant.verdict}", True)


def test_no_metric_is_other_than_finite(runs: list[RunContent]) -> None:
    assert all(math.isfinite(point.value) for run in runs for point in run.points)

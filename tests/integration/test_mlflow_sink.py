"""The projection against a real MLflow server: idempotent, killable at every call, typed errors when it is away."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.analysis.curves import band_of
from ablate.experiments.errors import ProjectionError, ProjectionUnfinished
from ablate.experiments.outcomes import AblationState, TrialState
from ablate.experiments.reporting.mlflow import content as mlflow_content
from ablate.experiments.reporting.mlflow import runs as mlflow_runs
from ablate.experiments.reporting.mlflow import sink as mlflow_sink
from ablate.experiments.reporting.mlflow import views as mlflow_views
from ablate.experiments.reporting.mlflow.content import DONE_TAG, ID_TAG, RUN_TAG
from ablate.experiments.reporting.mlflow.sink import Sink
from ablate.experiments.reporting.pages import report
from ablate.experiments.reporting.pictures import registry
from ablate.experiments.reporting.view import AblationView
from ablate.experiments.system.setting_values import credentials_of, without_credentials
from ablate.service.http import links
from ablate.service.stack.supervisor import prepare_experiment
from tests import browser as browsers
from tests import mlflow_server, views
from tests.api_stack import nobody_url
from tests.program_receipts import plan_of, program_receipts
from tests.waiting import LIMIT_S


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server.running(tmp_path_factory.mktemp("mlflow")) as url:
        yield url


@pytest.fixture(scope="module")
def client(server: str) -> Any:
    return mlflow_sink.connect(server, timeout_s=30, max_retries=1)


@pytest.fixture(autouse=True)
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw one picture for each ablation: drawing all takes longer than sending them."""
    monkeypatch.setattr(registry, "DRAWN", registry.DRAWN[:1])


def one_block(ablation_id: str, num_trials: int = 2) -> AblationView:
    view = views.cpu_view()
    trials = tuple(trial for trial in view.trials if trial.block_index == 0)[:num_trials]
    return dataclasses.replace(view, ablation_id=ablation_id, trials=trials)


def runs_of(client: Any, ablation_id: str) -> dict[str, Any]:
    experiment = client.get_experiment_by_name("ablate")
    runs = client.search_runs([experiment.experiment_id], f"tags.`{ID_TAG}` = '{ablation_id}'", max_results=1000)
    by_identity = {run.data.tags[RUN_TAG]: run for run in runs}
    assert len(by_identity) == len(runs), "a run exists twice"
    return by_identity


def snapshot(client: Any, ablation_id: str) -> dict[str, Any]:
    """Return everything that a reader can see, without the ids that differ from one projection to the next."""
    runs = runs_of(client, ablation_id)
    parent_id = runs["parent"].info.run_id
    state: dict[str, Any] = {}
    for identity, run in runs.items():
        tags = {k: v for k, v in run.data.tags.items() if k not in {ID_TAG, DONE_TAG, "mlflow.parentRunId"}}
        run_id = run.info.run_id
        state[identity] = {
            "name": run.info.run_name,
            "tags": tags,
            "complete": DONE_TAG in run.data.tags,
            "child": run.data.tags.get("mlflow.parentRunId") == parent_id,
            "params": run.data.params,
            "metrics": run.data.metrics,
            "series": [(m.value, m.step, m.timestamp) for m in client.get_metric_history(run_id, "steps/loss")],
            "times": (run.info.status, run.info.start_time, run.info.end_time),
            "files": sorted(
                (f.path, f.file_size) for d in ("", "plots") for f in client.list_artifacts(run_id, d or None)
            ),
            "data": [(d.dataset.name, d.dataset.digest) for d in run.inputs.dataset_inputs],
        }
    return state


def _has_the_answer(parent: Any, view: Any) -> None:
    note, metrics = parent.data.tags["mlflow.note.content"], parent.data.metrics
    assert note.startswith("| variant | verdict |"), "MLflow shows the first lines unfolded"
    assert f"\n\n**{view.lead}**\n\n" in note
    best = next(one for one in view.verdict.variants if one.arm == "psiv-on")
    assert metrics["effect_pct"] == pytest.approx(best.primary.delta_pct)
    assert (metrics["variants_adopt"], metrics["variants_reject"]) == (1, 1)


def test_projecting_writes_the_answer_where_reviewers_look(
    server: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # all pictures
    arms = {name: views.EFFECTS[name] for name in ("baseline", "psiv-on", "psiv-chunk-64")}
    view = views.view(arms=arms, num_blocks=6, timed=8, val_every=4)
    html = report.render(view)
    done = Sink(server).project(view, html)

    parent = client.get_run(done.parent_run_id)
    assert parent.info.status == "FINISHED"
    assert parent.info.run_name == "psiv-cache: adopt psiv-on +2.49\N{NO-BREAK SPACE}%; reject 1"
    _has_the_answer(parent, view)
    files = {file.path for file in client.list_artifacts(done.parent_run_id)}
    assert files == {"report.html", "verdict.json", "plan.json", "spec.json", "plots"}
    assert Path(client.download_artifacts(done.parent_run_id, "report.html", str(tmp_path))).read_text() == html
    assert len(client.list_artifacts(done.parent_run_id, "plots")) == len(registry.DRAWN) - 3, (
        "nothing profiled or logged"
    )

    runs = runs_of(client, view.ablation_id)
    assert len(runs) == 1 + len(view.trials) + len(arms)
    primary = view.verdict.variants[0].primary if view.verdict else None
    assert primary is not None
    stored = runs["arm/psiv-on"].data
    assert stored.metrics["effect_pct"] == pytest.approx(primary.delta_pct)
    assert stored.metrics["ci_low_pct"] == pytest.approx(primary.ci_low_pct)
    assert stored.tags["ablation.verdict"] == "better"
    curve = client.get_metric_history(runs["arm/psiv-on"].info.run_id, "difference_pct")
    assert [(m.step, m.value) for m in curve] == list(enumerate(map(pytest.approx, primary.differences_pct), start=1))
    losses = client.get_metric_history(runs["arm/psiv-on"].info.run_id, "curve/loss_val_mean")
    band = band_of(view.whole_blocks.of("psiv-on"))
    assert [(m.step, m.value) for m in losses] == [(point.tokens, pytest.approx(point.mean)) for point in band]
    receipt = view.trials[0].receipt
    assert receipt is not None
    child = runs[f"{view.trials[0].trial_id}/{view.trials[0].attempt_id}"]
    names = {"ablation.arm", "ablation.role", "ablation.block", "ablation.order", "ablation.seed", "ablation.attempt"}
    names |= {"ablation.node_class", "ablation.spec_digest", "ablation.outcome", "mlflow.source.git.commit"}
    assert names <= set(child.data.tags)
    assert child.data.tags["mlflow.parentRunId"] == done.parent_run_id
    assert {run.info.status for run in runs.values()} == {"FINISHED", "FAILED"}
    oom = next(run for run in runs.values() if run.data.tags.get("ablation.outcome") == "oom")
    assert oom.info.status == "FAILED"
    assert oom.data.metrics["peak_reserved_gib"] > 100
    assert oom.data.params["gate.psiv_cache"] == "true"
    assert oom.data.params["shape.chunk_size"] == "64"


def test_projecting_twice_changes_and_doubles_nothing(server: str, client: Any) -> None:
    view = one_block("abl_twice")
    html = report.render(view)
    first = Sink(server).project(view, html)
    before = snapshot(client, view.ablation_id)
    second = Sink(server).project(view, html)
    assert first == second
    assert snapshot(client, view.ablation_id) == before


def test_a_late_call_of_an_earlier_leader_is_written_over(server: str, client: Any) -> None:
    view = one_block("abl_late")
    html = report.render(view)
    done = Sink(server).project(view, html)
    before = snapshot(client, view.ablation_id)
    client.update_run(done.parent_run_id, status="RUNNING", name="it still runs")
    client.set_tag(done.parent_run_id, "ablation.state", "running")
    tags = {ID_TAG: view.ablation_id, RUN_TAG: "parent"}
    client.create_run(done.experiment_id, tags=tags)
    Sink(server).project(view, html, was_tried=True)
    assert snapshot(client, view.ablation_id) == before


def test_rebuilt_after_everything_was_lost_every_run_is_the_same(server: str, client: Any) -> None:
    view = one_block("abl_rebuilt")
    html = report.render(view)
    Sink(server).project(view, html)
    before = snapshot(client, view.ablation_id)
    for run in runs_of(client, view.ablation_id).values():
        client.delete_run(run.info.run_id)
    Sink(server).project(view, html)
    assert snapshot(client, view.ablation_id) == before


class Killed(BaseException):
    """The process ended here."""


class Mortal:
    """A client whose process dies right after its n-th call took effect, before the answer is seen."""

    def __init__(self, client: Any, calls: int) -> None:
        self._client = client
        self._left = calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = getattr(self._client, name)(*args, **kwargs)
            self._left -= 1
            if self._left == 0:
                raise Killed
            return answer

        return call


def test_killed_after_any_call_the_next_projection_finishes_the_same_state(
    server: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    html = report.render(one_block("abl_clean", 1))
    drawn = dict(list(mlflow_runs.plots(one_block("abl_clean", 1)).items())[:1])
    monkeypatch.setattr(mlflow_runs, "plots", lambda view: drawn)  # the same for every id, so drawn once
    every = mlflow_runs.children
    monkeypatch.setattr(mlflow_runs, "children", lambda view: list(every(view))[:1])
    Sink(server).project(one_block("abl_clean", 1), html)
    clean = snapshot(client, "abl_clean")
    assert len(clean) == 2, "the parent and a trial"
    kills = 0
    while True:
        view = one_block(f"abl_killed_{kills}", 1)
        with monkeypatch.context() as patch:
            patch.setattr(mlflow_sink, "connect", lambda *a, n=kills + 1, **k: Mortal(client, n))
            try:
                Sink(server).project(view, html)
                break
            except Killed:
                kills += 1
        Sink(server).project(view, html)
        assert snapshot(client, view.ablation_id) == clean, f"killed after call {kills}"
    assert kills > 15


def test_a_run_created_twice_is_mended(server: str, client: Any) -> None:
    view = one_block("abl_doubled")
    html = report.render(view)
    done = Sink(server).project(view, html)
    before = snapshot(client, view.ablation_id)
    for identity in before:
        client.create_run(done.experiment_id, tags={ID_TAG: view.ablation_id, RUN_TAG: identity})
    Sink(server).project(view, html)
    assert snapshot(client, view.ablation_id) == before


def test_an_ablation_that_grows_ends_as_if_projected_once(server: str, client: Any) -> None:
    whole = one_block("abl_grows")
    started = dataclasses.replace(
        whole,
        state=AblationState.RUNNING,
        verdict=None,
        trials=(whole.trials[0], dataclasses.replace(whole.trials[1], state=TrialState.RUNNING, receipt=None)),
    )
    waits = dataclasses.replace(started, state=AblationState.QUEUED)
    for view in (waits, started):
        Sink(server).project(view, None)
    runs = runs_of(client, whole.ablation_id)
    assert (runs["parent"].info.status, runs["parent"].info.run_name) == ("RUNNING", "psiv-cache: running")
    assert len(runs) == 1
    Sink(server).project(whole, report.render(whole))
    once = dataclasses.replace(whole, ablation_id="abl_once")
    Sink(server).project(once, report.render(once))
    grown, whole_runs = snapshot(client, whole.ablation_id), snapshot(client, once.ablation_id)
    for state in (grown["parent"], whole_runs["parent"]):
        state.pop("files")  # the report states the id
    assert grown == whole_runs


def test_a_superseded_attempt_disappears(server: str, client: Any) -> None:
    view = one_block("abl_retried")
    html = report.render(view)
    Sink(server).project(view, html)
    again = tuple(dataclasses.replace(trial, attempt_id="att_second") for trial in view.trials)
    Sink(server).project(dataclasses.replace(view, trials=again), html)
    expected = {"parent", "arm/baseline", "arm/psiv-on"} | {f"{t.trial_id}/att_second" for t in again}
    assert set(runs_of(client, view.ablation_id)) == expected


@pytest.mark.parametrize(("state", "status"), [("cancelled", "KILLED"), ("failed", "FAILED"), ("queued", "SCHEDULED")])
def test_every_state_has_its_run_status(server: str, client: Any, state: str, status: str) -> None:
    view = one_block(f"abl_{state}")
    trials = tuple(dataclasses.replace(trial, state=TrialState(state), receipt=None) for trial in view.trials)
    view = dataclasses.replace(view, state=AblationState(state), verdict=None, trials=trials)
    Sink(server).project(view, report.render(view))
    runs = runs_of(client, view.ablation_id)
    assert {run.info.status for run in runs.values()} == {status}
    assert len(runs) == (1 if state == "queued" else 3)


def test_long_series_are_sent_in_batches_of_at_most_500(
    server: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {name: views.EFFECTS[name] for name in ("baseline", "psiv-on")}
    whole = views.view(arms=arms, num_blocks=6, timed=300)
    cut = views.first_blocks(whole, 1, state=AblationState.CANCELLED)
    view = dataclasses.replace(cut, ablation_id="abl_long", trials=cut.trials[:1])
    sizes: list[int] = []

    class Watching(Mortal):
        def log_batch(self, run_id: str, **entries: Any) -> None:
            sizes.append(len(entries.get("metrics", ())))
            client.log_batch(run_id, **entries)

    with monkeypatch.context() as patch:
        patch.setattr(mlflow_sink, "connect", lambda *a, **k: Watching(client, 10**9))
        Sink(server).project(view, report.render(view))
    assert max(sizes) == 500
    child = next(run for run in runs_of(client, view.ablation_id).values() if "ablation.trial" in run.data.tags)
    assert len(client.get_metric_history(child.info.run_id, "steps/loss")) == 304


def test_saved_views_are_seeded_and_stay_as_people_left_them(server: str, client: Any) -> None:
    experiment_id = client.create_experiment("views", tags={f"{mlflow_views.PREFIX}variants": "mine"})
    view = dataclasses.replace(one_block("abl_views"), state=AblationState.QUEUED, verdict=None)
    Sink(server, experiment="views").project(view, None)
    tags = client.get_experiment(experiment_id).tags
    assert tags[f"{mlflow_views.PREFIX}variants"] == "mine"
    saved = json.loads(tags[f"{mlflow_views.PREFIX}ablations"])
    assert saved["name"] == "Ablations"
    query = json.loads(saved["state"])["searchFilter"]
    assert [run.data.tags[RUN_TAG] for run in client.search_runs([experiment_id], query)] == ["parent"]


@pytest.mark.parametrize("by", ["projector", "supervisor"])
def test_a_view_of_an_older_seed_is_brought_up_to_date_unless_a_person_changed_it(
    server: str, client: Any, by: str
) -> None:
    views_of_us = mlflow_views.experiment_tags()
    ours, theirs = (f"{mlflow_views.PREFIX}{name}" for name in ("ablations", "variants"))
    older, saved = ({**json.loads(views_of_us[key]), "state": '{"selectedColumns": []}'} for key in (ours, theirs))
    for number, change in enumerate(({"updatedAt": 1_799_000_000_000}, {"name": "Mine"}, {"createdAt": 7})):
        name = f"older-{by}-{number}"
        tags = {ours: json.dumps(older), theirs: json.dumps({**saved, **change}), f"{mlflow_views.PREFIX}own": "{}"}
        made = client.create_experiment(name, tags=tags)
        if by == "projector":
            view = dataclasses.replace(one_block(f"abl_{name}"), state=AblationState.QUEUED, verdict=None)
            Sink(server, experiment=name).project(view, None)
        else:
            assert prepare_experiment(server, name) == made
        stored = client.get_experiment(made).tags
        assert stored[ours] == views_of_us[ours]
        assert (stored[theirs], stored[f"{mlflow_views.PREFIX}own"]) == (tags[theirs], "{}")


def test_the_experiment_is_made_with_its_views_before_there_is_an_ablation(server: str, client: Any) -> None:
    with ThreadPoolExecutor(4) as many:
        (made,) = set(many.map(lambda _: prepare_experiment(server, "early"), range(4)))
    tags = client.get_experiment(made).tags
    assert mlflow_views.experiment_tags().items() <= tags.items()
    assert Sink(server, experiment="early").project(one_block("abl_early"), "").experiment_id == made
    client.delete_experiment(made)
    assert prepare_experiment(server, "early") is None


@pytest.mark.browser
def test_reviewers_see_ablations_alone_each_with_its_answer(server: str) -> None:
    view = dataclasses.replace(
        one_block("abl_seen"), name="psiv-cache-with-a-name-as-long-as-a-spec-allows-it-to-be-63-sig"
    )
    name = mlflow_content.ablation_name(view)
    done = Sink(server, experiment="seen").project(view, report.render(view))
    with browsers.chromium() as browser:
        user, password = credentials_of(server) or ("", "")
        account: Any = {"username": user, "password": password}
        page = browser.new_page(viewport={"width": 1440, "height": 900}, http_credentials=account)
        page.set_default_timeout(1000 * LIMIT_S)
        page.goto(links.of_ablations(without_credentials(server), done.experiment_id))
        page.get_by_text(name).wait_for()
        names = page.locator("[role=gridcell][col-id='attributes.`Run Name`'] a")
        assert names.all_text_contents() == [name]
        assert view.answer is not None
        (variant,) = view.answer.variants
        edge = "one.closest('[role=rowgroup]').parentElement.getBoundingClientRect().right"
        in_view = f"one => one.getBoundingClientRect().right <= {edge}"
        for column, text in {"verdict": str(variant.word), "effect": variant.effect.text}.items():
            cell = page.locator(f"[role=gridcell][col-id='tags.`ablation.{column}`']")
            assert cell.inner_text() == text
            assert cell.evaluate(in_view), "beside MLflow's assistant"
        names.click()
        page.get_by_text(view.lead, exact=True).wait_for()
        heading = page.get_by_role("heading").filter(has_text=name)
        lines = "one => one.getBoundingClientRect().height / parseFloat(getComputedStyle(one).lineHeight)"
        assert heading.evaluate(lines) < 2, "one line"


def test_a_deleted_experiment_is_named(server: str, client: Any) -> None:
    client.delete_experiment(client.create_experiment("gone"))
    view = one_block("abl_gone")
    with pytest.raises(ProjectionError, match="'gone' was deleted"):
        Sink(server, experiment="gone").project(view, report.render(view))


def test_mlflow_away_is_a_typed_error() -> None:
    view = one_block("abl_away")
    with pytest.raises(ProjectionError, match=r"MLflow at http://127\.0\.0\.1"):
        Sink(nobody_url(), timeout_s=2).project(view, report.render(view))


def test_a_projection_in_slices_ends_as_one_at_once_does(server: str, client: Any) -> None:
    whole, sliced = one_block("abl_at_once"), one_block("abl_in_slices")
    html = report.render(whole)
    Sink(server).project(whole, html)
    rounds = 0
    while True:
        rounds += 1
        try:
            Sink(server).project(sliced, html, slice_s=0.0)
            break
        except ProjectionUnfinished:
            assert len(runs_of(client, "abl_in_slices")) == 1 + rounds, "a parent and one child more each time"
    assert rounds == len(list(mlflow_runs.children(sliced)))
    assert snapshot(client, "abl_in_slices") == snapshot(client, "abl_at_once")


NAMES = (
    "val/AR@100",
    "top-5 acc, %",
    "gr\u00f6\u00dfe_\u00b5",
    "",
    "..",
    "../../x",
    "a//b",
    "/x",
    "new\nline",
    "VAL",
    "wall_s",
)


def test_whatever_a_program_calls_its_results_and_variables_is_projected(server: str, client: Any) -> None:
    many = {f"class_{number:04}/AP@[0.5, 0.95]": number / 7 for number in range(5_000)}
    long = {"x" * 249 + end: float(end) for end in "12"}
    reported = {"val_bpb": 1.0, **{name: float(place) for place, name in enumerate(NAMES)}, **many, **long}
    spec, plan = plan_of(
        workload__env={f"VARIABLE_{number}_{'N' * 90}": "v" * 500 for number in range(64)},
        workload__command=["python", "train.py", *(["\u00fc" * 4000] * 15)],
        variants__fused={"env": {f"OTHER_{number}": "w" for number in range(64)}},
        workload__metrics={"val_bpb": {"better": "lower"}, "wall_s": {"better": "lower"}},
    )
    values = {(block.index, arm): reported for block in plan.blocks for arm in block.order}
    view = views.judged_view(spec, plan, program_receipts(plan, values))
    view = dataclasses.replace(view, ablation_id="abl_names", trials=view.trials[:1])
    html = report.render(view)
    assert all(name in html for name in ("val/AR@100", "class_4999/AP@[0.5, 0.95]", long.popitem()[0]))
    Sink(server).project(view, html)
    trial = view.trials[0]
    stored = runs_of(client, "abl_names")[f"{trial.trial_id}/{trial.attempt_id}"].data
    kept = {name: stored.metrics[mlflow_content.reported_key(name)] for name in reported if name != "val_bpb"}
    assert kept == {name: value for name, value in reported.items() if name != "val_bpb"}
    assert stored.metrics["val_bpb"] == 1.0
    assert len([name for name in stored.params if "VARIABLE" in name or "OTHER" in name]) > 190

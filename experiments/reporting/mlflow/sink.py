"""Write an ablation into MLflow: the only module that imports mlflow.

MLflow is a projection. Every run is looked up by its tags before it is created, the last call on a run is the tag that
says it is complete, and what a killed projection left half done is finished by the next one.
"""

import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from experiments.errors import ProjectionError, ProjectionUnfinished
from experiments.reporting.mlflow import runs, views
from experiments.reporting.mlflow.content import DONE_TAG, ID_TAG, RUN_TAG, RunContent, RunDataset
from experiments.reporting.mlflow.parent import PARENT, parent
from experiments.reporting.view import AblationView

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

METRICS_PER_CALL = 500
RUNS_PER_PAGE = 1000
LONGEST_DATASET_DIGEST = 36

Check = Callable[[], None]
"""Called before every call to MLflow: raises when it may not be made any more."""


def _allow() -> None:
    """Let every call be made."""


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Where an ablation is in MLflow."""

    parent_run_id: str
    experiment_id: str


@dataclass(frozen=True)
class Sink:
    """Writes ablations into one experiment of one MLflow server."""

    tracking_uri: str
    """HTTP address of the server; the database behind it is opened by the server alone."""
    experiment: str = "ablate"
    timeout_s: int = 10
    """Of one HTTP call."""
    max_retries: int = 1
    """Of one HTTP call, in the SDK; repeating the whole projection is the caller's part."""

    def project(
        self,
        view: AblationView,
        report_html: str | None,
        *,
        slice_s: float = math.inf,
        check: Check = _allow,
        was_tried: bool = False,
    ) -> Projection:
        """Bring MLflow to the state of `view`; repeating it changes nothing, and it may be killed at any point.

        After `slice_s` no further run is begun: what is missing is written by the next call. What `check` raises is
        passed on. When it `was_tried`, a call of that try may have come late, and the parent, which alone changes with
        time, is written again although it is marked as complete.

        Raises:
            ProjectionError: MLflow cannot be reached or refuses.
            ProjectionUnfinished: the time was over.

        """
        until = time.monotonic() + slice_s
        made = connect(self.tracking_uri, timeout_s=self.timeout_s, max_retries=self.max_retries)
        client = cast("MlflowClient", _Checked(made, check))
        from mlflow.exceptions import MlflowException

        try:
            writer = _Writer(client, _experiment_id(client, self.experiment), view, until=until)
            return writer.write(report_html, was_tried=was_tried)
        except (MlflowException, OSError) as error:
            raise ProjectionError(f"MLflow at {self.tracking_uri}: {error}{_hint(error)}") from error


def connect(tracking_uri: str, *, timeout_s: int, max_retries: int) -> "MlflowClient":
    """Return a client that sends no telemetry, prints nothing and gives up after seconds instead of minutes.

    The SDK takes these settings from the process environment alone, so they are written there, before the import that
    reads the first of them. Nothing is read from the environment here.
    """
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(timeout_s)
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = str(max_retries)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri)


class _Checked:
    """A client that asks before every call whether it may be made."""

    def __init__(self, client: "MlflowClient", check: Check) -> None:
        self._client = client
        self._check = check

    def __getattr__(self, name: str) -> Any:
        self._check()
        return getattr(self._client, name)


def _hint(error: Exception) -> str:
    return " (start its server with --allowed-hosts for this name)" if "Invalid Host header" in str(error) else ""


def _experiment_id(client: "MlflowClient", name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, tags=views.experiment_tags()))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)
    if found is None or found.lifecycle_stage != "active":
        raise ProjectionError(f"MLflow experiment {name!r} was deleted; restore it there or choose another name")
    _seed(client, found)
    return str(found.experiment_id)


def _seed(client: "MlflowClient", experiment: "Experiment") -> None:
    """Give an experiment the tags that it lacks and today's views; those that somebody changed there stay."""
    for key, value in views.tags_to_set(experiment.tags).items():
        client.set_experiment_tag(experiment.experiment_id, key, value)


class _Writer:
    """One projection of one view."""

    def __init__(self, client: "MlflowClient", experiment_id: str, view: AblationView, *, until: float) -> None:
        self._client = client
        self._until = until
        self._written = 0
        self._created = 0
        self._experiment_id = experiment_id
        self._view = view

    def write(self, report_html: str | None, *, was_tried: bool) -> Projection:
        """Write the children, then the parent, whose completion says that everything is there."""
        known = self._known_runs()
        top = parent(self._view, report_html)
        parent_run = known.pop(PARENT, None)
        parent_id = parent_run.info.run_id if parent_run else self._create(top, parent_id=None)
        names = {PARENT}
        for child in runs.children(self._view):
            self._write_child(child, known.pop(child.identity, None), parent_id)
            names.add(child.identity)
        if was_tried or not _is_complete(parent_run, top):
            self._rename(parent_run, top)
            self._fill(parent_id, top, {**top.texts, **runs.plots(self._view)})
        self._delete_others(self._known_runs() if self._created else known, names)
        return Projection(parent_run_id=parent_id, experiment_id=self._experiment_id)

    def _delete_others(self, known: "Mapping[str, Run]", names: Collection[str]) -> None:
        """Delete superseded runs, and what a projector that died meanwhile created late."""
        for identity, run in known.items():
            if identity not in names:
                self._client.delete_run(run.info.run_id)

    def _known_runs(self) -> dict[str, "Run"]:
        """Return this ablation's runs by identity; a run that exists twice, because an answer got lost, is mended."""
        known: dict[str, Run] = {}
        token: str | None = None
        while True:
            page = self._client.search_runs(
                [self._experiment_id],
                filter_string=f"tags.`{ID_TAG}` = '{self._view.ablation_id}'",
                max_results=RUNS_PER_PAGE,
                page_token=token,
            )
            for run in page:
                identity = run.data.tags.get(RUN_TAG)
                if identity in known:
                    keep, drop = sorted([known[identity], run], key=_keep_first)
                    self._client.delete_run(drop.info.run_id)
                    known[identity] = keep
                elif identity is not None:
                    known[identity] = run
            token = page.token
            if not token:
                return known

    def _write_child(self, child: RunContent, run: "Run | None", parent_id: str) -> None:
        if _is_complete(run, child) and run is not None and run.data.tags.get("mlflow.parentRunId") == parent_id:
            return
        self._check_time()
        run_id = run.info.run_id if run else self._create(child, parent_id=parent_id)
        self._rename(run, child)
        if run is not None and run.data.tags.get("mlflow.parentRunId") != parent_id:
            self._client.set_tag(run_id, "mlflow.parentRunId", parent_id)
        self._fill(run_id, child, child.texts)
        self._written += 1

    def _check_time(self) -> None:
        """Stop between two runs once the time is over; every call writes one at least."""
        if self._written and time.monotonic() > self._until:
            raise ProjectionUnfinished(f"{self._written} runs were written in this round")

    def _create(self, content: RunContent, *, parent_id: str | None) -> str:
        """Create the run together with the tags that it is found by."""
        tags = {ID_TAG: self._view.ablation_id, RUN_TAG: content.identity, "mlflow.user": "ablate"}
        if parent_id is not None:
            tags["mlflow.parentRunId"] = parent_id
        run = self._client.create_run(
            self._experiment_id, start_time=content.started_ms, tags=tags, run_name=content.name
        )
        self._created += 1
        return str(run.info.run_id)

    def _rename(self, run: "Run | None", content: RunContent) -> None:
        """Give a run that was there before its present name; a new one is created with it."""
        if run is not None and run.info.run_name != content.name:
            self._client.update_run(run.info.run_id, name=content.name)

    def _fill(self, run_id: str, content: RunContent, texts: Mapping[str, str]) -> None:
        """Write everything into the run, every call repeatable, and mark it complete last."""
        from mlflow.entities import Metric, Param, RunTag

        self._client.log_batch(
            run_id,
            params=[Param(key, value) for key, value in content.params.items()],
            tags=[RunTag(key, value) for key, value in content.tags.items()],
        )
        metrics = [Metric(point.key, point.value, point.at_ms, point.step) for point in content.points]
        for start in range(0, len(metrics), METRICS_PER_CALL):
            self._client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_CALL])
        if content.datasets:
            self._client.log_inputs(run_id, [_dataset(one) for one in content.datasets])
        for path, text in texts.items():
            self._client.log_text(run_id, text, path)
        if content.ended_ms is None:
            self._client.update_run(run_id, status=content.status)
        else:
            self._client.set_terminated(run_id, status=content.status, end_time=content.ended_ms)
        self._client.set_tag(run_id, DONE_TAG, content.digest)


def _is_complete(run: "Run | None", content: RunContent) -> bool:
    return run is not None and run.data.tags.get(DONE_TAG) == content.digest


def _keep_first(run: "Run") -> tuple[bool, str]:
    """Sort key: a completed run before another, then by id."""
    return DONE_TAG not in run.data.tags, run.info.run_id


def _dataset(trained_on: RunDataset) -> Any:
    from mlflow.entities import Dataset, DatasetInput

    short = trained_on.digest.removeprefix("sha256:")[:LONGEST_DATASET_DIGEST]
    source = json.dumps({"digest": trained_on.digest})
    entity = Dataset(name=trained_on.name, digest=short, source_type="digest", source=source)
    return DatasetInput(dataset=entity, tags=[])

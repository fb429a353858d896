"""Write an ablation into MLflow: the only module that imports mlflow.

MLflow is a projection. The sink looks up every run by its tags before it creates one. Its last call on a run sets the
tag that marks the run complete, so the next projection finishes the work of a killed one.
"""

import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ablate.experiments.errors import BadSetting, ProjectionError, ProjectionUnfinished
from ablate.experiments.reporting.mlflow import runs, views
from ablate.experiments.reporting.mlflow.content import DONE_TAG, ID_TAG, RUN_TAG, RunContent, RunDataset
from ablate.experiments.reporting.mlflow.parent import PARENT, parent
from ablate.experiments.reporting.view import AblationView
from ablate.experiments.system.http_clients import apply_proxy_rule, authorities, reason
from ablate.experiments.system.setting_values import credentials_of, without_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

METRICS_PER_CALL = 500
PAIRS_PER_CALL, LETTERS_PER_CALL = 100, 150_000
"""Most parameters or tags of a call, and letters in them: MLflow rejects more than 1,000,000 bytes."""
RUNS_PER_PAGE = 1000
LONGEST_DATASET_DIGEST = 36

Check = Callable[[], None]
"""Called before every call to MLflow; raises to stop the projection."""


def _allow() -> None:
    """Allow every call."""


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Where an ablation is in MLflow."""

    parent_run_id: str
    experiment_id: str


@dataclass(frozen=True)
class Sink:
    """Writes ablations into one experiment of one MLflow server."""

    tracking_uri: str
    """HTTP address of the server; only the server opens its database."""
    experiment: str = "ablate"
    timeout_s: int = 10
    """Timeout of one HTTP call."""
    max_retries: int = 1
    """Retries of one HTTP call in the SDK; the caller repeats the whole projection."""

    def project(
        self,
        view: AblationView,
        report_html: str | None,
        *,
        slice_s: float = math.inf,
        check: Check = _allow,
        was_tried: bool = False,
    ) -> Projection:
        """Bring MLflow to the state of `view`; the call is idempotent and may be killed at any point.

        Args:
            view: the ablation.
            report_html: its report; None while it is running.
            slice_s: seconds after which no further run is begun; the next call writes the rest.
            check: called before every call to MLflow; its exceptions pass through.
            was_tried: whether an earlier try may still have calls under way. The parent, the only run that changes
                with time, is then written again even if it is marked complete.

        Raises:
            ProjectionError: MLflow is unreachable or rejects a call.
            ProjectionUnfinished: `slice_s` is over.

        """
        until = time.monotonic() + slice_s
        try:
            unchecked = connect(self.tracking_uri, timeout_s=self.timeout_s, max_retries=self.max_retries)
        except BadSetting as error:
            raise ProjectionError(str(error)) from error
        client = cast("MlflowClient", _Checked(unchecked, check))
        from mlflow.exceptions import MlflowException

        try:
            writer = _Writer(client, _experiment_id(client, self.experiment), view, until=until)
            return writer.write(report_html, was_tried=was_tried)
        except (MlflowException, OSError) as error:
            address = without_credentials(self.tracking_uri)
            raise ProjectionError(f"MLflow at {address}: {_words(error, address)}") from error


def connect(tracking_uri: str, *, timeout_s: int, max_retries: int) -> "MlflowClient":
    """Return a client that sends no telemetry, prints nothing and gives up after seconds instead of minutes.

    The SDK reads these settings only from the process environment, so they are set there before its import. User name
    and password of the address go there too: the SDK's errors contain the address. Raises BadSetting.
    """
    address, credentials = without_credentials(tracking_uri), credentials_of(tracking_uri)
    apply_proxy_rule(address)
    os.environ["MLFLOW_TRACKING_SERVER_CERT_PATH"] = str(authorities())
    if credentials is not None:
        os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"] = credentials
    os.environ["MLFLOW_ALLOW_HTTP_REDIRECTS"] = "false"
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(timeout_s)
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = str(max_retries)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=address)


class _Checked:
    """A client that calls `check` before every call."""

    def __init__(self, client: "MlflowClient", check: Check) -> None:
        self._client = client
        self._check = check

    def __getattr__(self, name: str) -> Any:
        self._check()
        return getattr(self._client, name)


def _words(error: Exception, address: str) -> str:
    """Return why a call failed: the reason of a broken connection, or the server's answer."""
    hint = " (start its server with --allowed-hosts for this name)" if "Invalid Host header" in str(error) else ""
    broken = "Max retries exceeded" in str(error) or isinstance(error, OSError)
    return reason(error, address) if broken else f"{error}{hint}"


def _experiment_id(client: "MlflowClient", name: str) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name, tags=views.experiment_tags()))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)
    if experiment is None or experiment.lifecycle_stage != "active":
        raise ProjectionError(f"MLflow experiment {name!r} was deleted; restore it there or choose another name")
    _seed(client, experiment)
    return str(experiment.experiment_id)


def _seed(client: "MlflowClient", experiment: "Experiment") -> None:
    """Add missing tags and update the saved views, except those that a person changed in MLflow."""
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
        """Write the children, then the parent; a complete parent means that all runs are there."""
        stored = self._stored_runs()
        top = parent(self._view, report_html)
        parent_run = stored.pop(PARENT, None)
        parent_id = parent_run.info.run_id if parent_run else self._create(top, parent_id=None)
        names = {PARENT}
        for child in runs.children(self._view):
            self._write_child(child, stored.pop(child.identity, None), parent_id)
            names.add(child.identity)
        if was_tried or not _is_complete(parent_run, top):
            self._rename(parent_run, top)
            self._fill(parent_id, top, {**top.texts, **runs.plots(self._view)})
        self._delete_others(self._stored_runs() if self._created else stored, names)
        return Projection(parent_run_id=parent_id, experiment_id=self._experiment_id)

    def _delete_others(self, stored: "Mapping[str, Run]", names: Collection[str]) -> None:
        """Delete superseded runs, and late runs of a projector that died meanwhile."""
        for identity, run in stored.items():
            if identity not in names:
                self._client.delete_run(run.info.run_id)

    def _stored_runs(self) -> dict[str, "Run"]:
        """Return this ablation's runs in MLflow by identity; delete duplicates, which a lost response can cause."""
        stored: dict[str, Run] = {}
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
                if identity in stored:
                    keep, drop = sorted([stored[identity], run], key=_keep_first)
                    self._client.delete_run(drop.info.run_id)
                    stored[identity] = keep
                elif identity is not None:
                    stored[identity] = run
            token = page.token
            if not token:
                return stored

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
        """Stop between two runs once the time is over; every call writes at least one run."""
        if self._written and time.monotonic() > self._until:
            raise ProjectionUnfinished(f"{self._written} runs were written in this round")

    def _create(self, content: RunContent, *, parent_id: str | None) -> str:
        """Create the run with the tags that identify it."""
        tags = {ID_TAG: self._view.ablation_id, RUN_TAG: content.identity, "mlflow.user": "ablate"}
        if parent_id is not None:
            tags["mlflow.parentRunId"] = parent_id
        run = self._client.create_run(
            self._experiment_id, start_time=content.started_ms, tags=tags, run_name=content.name
        )
        self._created += 1
        return str(run.info.run_id)

    def _rename(self, run: "Run | None", content: RunContent) -> None:
        """Update the name of an existing run; a new run is created with its name."""
        if run is not None and run.info.run_name != content.name:
            self._client.update_run(run.info.run_id, name=content.name)

    def _fill(self, run_id: str, content: RunContent, texts: Mapping[str, str]) -> None:
        """Write the content by idempotent calls, and mark the run complete last."""
        from mlflow.entities import Metric, Param, RunTag

        for params in _in_calls(content.params):
            self._client.log_batch(run_id, params=[Param(*pair) for pair in params])
        for tags in _in_calls(content.tags):
            self._client.log_batch(run_id, tags=[RunTag(*pair) for pair in tags])
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


def _in_calls(values: Mapping[str, str]) -> Iterator[list[tuple[str, str]]]:
    """Yield the pairs of a mapping in portions that MLflow takes."""
    portion: list[tuple[str, str]] = []
    room = LETTERS_PER_CALL
    for key, value in values.items():
        room -= len(key) + len(value)
        if portion and (room < 0 or len(portion) == PAIRS_PER_CALL):
            yield portion
            portion, room = [], LETTERS_PER_CALL - len(key) - len(value)
        portion.append((key, value))
    if portion:
        yield portion


def _is_complete(run: "Run | None", content: RunContent) -> bool:
    return run is not None and run.data.tags.get(DONE_TAG) == content.digest


def _keep_first(run: "Run") -> tuple[bool, str]:
    """Sort key: completed runs first, then by id."""
    return DONE_TAG not in run.data.tags, run.info.run_id


def _dataset(trained_on: RunDataset) -> Any:
    from mlflow.entities import Dataset, DatasetInput

    short = trained_on.digest.removeprefix("sha256:")[:LONGEST_DATASET_DIGEST]
    source = json.dumps({"digest": trained_on.digest})
    entity = Dataset(name=trained_on.name, digest=short, source_type="digest", source=source)
    return DatasetInput(dataset=entity, tags=[])

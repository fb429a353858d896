"""MLflow's pages for the documentation, of a few ablations: the list, an ablation, its variants beside the noise."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, Page

from ablate.experiments.analysis.noise.calibrate import calibrate
from ablate.experiments.outcomes import AblationState
from ablate.experiments.records.circumstances import Admission, Circumstances
from ablate.experiments.reporting.mlflow.sink import Projection, Sink
from ablate.experiments.reporting.mlflow.views import VARIANTS
from ablate.experiments.reporting.pages import report
from ablate.experiments.reporting.view import AblationView
from ablate.experiments.system.setting_values import credentials_of, without_credentials
from ablate.service.http import links
from tests import mlflow_server, views
from tests.calibrations import KEY, noisy_blocks

SIZE = (1600, 640)
PATIENCE_MS = 120_000
SETTLED_MS = 6000
"""MLflow draws its charts some time after their frames."""


def pages_of_mlflow(browser: Browser, folder: Path, save: Callable[[Page, str], Path]) -> None:
    """Take MLflow's pages as reviewers open them."""
    with mlflow_server.running(folder) as url:
        judged = _fill(url)
        experiment, run = judged.experiment_id, judged.parent_run_id
        variants = links.of_view(url, experiment, VARIANTS)
        shots = {
            "mlflow-list": (links.of_ablations(url, experiment), "tma-off: running"),
            "mlflow-ablation": (links.of_run(url, experiment, run), "Child runs"),
            "mlflow-compare": (f"{variants}&compareRunsMode=CHART", "Model metrics"),
        }
        for name, (address, seen) in shots.items():
            save(_page(browser, address, seen), name)


def _page(browser: Browser, address: str, seen: str) -> Page:
    user, password = credentials_of(address) or ("", "")
    page = browser.new_page(
        viewport={"width": SIZE[0], "height": SIZE[1]}, http_credentials={"username": user, "password": password}
    )
    page.set_default_timeout(PATIENCE_MS)
    page.goto(without_credentials(address))
    page.get_by_text(seen).first.wait_for()
    close = page.get_by_role("button", name="Close").first  # of a panel that MLflow opens beside everything
    if close.is_visible():
        close.click()
    charts = page.get_by_placeholder("Search metric charts")
    if charts.is_visible():
        charts.fill("difference_pct")
    page.wait_for_timeout(SETTLED_MS)
    return page


def _fill(url: str) -> Projection:
    """Show ablations in every state; return where the one with an answer is."""
    waiting = {"remat": AblationState.QUEUED, "tma-off": AblationState.RUNNING}
    for name, state in waiting.items():
        Sink(url).project(_named(views.unfinished(state), name), None)
    undecided = _named(views.cpu_view(), "psiv-on-cpu")
    Sink(url).project(undecided, report.render(undecided))
    judged = _named(_calibrated(views.view(num_blocks=10, timed=4)), "psiv-cache")
    return Sink(url).project(judged, report.render(judged))


def _named(view: AblationView, name: str) -> AblationView:
    return dataclasses.replace(view, ablation_id=f"abl_{name}", name=name)


def _calibrated(view: AblationView) -> AblationView:
    """Let the verdict cite A/A blocks as quiet as the view's own trials."""
    if view.verdict is None:
        raise AssertionError("an ablation that is over has a verdict")
    noise = calibrate(KEY, noisy_blocks(10, sd=0.005))
    known = Circumstances(admission=Admission(calibrations=(noise,), refused_because=None))
    return dataclasses.replace(view, verdict=view.verdict.model_copy(update={"circumstances": known}))

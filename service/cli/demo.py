"""`ablate demo`: the whole main path on this machine, with the real parts, ending in a verdict."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.markup import escape

from experiments.analysis.verdicts import Verdict
from experiments.outcomes import AblationState
from service.cli import show_verdict
from service.cli.output import err, problem_lines
from service.cli.spec_argument import read_spec
from service.cli.watch import follow
from service.client.api import Client, Refused
from service.errors import StackError
from service.schemas.ablations import AblationPublic
from service.stack import control
from service.stack.layout import StackFiles
from service.stack.state import StackState
from service.stack.supervisor import Report

_PROJECTION_PATIENCE_S = 180.0


class DemoFailed(StackError):
    """The demo did not end as it must."""


class DemoSummary(BaseModel):
    """What the demo did."""

    model_config = ConfigDict(frozen=True)

    ablation: str
    verdict: Verdict
    refused_spec: tuple[str, ...]
    """Pointers of the problems in the spec that has to be refused."""
    report: Path
    mlflow_url: str
    stack_s: float
    """Seconds until the stack was ready, 0 when one ran."""
    ablation_s: float
    """Seconds from the submission to the verdict."""
    total_s: float


def run_demo(files: StackFiles, report: Report) -> DemoSummary:
    """Run the demo, on the stack of this home or on one that ends with it.

    Progress goes to standard error. Raises DemoFailed when anything is not as it must be.
    """
    began = time.monotonic()
    with _stack(files, report) as (state, own):
        stack_s = time.monotonic() - began
        with Client() as client:
            summary = _act(client, files, stack_s=stack_s if own else 0.0, began=began)
        _say_where(summary, state, own)
    return summary


@contextmanager
def _stack(files: StackFiles, report: Report) -> Iterator[tuple[StackState, bool]]:
    """Give the running stack, or start one and stop it in the end, whatever happens."""
    state = control.running(files)
    if state is not None and state.phase == "ready":
        err().print(f"using the stack that runs here: {state.api_url}")
        yield state, False
        return
    err().print("starting broker, MLflow, API, background process and a CPU worker (ablate up)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the stack is stopped then, too
    try:
        yield control.start(files, report), True
    finally:
        done = control.stop(files, report)
        err().print(f"stack stopped in {done.seconds:.1f} s, no process is left")


def _act(client: Client, files: StackFiles, *, stack_s: float, began: float) -> DemoSummary:
    console = err()
    console.print("\n[bold]1. One ablation: four arms, four blocks, sixteen fresh processes[/]  (ablate run demo)")
    submitted_at = time.monotonic()
    accepted = client.ablations.submit(read_spec("demo"))
    try:
        row = follow(client, accepted.id, console)
    except BaseException:  # Ctrl-C included: the next demo must not wait for what is left of this one
        client.ablations.cancel(accepted.id)
        console.print(f"{accepted.id} cancelled")
        raise
    if row.state != AblationState.COMPLETED:
        raise DemoFailed(f"{row.id} ended as {row.state}; see {files.log('worker')}")
    ablation_s = time.monotonic() - submitted_at
    console.print("\n[bold]2. A spec that nobody can run here is refused, not run as something else[/]")
    pointers = _show_refusal(client)
    console.print(f"\n[bold]3. The verdict of {row.id}[/]  (ablate verdict {row.id} --explain)")
    verdict = client.ablations.verdict(row.id)
    console.print(show_verdict.verdict(verdict))
    for line in show_verdict.explanation(verdict):
        console.print(line)
    projected = _wait_for_mlflow(client, row.id)
    return DemoSummary(
        ablation=row.id,
        verdict=verdict,
        refused_spec=pointers,
        report=files.save_report(row.id, client.ablations.report(row.id)),
        mlflow_url=projected,
        stack_s=round(stack_s, 1),
        ablation_s=round(ablation_s, 1),
        total_s=round(time.monotonic() - began, 1),
    )


def _show_refusal(client: Client) -> tuple[str, ...]:
    try:
        accepted = client.ablations.submit(read_spec("demo-refused"))
    except Refused as refusal:
        for line in problem_lines(refusal.problem):
            err().print(line)
        return tuple(entry.pointer for entry in refusal.problem.errors)
    raise DemoFailed(f"the spec demo-refused was accepted as {accepted.id}; it asks for gates that no CPU node has")


def _wait_for_mlflow(client: Client, ablation_id: str) -> str:
    deadline = time.monotonic() + _PROJECTION_PATIENCE_S
    while time.monotonic() < deadline:
        row: AblationPublic = client.ablations.get(ablation_id)
        if row.mlflow_url:
            return row.mlflow_url
        time.sleep(0.3)
    raise DemoFailed(f"{ablation_id} was not in MLflow after {_PROJECTION_PATIENCE_S:.0f} s; see background.log")


def _say_where(summary: DemoSummary, state: StackState, own: bool) -> None:
    console = err()
    console.print("\n[bold]4. Where to look[/]")
    console.print(f"  report   {escape(str(summary.report))}")
    console.print(f"  MLflow   {summary.mlflow_url}")
    if own:
        console.print("           (this stack ends now; `make up` starts it again with everything in it)")
    else:
        console.print(f"  API      {state.api_url}/docs")
    console.print(
        f"  time     {summary.stack_s:.1f} s stack, {summary.ablation_s:.1f} s ablation, {summary.total_s:.1f} s in all"
    )

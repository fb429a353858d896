"""`ablate demo`: one real ablation on this machine, from submission to verdict."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.markup import escape

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.outcomes import AblationState
from ablate.service.cli import verdict_tables
from ablate.service.cli.arguments import read_spec
from ablate.service.cli.follow import follow
from ablate.service.cli.output import err, problem_lines
from ablate.service.client.api import Client, Refused
from ablate.service.errors import StackError
from ablate.service.schemas.ablations import AblationPublic
from ablate.service.stack import control
from ablate.service.stack.layout import Report, StackFiles
from ablate.service.stack.state import StackState

_PROJECTION_PATIENCE_S = 180.0


class DemoFailed(StackError):
    """The demo did not end as expected."""


class DemoSummary(BaseModel):
    """The results of a demo, as `--json` prints them."""

    model_config = ConfigDict(frozen=True)

    ablation: str
    verdict: Verdict
    refused_spec: tuple[str, ...]
    """Pointers of the problems in the spec that the service must refuse."""
    report: Path
    mlflow_url: str
    stack_s: float
    """Seconds until the stack was ready; 0 if it ran before."""
    ablation_s: float
    """Seconds from the submission to the verdict."""
    total_s: float


def run_demo(files: StackFiles, report: Report) -> DemoSummary:
    """Run the demo on this home's stack, or on a new stack that it stops at the end.

    Progress goes to standard error. Raises DemoFailed if any result is not as expected.
    """
    began = time.monotonic()
    with _stack(files, report) as (state, own):
        stack_s = time.monotonic() - began
        with Client() as client:
            summary = _act(client, files, stack_s=stack_s if own else 0.0, began=began)
        _print_addresses(summary, state, own)
    return summary


@contextmanager
def _stack(files: StackFiles, report: Report) -> Iterator[tuple[StackState, bool]]:
    """Yield (state, False) for the running stack, or (state, True) for a new one that always stops at the end."""
    state = control.running(files)
    if state is not None and state.phase == "ready":
        err().print(f"using the running stack: {state.api_url}")
        yield state, False
        return
    err().print("starting broker, MLflow, API, background process and a CPU worker (ablate up)")
    os.environ["ABLATE_NODE_CLASS"] = "cpu"  # the class of its spec, also on a machine with a GPU
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the stack stops on SIGTERM, too
    try:
        yield control.start(files, report), True
    finally:
        stopped = control.stop(files, report)
        err().print(f"stack stopped in {stopped.seconds:.1f} s, no process is left")


def _act(client: Client, files: StackFiles, *, stack_s: float, began: float) -> DemoSummary:
    console = err()
    console.print("\n[bold]1. One ablation: four arms, four blocks, sixteen fresh processes[/]  (ablate run demo)")
    submitted_at = time.monotonic()
    accepted = client.ablations.submit(read_spec("demo"))
    try:
        row = follow(client, accepted.id, console)
    except BaseException:  # Ctrl-C included: the next demo must not wait for the rest of this one
        client.ablations.cancel(accepted.id)
        console.print(f"{accepted.id} cancelled")
        raise
    if row.state != AblationState.COMPLETED:
        raise DemoFailed(f"{row.id} ended as {row.state}; see {files.log('worker')}")
    ablation_s = time.monotonic() - submitted_at
    console.print("\n[bold]2. A spec that no node can run is refused, not run as something else[/]")
    pointers = _print_refusal(client)
    console.print(f"\n[bold]3. The verdict of {row.id}[/]  (ablate verdict {row.id} --explain)")
    verdict = client.ablations.verdict(row.id)
    console.print(verdict_tables.verdict(verdict))
    for line in verdict_tables.explanation(verdict):
        console.print(line)
    return DemoSummary(
        ablation=row.id,
        verdict=verdict,
        refused_spec=pointers,
        report=files.save_report(row.id, client.ablations.report(row.id)),
        mlflow_url=_wait_for_mlflow(client, row.id),
        stack_s=round(stack_s, 1),
        ablation_s=round(ablation_s, 1),
        total_s=round(time.monotonic() - began, 1),
    )


def _print_refusal(client: Client) -> tuple[str, ...]:
    try:
        accepted = client.ablations.submit(read_spec("demo-refused"))
    except Refused as refusal:
        for line in problem_lines(refusal.problem):
            err().print(line)
        return tuple(entry.pointer for entry in refusal.problem.errors)
    raise DemoFailed(f"the spec demo-refused was accepted as {accepted.id}, although no CPU node has its gates")


def _wait_for_mlflow(client: Client, ablation_id: str) -> str:
    deadline = time.monotonic() + _PROJECTION_PATIENCE_S
    while time.monotonic() < deadline:
        row: AblationPublic = client.ablations.get(ablation_id)
        if row.mlflow_url:
            return row.mlflow_url
        time.sleep(0.3)
    raise DemoFailed(f"{ablation_id} was not in MLflow after {_PROJECTION_PATIENCE_S:.0f} s; see background.log")


def _print_addresses(summary: DemoSummary, state: StackState, own: bool) -> None:
    console = err()
    console.print("\n[bold]4. Where to look[/]")
    console.print(
        f"  page     {state.api_url}/a/{summary.ablation}   (sign in: ablate open {summary.ablation})", soft_wrap=True
    )
    console.print(f"  report   {escape(str(summary.report))}")
    console.print(f"  MLflow   {summary.mlflow_url}")
    if own:
        console.print("           (this stack stops now; `make up` starts it again with all its data)")
    else:
        console.print(f"  API      {state.api_url}/openapi.json")
    console.print(
        f"  time     {summary.stack_s:.1f} s stack, {summary.ablation_s:.1f} s ablation, {summary.total_s:.1f} s in all"
    )

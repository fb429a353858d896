"""`ablate run --continue`: ask undecided questions again, after showing what that costs."""

import sys
from collections.abc import Iterator
from typing import Any

import typer
from rich.markup import escape

from ablate.experiments.analysis.verdicts import OPEN, VariantVerdict, Verdict
from ablate.experiments.design.aa_spec import CONTENT_TYPE
from ablate.experiments.design.load import load_values
from ablate.experiments.design.metrics import CPU_STEP, PROCESS_TIME
from ablate.experiments.design.spec import MAX_SEEDS
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.outlook import BY_WORK, may_ask_by_work, to_continue
from ablate.service.cli.arguments import ablation_id
from ablate.service.cli.asking import turns_of
from ablate.service.cli.output import err
from ablate.service.client.api import Client
from ablate.service.schemas.submissions import PlanPublic, SpecBody


def continued_spec(client: Client, name: str, *, by_work: bool = False) -> SpecBody:
    """Return the spec of an ablation with its undecided variants and enough blocks, or by processor time.

    Raises SpecError without any.
    """
    own = ablation_id(client, name)
    verdict, body = client.ablations.verdict(own), client.ablations.spec(own)
    values = load_values(body.content, body.content_type)
    if by_work:
        values = with_processor_time(values, verdict)
    else:
        variants = to_continue(verdict.variants)
        if not variants:
            raise SpecError([SpecProblem(pointer="--continue", detail=_nothing(verdict, name), hint=None)])
        values = with_open_variants(values, variants)
    return SpecBody(content=spec_yaml(values), content_type=CONTENT_TYPE, archives=body.archives)


def with_open_variants(values: dict[str, Any], variants: list[VariantVerdict]) -> dict[str, Any]:
    """Return a spec with these of its variants, and with the blocks that would probably decide them."""
    names = {one.arm for one in variants}
    design = dict(values["design"])
    needed = max((one.blocks_needed or 0 for one in variants if one.cause in OPEN), default=0)
    looks = design["blocks"].get("looks") or [design["blocks"]["count"]]
    if needed > looks[-1]:
        design["blocks"] = {"count": needed}
        if design.get("seeds") == looks[-1]:
            design["seeds"] = min(needed, MAX_SEEDS)  # every block has a seed of its own, as before
    kept = {name: arm for name, arm in values["variants"].items() if name in names}
    return {**values, "variants": kept, "design": design}


def with_processor_time(values: dict[str, Any], verdict: Verdict) -> dict[str, Any]:
    """Return a spec with its open variants, decided by the processor time of trials that take turns.

    Raises SpecError for a verdict that processor time cannot decide.
    """
    if not may_ask_by_work(verdict, verdict.variants):
        detail = f"{verdict.ablation} is no undecided question about the time of a program of yours on processors"
        raise SpecError([SpecProblem(pointer=BY_WORK, detail=detail, hint="leave it out")])
    names = {one.arm for one in verdict.variants if one.cause in OPEN}
    step_s = verdict.arms[verdict.baseline].step_s
    whole = verdict.rule["primary"]["metric"] == PROCESS_TIME
    workload = dict(values["workload"])
    if whole:
        workload["turns"] = True
    elif step_s is not None:
        workload["steps"] = {**workload["steps"], **turns_of(workload["steps"]["timed"], step_s)}
    primary = {**values["verdict"]["primary"], "metric": "cpu_s" if whole else CPU_STEP}
    return {
        **values,
        "workload": workload,
        "variants": {name: arm for name, arm in values["variants"].items() if name in names},
        "placement": {**values["placement"], "max_foreign_load": "99%"},
        "verdict": {**values["verdict"], "primary": primary},
    }


def _nothing(verdict: Verdict, name: str) -> str:
    words = ", ".join(f"'{one.arm}' {one.verdict}{f' ({one.cause})' if one.cause else ''}" for one in verdict.variants)
    return f"{name} has nothing that more blocks would decide: {words}"


def accept_price(plan: PlanPublic, *, accepted: bool) -> None:
    """Print what the new ablation costs; unless `accepted`, ask before an asking is spent. Raises SpecError or Exit."""
    for line in price(plan):
        err().print(escape(line))
    if accepted or plan.asking is None or plan.asking.number == 1:
        return
    if not sys.stdin.isatty():
        detail = f"asking {plan.asking.number} of this question is tested at {plan.asking.level_pct:.3g} %"
        raise SpecError([SpecProblem(pointer="--continue", detail=detail, hint="to spend it: add --yes")])
    if not typer.confirm("Spend this asking?"):
        raise typer.Exit


def price(plan: PlanPublic) -> Iterator[str]:
    """Yield the size of the new ablation, and the place of its asking."""
    minutes = plan.expected_device_minutes
    cost = "" if minutes is None else f", about {wording.fixed(minutes, 1)} device minutes"
    arms = wording.listed([arm.name for arm in plan.arms])
    yield f"continues with {wording.counted(len(plan.blocks), 'new block')} of {arms}{cost}"
    asking = plan.asking
    if asking is None:
        return
    if asking.number == 1:
        level = wording.plain_percent(asking.level_pct)
        yield f"costs no further asking: the first one, tested at {level}, is not spent yet"
        return
    later = wording.plain_percent(asking.next_level_pct)
    yield (
        f"spends asking {asking.number} of this question, tested at {wording.plain_percent(asking.level_pct)}; "
        f"the next one is tested at {later}"
    )

"""What commands do without a service: write a plan file, judge a bundle, make its report.

All that measures and judges is imported here, so commands import this module where it is asked for.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from experiments.analysis.auto_blocks import with_number
from experiments.analysis.verdicts import Verdict
from experiments.design.load import parse_spec
from experiments.design.plan import make_plan
from experiments.records.calibration import Calibration
from experiments.records.plan_file import make_plan_file, plan_file_text
from experiments.reporting.view import bundle_view, judge_bundle
from service.cli.bundles import read_bundle
from service.cli.output import out, print_json
from service.schemas.submissions import SpecBody


def write_plan(body: SpecBody, path: Path, *, known: Sequence[Calibration] = (), as_json: bool) -> None:
    """Write the plan file of a spec, sized by what is `known` about noise if it asks so; say what to do with it."""
    content, content_type = with_number(body.content, body.content_type, known)
    plan = make_plan(parse_spec(content, content_type))
    file = make_plan_file(plan, spec_text=content.decode(), content_type=content_type)
    path.write_text(plan_file_text(file), encoding="utf-8")
    if as_json:
        print_json({"plan_file": str(path), "ablation": file.ablation_id, "digest": file.digest})
        return
    console = out()
    arms = ", ".join(arm.name for arm in plan.arms)
    console.print(f"{escape(str(path))}: {len(plan.blocks)} blocks of {escape(arms)} for node class {plan.node_class}")
    console.print(f"  plan     {file.digest}")
    console.print(f"  run      ablate exec {escape(path.name)} --out bundle/    (on the node, in this version's code)")
    console.print("  or       python -m workers.offline ...    (in a checkout, with nothing installed)")


def judge(path: Path, calibrations: Sequence[Calibration] = ()) -> Verdict:
    """Return the verdict of the bundle at `path`, judged with what is known about noise."""
    return judge_bundle(read_bundle(path)[1], calibrations)


def report(path: Path, calibrations: Sequence[Calibration] = ()) -> tuple[str, str]:
    """Return (ablation id, report page) of the bundle at `path`."""
    from experiments.reporting.pages.report import render  # with matplotlib

    view = bundle_view(read_bundle(path)[1], calibrations)
    return view.ablation_id, render(view)

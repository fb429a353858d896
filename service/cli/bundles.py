"""Commands for nodes that reach nothing: write a plan file, look into a bundle, import bundles."""

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from experiments.analysis.auto_blocks import with_number
from experiments.analysis.verdicts import Verdict
from experiments.design.load import parse_spec
from experiments.design.plan import make_plan
from experiments.errors import BundleError, SpecError, SpecProblem
from experiments.records.bundle import Bundle
from experiments.records.bundle_files import is_bundle, read_bundle_files
from experiments.records.bundle_reader import open_bundle
from experiments.records.calibration import Calibration
from experiments.records.plan_file import make_plan_file, plan_file_text
from experiments.reporting.view import bundle_view, judge_bundle
from service.cli.names import ablation_id
from service.cli.output import out, print_json
from service.client import Client
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


def verdict_of(subject: str, calibrations: Sequence[Calibration] = ()) -> Verdict:
    """Return the verdict of an ablation of the service, or of a bundle, judged here with what is known about noise."""
    if is_bundle(Path(subject)):
        return judge_bundle(read_bundle(Path(subject))[1], calibrations)
    only_offline(calibrations)
    with Client() as client:
        return client.ablations.verdict(ablation_id(client, subject))


def only_offline(calibrations: Sequence[object] | None) -> None:
    """Refuse calibrations where the service is asked. Raises SpecError."""
    if calibrations:
        detail = "--calibration is for bundles and for plan --out; the service goes by the A/A blocks that it knows"
        raise SpecError([SpecProblem(pointer="--calibration", detail=detail, hint="import the A/A bundle")])


def report_of(subject: str, calibrations: Sequence[Calibration] = ()) -> tuple[str, str]:
    """Return (ablation id, report page) of an ablation of the service, or of a bundle, made here."""
    if is_bundle(Path(subject)):
        from experiments.reporting.report import render  # matplotlib and jinja2, which clients of a service do without

        view = bundle_view(read_bundle(Path(subject))[1], calibrations)
        return view.ablation_id, render(view)
    only_offline(calibrations)
    with Client() as client:
        found = ablation_id(client, subject)
        return found, client.ablations.report(found)


def read_bundle(path: Path) -> tuple[dict[str, bytes], Bundle]:
    """Return a bundle's files and what they say. Raises BundleError with the bundle's name in front of each file's."""
    try:
        files = read_bundle_files(path)
        return files, open_bundle(files)
    except BundleError as error:
        named = [SpecProblem(pointer=f"{path}: {p.pointer}", detail=p.detail, hint=p.hint) for p in error.problems]
        raise BundleError(named) from error

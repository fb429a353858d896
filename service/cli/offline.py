"""Work without a service: write a plan file, read a bundle, judge it, make its report.

Commands import this module inside functions, because it imports the judge.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from rich.markup import escape

from ablate.experiments.analysis.placing import placed
from ablate.experiments.analysis.proposals import refuse_session_key
from ablate.experiments.analysis.sizing import plan_spec
from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.kinds.command import sent_code
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import controlled, may_have_control, questions
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.documents import write_whole
from ablate.experiments.errors import BundleError, SpecError, SpecProblem
from ablate.experiments.outcomes import SeedOrigin
from ablate.experiments.records.bundle import Bundle
from ablate.experiments.records.bundle_files import read_bundle_files
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.records.calibration import Calibration
from ablate.experiments.records.circumstances import NOT_REGISTERED
from ablate.experiments.records.plan_file import (
    SUFFIX,
    PlanFile,
    carried_plan,
    make_plan_file,
    plan_file_text,
    write_plan_archive,
)
from ablate.experiments.reporting.view import bundle_view, judge_bundle
from ablate.service.cli.output import out, print_json
from ablate.service.client.api import Client
from ablate.service.client.connection import Unreachable, names_service
from ablate.service.schemas.submissions import SpecBody


def read_bundle(path: Path) -> tuple[dict[str, bytes], Bundle]:
    """Return a bundle's files by name, and its contents.

    Raises BundleError, in which the bundle's path precedes every file name.
    """
    try:
        files = read_bundle_files(path)
        return files, open_bundle(files)
    except BundleError as error:
        problems = [SpecProblem(pointer=f"{path}: {p.pointer}", detail=p.detail, hint=p.hint) for p in error.problems]
        raise BundleError(problems) from error


def write_plan(
    body: SpecBody, path: Path, *, calibrations: Sequence[Calibration] = (), unregistered: bool = False
) -> PlanFile:
    """Write the plan file of a spec, in a tar file with its code if it has any, and return it.

    A spec with `blocks: auto` gets its number of blocks from `calibrations`. Without any, a plan that times decide gets
    a control arm, so that its own A/A blocks may admit the node. If the settings name a service, it registers a plan
    that has a question, unless it shall stay `unregistered`. Raises ClientError.
    """
    spec = parse_spec(body.content, body.content_type)
    refuse_session_key(spec)
    body_text, content_type, spec = placed(body.content, body.content_type, spec, ())
    content, content_type, spec, plan = plan_spec(body_text, content_type, spec, lambda: calibrations)
    if may_have_control(spec) and not calibrations:
        plan = controlled(spec, plan)
    trees = {packed.digest: packed.tree for packed in body.archives}
    _check_code(spec, trees, path)
    registers = not unregistered and bool(questions(spec, plan)) and names_service()
    file = make_plan_file(
        plan, spec_text=content.decode(), content_type=content_type, code=trees, to_register=registers
    )
    if registers:
        file = _registered(file)
    if path.suffix == SUFFIX:
        write_plan_archive(path, file, body.archives)
    else:
        write_whole(path, plan_file_text(file))
    return file


def print_plan(file: PlanFile, path: Path, *, as_json: bool) -> None:
    """Print what a plan file has, and how to run it."""
    if as_json:
        made = {"plan_file": str(path), "ablation": file.ablation_id, "digest": file.digest}
        print_json({**made, "registered_at": file.registered and file.registered.registered_at})
        return
    console, plan = out(), file.plan
    arms = ", ".join(arm.name for arm in plan.arms)
    console.print(f"{escape(str(path))}: {len(plan.blocks)} blocks of {escape(arms)} for node class {plan.node_class}")
    console.print(f"  plan     {file.digest}")
    carried = carried_plan(file)
    if carried is not None and carried.registered_at is None:
        console.print(f"  [yellow]counted  by nobody[/]: {NOT_REGISTERED}, and every page will say so")
    elif file.registered is not None:
        drawn = "with seeds chosen in the spec" if file.plan.seeds is SeedOrigin.CHOSEN else "with seeds drawn now"
        console.print(f"  counted  as asking {file.registered.family.number} of its question, {drawn}")
    console.print(f"  run      ablate offline exec {escape(path.name)} --out bundle/    (on the node, in this version)")
    console.print("  or       python -m ablate.workers.offline ...    (in a checkout, without installing)")


def _registered(file: PlanFile) -> PlanFile:
    with Client() as client:
        try:
            return client.ablations.register_plan(file)
        except Unreachable as error:
            detail = f"{error.problem.detail}; or write a plan that nobody counts: --unregistered"
            raise Unreachable(error.problem.model_copy(update={"detail": detail})) from error


def _check_code(spec: AblationSpec, trees: Collection[str], path: Path) -> None:
    """Raise SpecError unless the plan can carry all code that its spec names."""
    problems = [
        SpecProblem(pointer=where, detail=f"code {digest} is not here", hint="name its folder, for example `code: .`")
        for where, digest in sent_code(spec).items()
        if digest not in trees
    ]
    if trees and path.suffix != SUFFIX:
        detail = f"the plan carries code, so it is a tar file; {str(path)!r} does not end in {SUFFIX}"
        problems.append(SpecProblem(pointer="--out", detail=detail, hint=f"--out {path.with_suffix(SUFFIX)}"))
    if problems:
        raise SpecError(problems)


def judge(path: Path, calibrations: Sequence[Calibration] = ()) -> Verdict:
    """Return the verdict of the bundle at `path`, judged with the noise in `calibrations`."""
    return judge_bundle(read_bundle(path)[1], calibrations)


def report(path: Path, calibrations: Sequence[Calibration] = ()) -> tuple[str, str]:
    """Return (ablation id, report page) of the bundle at `path`."""
    from ablate.experiments.reporting.pages.report import render  # imports matplotlib

    view = bundle_view(read_bundle(path)[1], calibrations)
    return view.ablation_id, render(view)

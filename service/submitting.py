"""From a spec to a stored submission: plan it once, decide about a control, check limits. For every way to submit."""

import time
from collections.abc import Callable, Iterable, Iterator

from sqlalchemy import Connection

from ablate.experiments.analysis.noise.admission import is_enough
from ablate.experiments.analysis.placing import placed
from ablate.experiments.analysis.sizing import PlannedSpec, plan_spec, sizing_problems, workload_of
from ablate.experiments.design.plan import Plan, controlled, may_have_control, questions
from ablate.experiments.design.power import alpha_of
from ablate.experiments.design.problems import pointer
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.digest import digest
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.ids import new_id
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.records.calibration import Calibration, Sizing
from ablate.experiments.records.circumstances import Family
from ablate.experiments.reporting import wording
from ablate.service.errors import Forbidden
from ablate.service.http.deps import Services
from ablate.service.http.serializers import accepted_public, silent_limit_s
from ablate.service.principals import Principal, Scope
from ablate.service.queue.waiting import eligible_nodes
from ablate.service.schemas.submissions import AblationAccepted, SpecBody
from ablate.service.store.ablations.device_minutes import (
    check_budget,
    check_quota,
    expected_device_minutes,
    warnings_of,
)
from ablate.service.store.ablations.submissions import (
    IdempotencyKey,
    KeyUsed,
    StoredAnswer,
    Submission,
    find_answer,
    store_submission,
)
from ablate.service.store.files.code_archives import user_of
from ablate.service.store.nodes.calibrations import read_calibrations
from ablate.service.store.nodes.nodes import kinds
from ablate.service.store.questions.circumstances import family_if_asked_now

_STEP_BYTES = 256
"""Most bytes of a step in a report, whose numbers have up to 17 digits."""
_TRACE_BYTES = 800_000
"""Most bytes of a profiled step over time: 4,000 names, each of 120 characters, and as many events."""
_CURVE_BYTES = 20_000
"""Most bytes of the curve of a logged metric: 400 points of two numbers."""


def planned(services: Services, body: SpecBody, spec: AblationSpec) -> PlannedSpec:
    """Return the plan of `spec`, parsed from `body`, without a control, on a node class of this service.

    Raises SpecError, also for a number from `blocks: auto` that takes more device minutes than the spec allows.
    """
    content, content_type, spec = on_one_class(services, body, spec)

    def calibrations() -> tuple[Calibration, ...]:
        with services.store.read() as connection:
            return read_calibrations(connection)

    numbered = plan_spec(content, content_type, spec, calibrations)
    if spec.design.blocks.auto:
        with services.store.read() as connection:
            check_budget(connection, numbered.spec, numbered.plan)
    return numbered


def on_one_class(services: Services, body: SpecBody, spec: AblationSpec) -> tuple[bytes, str, AblationSpec]:
    """Return the spec and its text with the node class that its placement leaves open. Raises SpecError."""
    with services.store.read() as connection:
        return placed(body.content, body.content_type, spec, kinds(connection))


def check_code_scope(spec: AblationSpec, principal: Principal) -> None:
    """Raise Forbidden for a spec with a command from a token that may not send code."""
    if spec.workload.command is not None and not principal.scope.includes(Scope.CODE):
        raise Forbidden(
            f"a spec with a command runs code on a node: this needs a token with scope '{Scope.CODE}'; "
            f"this one has '{principal.scope}'"
        )


def prepared(services: Services, body: SpecBody, spec: AblationSpec, principal: Principal) -> Submission:
    """Return the planned submission of `body`, parsed as `spec`. Raises SpecError and Forbidden."""
    check_code_scope(spec, principal)
    text, content_type, spec, plan = planned(services, body, spec)
    ablation_id = new_id("abl")
    with services.store.read() as connection:
        calibrations = read_calibrations(connection, workload=workload_of(plan, spec))
    measured = is_measured(services, spec, calibrations)
    if _has_control(ablation_id, spec, services.settings.control_every, measured=measured):
        plan = controlled(spec, plan)
    submission = Submission(
        ablation_id=ablation_id,
        spec=spec,
        plan=plan,
        spec_text=text.decode(),
        content_type=content_type,
        submitted_by=principal.name,
        token_id=principal.token_id,
        code_user=user_of(principal),
    )
    check_reports(spec, submission.plan, services.settings.max_report_bytes)
    return submission


def stored(
    services: Services,
    submission: Submission,
    key: IdempotencyKey,
    answer: StoredAnswer,
    principal: Principal,
    *,
    also: Callable[[Connection], None] = lambda _connection: None,
) -> StoredAnswer:
    """Store a submission with its answer and what `also` stores, all or nothing; return the answer to the key."""
    try:
        with services.store.write() as connection:
            check_size(submission.spec, store_submission(connection, submission, key, answer))
            check_quota(connection, principal)
            also(connection)
    except KeyUsed:
        with services.store.read() as connection:
            earlier = find_answer(connection, key)
        if earlier is None:
            raise
        return earlier
    return answer


def accepted(services: Services, submission: Submission) -> AblationAccepted:
    """Return the answer to a submission."""
    plan = submission.plan
    with services.store.read() as connection:
        minutes = expected_device_minutes(connection, plan)
        silent_s = silent_limit_s(services.settings)
        waits_for = eligible_nodes(connection, plan, silent_s=silent_s).waits_for
        family = family_if_asked_now(connection, questions(submission.spec, plan))
    again = _asked_again(submission.spec, plan, family)
    waits = [] if waits_for is None else [f"it waits for {waits_for}"]
    warnings = [*warnings_of(submission.spec, minutes), *again, *waits]
    return accepted_public(submission.ablation_id, plan, expected_device_minutes=minutes, warnings=warnings)


def _asked_again(spec: AblationSpec, plan: Plan, family: Family) -> Iterator[str]:
    """Yield the level of an asking that is not the first one of a question."""
    number = max((family.number_of(arm.name) for arm in plan.variants), default=1)
    if number > 1 and spec.verdict.session is None and not spec.verdict.primary.exact:
        level = wording.plain_percent(100 * alpha_of(number))
        yield f"asking {number} of this question, after '{family.earlier[-1].name}': it is tested at {level}"


def _has_control(ablation_id: str, spec: AblationSpec, every: int, *, measured: bool) -> bool:
    """Decide whether an ablation gets a control, which repeats the baseline; none where no metric has noise.

    It gets one if the noise of its workload is not `measured`, so that it may have a verdict by its own A/A blocks, and
    else by its id: one in `every`. 0 turns both off.
    """
    if not _may_have_control(spec, every):
        return False
    return not measured or int(digest(ablation_id).removeprefix("sha256:")[:16], 16) % every == 0


def _may_have_control(spec: AblationSpec, every: int) -> bool:
    return every > 0 and may_have_control(spec)


def is_measured(services: Services, spec: AblationSpec, calibrations: Iterable[Calibration]) -> bool:
    """Return whether no control would narrow a verdict now, by the calibrations of the workload."""
    if not _may_have_control(spec, services.settings.control_every):
        return True
    now = time.time()
    return any(is_enough(one, now) for one in calibrations)


def check_reports(spec: AblationSpec, plan: Plan, most_bytes: int) -> None:
    """Raise SpecError if the report of a block may be too large for the service, which would reject its results."""
    if NODE_CLASSES[plan.node_class].compiles_only:  # reports no steps
        return
    arms = 2 + len(spec.variants)  # with the control that an ablation may get
    steps = max(arm.config.steps.total for arm in plan.arms)
    profiled = spec.workload.profile or bool(spec.workload.require_kernels)
    curves = sum(metric.tracker is not None for metric in spec.workload.metrics.values())
    more = profiled * _TRACE_BYTES + curves * _CURVE_BYTES
    most = max(0, most_bytes - arms * more) // _STEP_BYTES
    if arms * steps > most:
        detail = (
            f"{arms} arms (with a control) of {steps:,} steps make block reports of up to "
            f"{arms * (steps * _STEP_BYTES + more):,} bytes; "
            f"allowed: {most_bytes:,} (ABLATE_MAX_REPORT_BYTES)"
        )
        hint = f"at most {most // steps} arms, or {most // arms:,} steps"
        raise SpecError([SpecProblem(pointer=pointer("workload", "steps"), detail=detail, hint=hint)])


def check_size(spec: AblationSpec, sizing: Sizing | None) -> None:
    """Raise SpecError, which undoes the submission, if its design cannot detect the effect that its rule asks for."""
    problems = sizing_problems(spec, sizing)
    if problems:
        raise SpecError(problems)

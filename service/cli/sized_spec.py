"""A spec with the number of blocks that the measured noise asks for."""

import yaml

from experiments.design.load import load_values
from experiments.errors import SpecError, SpecProblem
from service.schemas.submissions import PlanPublic, SpecBody


def with_blocks(spec: SpecBody, plan: PlanPublic) -> bytes:
    """Return `spec` as YAML with the blocks that find its own `adopt_if` at the noise that was measured.

    Raises SpecError where the noise is unknown or no allowed number of blocks is enough.
    """
    if plan.sizing is None:
        command = f"ablate aa {plan.node_class} --like SPEC"
        raise _refused(f"the noise of this workload on {plan.node_class} is not known", f"measure it: {command}")
    if plan.sizing.blocks_needed is None:
        seen = f"the noise is at most {plan.sizing.sd_upper_pct:.2f} %"
        raise _refused(f"no allowed number of blocks finds {plan.sizing.adopt_if_pct:g} %: {seen}", "raise adopt_if")
    values = load_values(spec.content, spec.content_type)
    values["design"]["blocks"] = {"count": plan.sizing.blocks_needed}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120).encode()


def _refused(detail: str, hint: str) -> SpecError:
    return SpecError([SpecProblem(pointer="#/design/blocks", detail=detail, hint=hint)])

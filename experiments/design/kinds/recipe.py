"""Parts of a spec with a recipe, built in or of a package, that only fit a command."""

from collections.abc import Iterator

from experiments.design.problems import listed, pointer
from experiments.design.spec import AblationSpec
from experiments.errors import SpecProblem
from kernels.backends import NODE_CLASSES

PROFILED_DEVICES = ("cpu", "cuda")
"""Torch's names of devices whose kernels, or operators, its profiler reports."""


def recipe_problems(spec: AblationSpec) -> Iterator[SpecProblem]:
    """Find parts of a spec with a recipe that only fit a command."""
    hint = "use gates; or workload.command"
    node_class, devices = NODE_CLASSES[spec.placement.node_class], spec.placement.devices
    if devices not in node_class.devices:
        allowed = listed(node_class.devices)
        detail = f"the devices of a recipe share each of its steps evenly; given: {devices}"
        detail += f"; allowed with a recipe on node class '{node_class}': {allowed}"
        yield SpecProblem(pointer=pointer("placement", "devices"), detail=detail, hint="workload.command can use more")
    if spec.workload.profile and (node_class.compiles_only or node_class.device_type not in PROFILED_DEVICES):
        why = (
            "executes nothing" if node_class.compiles_only else "runs on XLA, whose steps torch's profiler does not see"
        )
        detail = f"no step is profiled on node class '{node_class}', which {why}"
        yield SpecProblem(pointer=pointer("workload", "profile"), detail=detail, hint="leave profile out")
    for key in ("args", "env"):
        if getattr(spec.baseline, key):
            detail = f"'{key}' belongs to a command; this workload is recipe '{spec.workload.recipe}'"
            yield SpecProblem(pointer=pointer("baseline", key), detail=detail, hint=hint)
    for name, own in spec.variants.items():
        if own.gates is None and not own.overrides:
            detail = f"the variant changes a command; this workload is recipe '{spec.workload.recipe}'"
            yield SpecProblem(pointer=pointer("variants", name), detail=detail, hint=hint)

"""From a placement that leaves the node class open to one class, before anything is planned.

All blocks of an ablation run on one class, because trials of different cards differ by more than their arms do. The
class is chosen when the spec is submitted and not by the first claim: plan, budget, noise and queue are those of a
class, and what a class cannot run is refused before anything waits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ablate.experiments.design.aa_spec import CONTENT_TYPE
from ablate.experiments.design.load import load_values, spec_of
from ablate.experiments.design.problems import listed, nearest, refusal, shown
from ablate.experiments.design.spec import ANY_GPU, AblationSpec, Placement
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.errors import SpecError
from ablate.experiments.node_classes import NODE_CLASSES, is_gpu
from ablate.model.measurements import GIB


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The machines of one node class that can be had."""

    node_class: str
    nodes: int = 0
    """That take work now."""
    devices: int = 1
    """Of the node with most."""
    memory_bytes: int | None = None
    """Of the smallest device; None for a class of which no machine has registered yet."""

    def __str__(self) -> str:
        size = "" if self.memory_bytes is None else f"{self.memory_bytes / GIB:.1f} GiB, "
        return f"{self.node_class} ({size}{self.nodes} of its nodes take work)"

    def fits(self, placement: Placement) -> bool:
        """Return whether it has what an open placement asks for."""
        if placement.gpu is None:
            return True
        name = placement.gpu.lower().replace(" ", "-")
        matches = placement.gpu == ANY_GPU or fnmatchcase(self.node_class, name)
        roomy = placement.memory is None or (self.memory_bytes or 0) >= placement.memory
        is_one = NODE_CLASSES[self.node_class].device_type == "cuda"
        return is_one and matches and roomy and self.devices >= placement.devices


def placed(
    body: bytes, content_type: str, spec: AblationSpec, kinds: Sequence[Kind]
) -> tuple[bytes, str, AblationSpec]:
    """Return a spec, parsed from `body`, with one node class of `kinds`, and its text and content type.

    Without a placement it is the only kind. Of several kinds that fit a placement it is the one with most nodes that
    take work, then the one with least memory. Raises SpecError with the kinds if there is none, or no kind of the
    GPU that a placement names.
    """
    own = spec.placement
    if own.node_class:
        _check_known(own.node_class, kinds)
        return body, content_type, spec
    fitting = sorted((kind for kind in kinds if kind.fits(own)), key=_preference)
    if not fitting or (own.gpu is None and len(fitting) > 1):
        raise _no_kind(own, kinds)
    values = load_values(body, content_type)
    asked: dict[str, Any] = values.pop("placement", {})
    rest = {name: value for name, value in asked.items() if name not in ("gpu", "memory")}
    values["placement"] = {"node_class": fitting[0].node_class, **rest}
    others = f" of {listed(fitting)}" if len(fitting) > 1 else ""
    why = f"# placement: {fitting[0]}{others}\n"
    return why.encode() + spec_yaml(values), CONTENT_TYPE, spec_of(values)


def _preference(kind: Kind) -> tuple[int, int, str]:
    return -kind.nodes, kind.memory_bytes or 0, kind.node_class


def _check_known(node_class: str, kinds: Sequence[Kind]) -> None:
    """Refuse a GPU of which nobody has a node: most likely a name with a wrong letter."""
    names = [kind.node_class for kind in kinds]
    if is_gpu(node_class) and kinds and node_class not in names:
        detail = f"no node of class {shown(node_class)} is known here; known: {listed(kinds)}"
        hint = nearest(node_class, dict.fromkeys([*names, *NODE_CLASSES]))
        way = f"to have one: ablate nodes add NAME --class {node_class}"
        raise refusal(detail, "; ".join(filter(None, (hint, way))), at=("placement", "node_class"))


def _no_kind(own: Placement, kinds: Sequence[Kind]) -> SpecError:
    if not kinds:
        detail = "the placement names no node class, and no node is known that could choose one"
        hint = "write placement: {node_class: NAME}; `ablate worker doctor` says the name of a machine's"
        return refusal(detail, hint, at=("placement",))
    if own.gpu is None:
        detail = f"there is no placement, and several kinds of machines: {listed(kinds)}"
        return refusal(detail, f"write placement: {{node_class: {kinds[0].node_class}}}", at=("placement",))
    detail = f"no kind of machine has {' and '.join(_wishes(own))}; there are: {listed(kinds)}"
    return refusal(detail, at=("placement", "gpu"))


def _wishes(own: Placement) -> Iterator[str]:
    yield f"gpu: {own.gpu}"
    if own.memory is not None:
        yield f"memory of {own.memory / GIB:g} GiB"
    if own.devices > 1:
        yield f"{own.devices} devices"

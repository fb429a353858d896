"""What a pass keeps for its backward pass and what is made there again: decided in the traced graph, and read back.

torch traces forward and backward of a function as one graph and asks a partitioner where to cut it. Ours marks values
before torch's min-cut partitioner does so: PsiV (everything made from v and psi alone) is kept with `psiv_cache` and
made again without, and every other computed value is kept unless `remat` leaves it to the minimum cut. What the
finished graphs then do is counted in them, not taken from what was asked.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

VIEWS = frozenset(
    {"view", "_unsafe_view", "reshape", "expand", "transpose", "permute", "t", "unsqueeze", "squeeze", "slice"}
    | {"select", "split", "unbind", "detach", "alias", "unflatten", "clone", "_to_copy", "as_strided", "getitem"}
)
"""Operations that move or convert values and compute nothing."""


@dataclass(kw_only=True)
class Partition:
    """A partitioner for one function, and what its graphs do."""

    v: int | None = None
    """Place of v among the function's tensors; None where PsiV is a value like others."""
    psi: int | None = None
    """Place of psi."""
    psiv_cache: bool = False
    remat: bool
    handed_bytes: int = field(default=0, init=False)
    """Bytes of everything that the backward graph takes, gradients included."""
    psiv_saved_bytes: int = field(default=0, init=False)
    """Bytes of PsiV that the forward graph hands to the backward graph."""
    psiv_recomputed: int = field(default=0, init=False)
    """Operations of the backward graph that make PsiV again."""
    recomputed: int = field(default=0, init=False)
    """Other operations, views apart, that the backward graph does again."""

    def __call__(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph of `joint`."""
        from functorch.compile import min_cut_rematerialization_partition

        _negate_truth_values(joint)
        psiv = self._psiv(joint)
        kinds = {node.name: node in psiv for node in joint.graph.nodes if node.op == "call_function"}
        for node in joint.graph.nodes:
            policy = self._policy(node, psiv)
            if policy is not None:
                node.meta["recompute"], node.meta["ac_graph_id"] = policy, 0
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        self._count(forward, backward, kinds)
        _inputs_in_order(forward, backward)
        return forward, backward

    def _policy(self, node: fx.Node, psiv: set[fx.Node]) -> CheckpointPolicy | None:
        if node.op != "call_function":
            return None
        if node in psiv:
            keep = self.psiv_cache and not _is_view(node)
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE
        return None if self.remat or _is_view(node) else CheckpointPolicy.MUST_SAVE

    def _psiv(self, joint: fx.GraphModule) -> set[fx.Node]:
        """Return the nodes that are made from v and psi, from both and nothing else."""
        if self.v is None or self.psi is None:
            return set()
        primals = [node for node in joint.graph.nodes if node.op == "placeholder" and "tangents" not in node.name]
        both = frozenset({primals[self.v], primals[self.psi]})
        made_from: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in joint.graph.nodes:
            sources = (made_from[source] for source in node.all_input_nodes)
            made_from[node] = frozenset({node}) if node.op == "placeholder" else frozenset().union(*sources)
        return {node for node, sources in made_from.items() if sources == both}

    def _count(self, forward: fx.GraphModule, backward: fx.GraphModule, kinds: dict[str, bool]) -> None:
        again = set(_computed(forward)) & set(_computed(backward)) & set(kinds)
        self.psiv_recomputed = sum(kinds[name] for name in again)
        self.recomputed = len(again) - self.psiv_recomputed
        sizes = {node.name: _nbytes(node.meta["val"]) for node in backward.graph.nodes if node.op == "placeholder"}
        self.handed_bytes = sum(sizes.values())
        self.psiv_saved_bytes = sum(size for name, size in sizes.items() if kinds.get(name))


def differentiable(function: Callable[..., Any], partition: Partition) -> Callable[..., Any]:
    """Return `function` of tensors with forward and backward graphs as `partition` cuts them.

    Traced at its first call, for the shapes, dtypes and gradients that it then gets; call it with no others.
    """
    from functorch.compile import aot_function, make_boxed_func

    traced: Callable[..., Any] = aot_function(
        function,
        fw_compiler=lambda graph, _: make_boxed_func(graph),
        bw_compiler=lambda graph, _: make_boxed_func(_after_barrier(graph)),
        partition_fn=partition,
    )
    return traced


def _after_barrier(graph: fx.GraphModule) -> Callable[..., Any]:
    """Run the backward graph on values that the compiler cannot trace back.

    It would find that they are made in the same way as in the forward pass, and keep those.
    """
    from kernels import xla_device

    def run(*tensors: torch.Tensor) -> Any:
        return graph(*xla_device.barrier(tensors))

    return run


def _negate_truth_values(joint: fx.GraphModule) -> None:
    """Write ~ of truth values as logical_not.

    torch_xla 2.9 computes ~ of one that enters a loop on its byte: ~1 becomes -2, and counts as true.
    """
    for node in joint.graph.nodes:
        if node.target is torch.ops.aten.bitwise_not.default and node.meta["val"].dtype is torch.bool:
            node.target = torch.ops.aten.logical_not.default


def _inputs_in_order(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Hand inputs that are kept to the backward graph in the order in which the function takes them.

    torch_xla 2.9's scan does not keep such inputs a second time. It puts them back in the function's order, wherever
    the partition had placed them, and two of one shape would silently be exchanged.
    """
    order = [node.name for node in forward.graph.nodes if node.op == "placeholder"]
    output = next(node for node in forward.graph.nodes if node.op == "output")
    given = list(output.args[0])
    kept = [at for at, value in enumerate(given) if isinstance(value, fx.Node) and value.name in order]
    holders = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    kept = [at for at in kept if given[at].name in holders]
    in_order = sorted((given[at] for at in kept), key=lambda node: order.index(node.name))
    renamed = {given[at].name: node.name for at, node in zip(kept, in_order, strict=True)}
    for at, node in zip(kept, in_order, strict=True):
        given[at] = node
    output.args = (type(output.args[0])(given),)
    begin = next(node for node in backward.graph.nodes if node.op != "placeholder")
    for name in list(holders):
        begin.prepend(holders[renamed.get(name, name)])
    forward.recompile()
    backward.recompile()


def _computed(graph: fx.GraphModule) -> Iterator[str]:
    return (node.name for node in graph.graph.nodes if node.op == "call_function" and not _is_view(node))


def _is_view(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0] in VIEWS


def _nbytes(value: Any) -> int:
    return int(value.numel() * value.element_size())

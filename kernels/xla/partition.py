"""Partitioner that decides which values a forward pass saves and which the backward pass recomputes.

torch traces forward and backward of a function as one graph and asks a partitioner where to cut it. Ours marks values
before torch's min-cut partitioner runs:

- PsiV, all values computed from v and psi alone: saved with `psiv_cache`, recomputed without.
- Other computed values: saved, unless `remat` leaves them to the minimum cut.

The statistics are counted in the finished graphs, not derived from the request.
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
    """Partitioner of one function, with statistics of its graphs."""

    v: int | None = None
    """Index of v among the function's tensors. None if PsiV gets no special treatment."""
    psi: int | None = None
    """Index of psi."""
    psiv_cache: bool = False
    remat: bool
    handed_bytes: int = field(default=0, init=False)
    """Bytes of all inputs of the backward graph, gradients included."""
    psiv_saved_bytes: int = field(default=0, init=False)
    """Bytes of PsiV that the forward graph saves for the backward graph."""
    psiv_recomputed: int = field(default=0, init=False)
    """Operations of the backward graph that recompute PsiV."""
    recomputed: int = field(default=0, init=False)
    """Other operations, except views, that the backward graph repeats."""

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
        """Return the nodes computed from both v and psi and nothing else."""
        if self.v is None or self.psi is None:
            return set()
        primals = [node for node in joint.graph.nodes if node.op == "placeholder" and "tangents" not in node.name]
        both = frozenset({primals[self.v], primals[self.psi]})
        origins: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in joint.graph.nodes:
            sources = (origins[source] for source in node.all_input_nodes)
            origins[node] = frozenset({node}) if node.op == "placeholder" else frozenset().union(*sources)
        return {node for node, sources in origins.items() if sources == both}

    def _count(self, forward: fx.GraphModule, backward: fx.GraphModule, kinds: dict[str, bool]) -> None:
        repeated = set(_computed(forward)) & set(_computed(backward)) & set(kinds)
        self.psiv_recomputed = sum(kinds[name] for name in repeated)
        self.recomputed = len(repeated) - self.psiv_recomputed
        sizes = {node.name: _nbytes(node.meta["val"]) for node in backward.graph.nodes if node.op == "placeholder"}
        self.handed_bytes = sum(sizes.values())
        self.psiv_saved_bytes = sum(size for name, size in sizes.items() if kinds.get(name))


def differentiable(function: Callable[..., Any], partition: Partition) -> Callable[..., Any]:
    """Return `function` of tensors with forward and backward graphs cut by `partition`.

    The first call traces it. Later calls must have the same shapes, dtypes and needs of gradients.
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
    """Return the backward graph on values that the compiler cannot trace to the forward pass.

    Otherwise the compiler would merge recomputed values with those of the forward pass, and so save them.
    """
    from ablate.kernels.xla import device as xla_device

    def run(*tensors: torch.Tensor) -> Any:
        return graph(*xla_device.barrier(tensors))

    return run


def _negate_truth_values(joint: fx.GraphModule) -> None:
    """Write ~ of truth values as logical_not.

    torch_xla 2.9 computes ~ of a truth value that enters a loop on its byte: ~1 becomes -2, which counts as true.
    """
    for node in joint.graph.nodes:
        if node.target is torch.ops.aten.bitwise_not.default and node.meta["val"].dtype is torch.bool:
            node.target = torch.ops.aten.logical_not.default


def _inputs_in_order(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Pass saved inputs to the backward graph in the order of the function's arguments.

    torch_xla 2.9's scan does not save inputs a second time. It restores them in the order of the arguments, whatever
    their positions in the partition, and would silently exchange two inputs of one shape.
    """
    order = [node.name for node in forward.graph.nodes if node.op == "placeholder"]
    output = next(node for node in forward.graph.nodes if node.op == "output")
    values = list(output.args[0])
    holders = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    saved = [
        at
        for at, value in enumerate(values)
        if isinstance(value, fx.Node) and value.name in order and value.name in holders
    ]
    in_order = sorted((values[at] for at in saved), key=lambda node: order.index(node.name))
    renamed = {values[at].name: node.name for at, node in zip(saved, in_order, strict=True)}
    for at, node in zip(saved, in_order, strict=True):
        values[at] = node
    output.args = (type(output.args[0])(values),)
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

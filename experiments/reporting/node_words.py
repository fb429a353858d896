"""How numbers are told whose trials ran on several nodes: by node, or marked as a mean over unequal machines."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from experiments.analysis.verdicts import ArmSummary, NodeMeans, Verdict
from experiments.reporting import wording

if TYPE_CHECKING:
    from experiments.records.receipts import Receipt

MOST_NODES = 3
"""Nodes whose rates are told one by one."""


def rate(arm: ArmSummary) -> str | None:
    """Write an arm's throughput: by node where it ran on several, or marked as a mean over many; None without one."""
    if arm.tokens_per_s is None:
        return None
    if arm.by_node is None:
        return f"{wording.number(arm.tokens_per_s, 4)} tokens/s"
    if len(arm.by_node) > MOST_NODES:
        return f"{wording.number(arm.tokens_per_s, 4)} tokens/s (mean over {len(arm.by_node)} nodes)"
    each = [f"{wording.number(found.tokens_per_s, 4)} on {node}" for node, found in arm.by_node.items()]
    return f"{wording.listed(each)} tokens/s"


def blocks_of(by_node: Mapping[str, NodeMeans]) -> str:
    """Say how many blocks ran where, for example "2 on cpu-1 and 1 on cpu-2"."""
    return wording.listed([f"{found.blocks:,} on {node}" for node, found in by_node.items()])


def of_baseline(verdict: Verdict) -> Mapping[str, NodeMeans] | None:
    """Return the nodes that the blocks ran on; None where it was one."""
    return verdict.arms[verdict.baseline].by_node


def caveat(verdict: Verdict) -> str | None:
    """Say that absolute rates are means over several nodes; None where one node ran all."""
    found = of_baseline(verdict)
    if found is None:
        return None
    return (
        f"Blocks ran on {len(found)} nodes ({blocks_of(found)}). An effect is taken within blocks, each on one node; "
        "a mean rate or time is over nodes of unequal speed."
    )


def _rates_by_node(by_node: Mapping[str, NodeMeans]) -> str:
    """Write blocks and throughput of every node, for example "cpu-1: 2 blocks, 701 tokens/s; cpu-2: 1 block"."""
    return "; ".join(f"{node}: {wording.counted(found.blocks, 'block')}{_at(found)}" for node, found in by_node.items())


def _at(found: NodeMeans) -> str:
    return "" if found.tokens_per_s is None else f", {wording.number(found.tokens_per_s, 4)} tokens/s"


def of_arm(summary: ArmSummary, receipts: Sequence["Receipt"]) -> str:
    """Say on which nodes an arm ran; where on several, with blocks and throughput of each."""
    if summary.by_node is not None:
        return _rates_by_node(summary.by_node)
    return ", ".join(sorted({receipt.environment.node_name for receipt in receipts}))

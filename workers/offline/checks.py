"""Checks before an air-gapped run: that this is the machine, and this the code, that the plan is for."""

from collections.abc import Iterator

from experiments.block_numbers import block_index
from experiments.design.fields import read_config
from experiments.digest import code_digest
from experiments.records.plan_file import PlanFile, differences
from model.errors import ConfigError
from workers.errors import ExecRefused
from workers.identity.node import Node


def refusals(plan_file: PlanFile, node: Node) -> Iterator[str]:
    """Yield why this node with this code cannot run the plan as it was made, in sentences."""
    plan = plan_file.plan
    if node.node_class.name != plan.node_class:
        yield f"this node is of class '{node.node_class}'; the plan asks for '{plan.node_class}'"
    if len(node.devices.devices) < plan.devices:
        yield f"this node has {len(node.devices.devices)} devices; the plan asks for {plan.devices}"
    found = differences(plan_file)
    yield from found
    if found:
        yield "the plan was made by another version of the code; plan the spec again with the code of this node"
        return
    for arm in plan.arms:
        try:
            read_config({**arm.config, "seed": plan.blocks[0].seed})
        except ConfigError as error:
            yield f"arm '{arm.name}': {error}"


def remarks(plan_file: PlanFile, node: Node) -> Iterator[str]:
    """Yield what does not stop a run but has to be known, in sentences."""
    here = code_digest()
    if plan_file.code_digest != here:
        yield (
            f"the plan was made beside other source files of kernels, model or workers ({plan_file.code_digest[:19]}; "
            f"here: {here[:19]}); arms and order are the same, and the receipts name the code that really runs"
        )
    yield from node.lacks


def parse_numbers(text: str, blocks: int) -> tuple[int, ...]:
    """Return the block indices that `text` names: numbers from 1 and ranges, such as "1-3,6"; "" means all.

    Raises ExecRefused for anything else.
    """
    if not text:
        return tuple(range(blocks))
    wanted: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdigit() for end in ends):
            raise ExecRefused(f"blocks {text!r} is not a list of numbers; allowed: for example 1-3 or 1,4,6")
        low, high = int(ends[0]), int(ends[1])
        if not 1 <= low <= high <= blocks:
            raise ExecRefused(f"blocks {part.strip()!r} is outside of the plan; allowed: 1-{blocks}")
        wanted.update(range(block_index(low), block_index(high) + 1))
    return tuple(sorted(wanted))

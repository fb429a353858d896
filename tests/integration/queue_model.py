"""An independent model of the scheduler, as simple as can be: lists and counts, no SQL and none of the service's code.

It knows the rules from the documentation and says, for every act, what the service has to answer. Time passes only when
the model is told so.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

MOST_BREAKS = {
    "user_error": 1, "oom": 1, "numerics": 1, "gate_refused": 1, "cancelled": 1, "timeout": 2, "no_receipt": 3,
    "invalid_measurement": 3, "disturbed": 2, "infra_node": 5, "infra_control": 5, "preempted": 10,
}  # fmt: skip
BY_ARM = ("timeout", "no_receipt")
"""Classes that every arm of a block uses up for itself."""
RESTS = ("infra_control", "invalid_measurement", "disturbed")
"""Classes after which a block rests from its first break on."""
RESTS_LATER = ("infra_node", "no_receipt")
"""Classes after which it rests from its second break on."""
OF_THE_CODE = ("user_error", "oom", "numerics", "gate_refused")
"""Classes that repeat in every block."""
ELSEWHERE = ("infra_node", "no_receipt", "invalid_measurement", "disturbed")
AGAINST_NODE = ("infra_node", "no_receipt")
NODE_BREAKS = 3
CATCH_UP = 3
"""Turns that an ablation may make up for at once after it was passed over."""


@dataclass
class Attempt:
    """One attempt at a block: where, and how it ended."""

    node: str
    work: str
    """The ablation."""
    ended: str = "running"
    """`running`, `done`, or the failure class."""
    arm: str | None = None
    took_s: float = 0.0


@dataclass
class Block:
    """One block of an ablation."""

    ablation: str
    index: int
    state: str = "queued"
    attempts: list[Attempt] = field(default_factory=list)
    rests: bool = False
    avoids: str | None = None

    def breaks(self, failure: str, arm: str | None) -> int:
        """How often it broke so."""
        same_arm = failure in BY_ARM
        return sum(one.ended == failure and (not same_arm or one.arm == arm) for one in self.attempts)


@dataclass
class Node:
    """One node of the only class."""

    name: str
    drained: bool = False
    quarantined: bool = False
    row: list[tuple[str, str, str]] = field(default_factory=list)
    """Breaks since its last finished block or since it was resumed: class, ablation, arm or attempt."""

    @property
    def works(self) -> bool:
        """Whether it takes work."""
        return not self.drained and not self.quarantined


class Model:
    """Everything that the service should know."""

    def __init__(self) -> None:
        self.blocks: dict[str, Block] = {}
        self.priorities: dict[str, int] = {}
        self.states: dict[str, str] = {}
        self.nodes: dict[str, Node] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        """Blocks given out while both of a pair of ablations could have had them: (whose, in comparison with whom)."""
        self.slack: Counter[str] = Counter()
        """Blocks of an ablation that rested, moved or came late: each may shift its turns by one."""
        self.numbers = 0
        self.passed: set[str] = set()
        """Ablations that a claim passed over because its worker had too little time."""
        self.limit_s = math.inf
        """Of a block."""

    def submit(self, ablation: str, block_ids: list[str], priority: int) -> None:
        """A new ablation, all of whose blocks wait."""
        self.priorities[ablation], self.states[ablation] = priority, "queued"
        for index, block_id in enumerate(block_ids):
            self.blocks[block_id] = Block(ablation, index)

    def expected_s(self, ablation: str) -> float:
        """How long a block should take: the mean of the finished ones, or the limit."""
        attempts = [one for block in self.blocks.values() if block.ablation == ablation for one in block.attempts]
        times = [one.took_s for one in attempts if one.ended == "done"]
        return sum(times) / len(times) if times else self.limit_s

    def claimable(self, node: str, left_s: float = math.inf) -> list[str]:
        """Return the blocks that a node may be given, by the first rule: the highest priority that is there for it.

        A node whose worker ends in `left_s` is given no block that should take longer.
        """
        in_time = {ablation for ablation in self.priorities if self.expected_s(ablation) <= left_s}
        others_work = any(other.works for name, other in self.nodes.items() if name != node)
        free = [
            block_id
            for block_id, block in self.blocks.items()
            if block.state == "queued"
            and not block.rests
            and (block.avoids != node or not others_work)
            and block.ablation in in_time
        ]
        if not self.nodes[node].works:
            return []
        top = max((self.priorities[self.blocks[block_id].ablation] for block_id in free), default=0)
        return [block_id for block_id in free if self.priorities[self.blocks[block_id].ablation] == top]

    def claim(self, node: str, block_id: str, left_s: float = math.inf, *, takes_s: float = 0.0) -> None:
        """Note what was given, and that nobody of the same priority was passed over more than once."""
        claimable = self.claimable(node, left_s)
        could = {self.blocks[one].ablation for one in claimable}
        self.passed |= {self.blocks[one].ablation for one in self.claimable(node)} - could
        block = self.blocks[block_id]
        ablation = block.ablation
        for other in could - {ablation}:
            ahead = self.counts[ablation, other] - self.counts[other, ablation]
            slack = 2 + self.slack[ablation] + self.slack[other] + CATCH_UP * bool({ablation, other} & self.passed)
            assert ahead < slack, (
                f"{ablation} was given {ahead + 1} blocks more than {other}, which waited all the time"
            )
            self.counts[ablation, other] += 1
        for pair in list(self.counts):
            if not set(pair) <= could:
                del self.counts[pair]
        lowest = min(self.blocks[one].index for one in claimable if self.blocks[one].ablation == ablation)
        assert block.index == lowest or any(one.attempts for one in self.blocks.values() if one.ablation == ablation)
        block.state, self.states[ablation] = "running", "running"
        self.numbers += 1
        block.attempts.append(Attempt(node, ablation, took_s=takes_s))

    def forget_pairs(self, ablation: str) -> None:
        """An ablation joined another queue: comparisons begin anew."""
        self.slack[ablation] += 1
        for pair in list(self.counts):
            if ablation in pair:
                del self.counts[pair]

    def done(self, block_id: str) -> None:
        """A whole block was reported."""
        block = self.blocks[block_id]
        block.state, block.attempts[-1].ended = "done", "done"
        self.nodes[block.attempts[-1].node].row = []

    def broke(self, block_id: str, failure: str, arm: str | None) -> str:
        """An attempt ended without a result; return the block's state."""
        block = self.blocks[block_id]
        attempt = block.attempts[-1]
        attempt.ended, attempt.arm = failure, arm
        if self.states[block.ablation] == "cancelling":
            block.state = "cancelled"
        elif block.breaks(failure, arm) >= MOST_BREAKS[failure]:
            block.state = "failed"
        else:
            block.state = "queued"
            self.slack[block.ablation] += 1
            often = sum(one.ended == failure for one in block.attempts)
            block.rests = failure in RESTS or (failure in RESTS_LATER and often > 1)
            others = [node for node in self.nodes.values() if node.name != attempt.node and node.works]
            block.avoids = attempt.node if failure in ELSEWHERE and others else None
        if failure in AGAINST_NODE:
            self._against(self.nodes[attempt.node], attempt)
        return block.state

    def _against(self, node: Node, attempt: Attempt) -> None:
        self.numbers += 1
        source = "" if attempt.ended == "no_receipt" else attempt.arm or f"attempt {self.numbers}"
        node.row.append((attempt.ended, attempt.work, source))
        elsewhere = {
            one.work
            for block in self.blocks.values()
            for one in block.attempts
            if one.ended in AGAINST_NODE and one.node != node.name
        }
        counted = [(work, source) for _, work, source in node.row if work not in elsewhere]
        if len(counted) >= NODE_BREAKS and len(set(counted)) > 1:
            node.quarantined = True

    def late(self, block_id: str, number: int) -> bool:
        """A result of attempt `number` of a block comes after its lease; return whether it is taken."""
        block = self.blocks[block_id]
        if block.state != "queued" or number != len(block.attempts) - 1:
            return False
        block.attempts[number].ended = "done"
        self.slack[block.ablation] += 1
        block.state = "done"
        return True

    def cancel(self, ablation: str) -> None:
        """A person ends an ablation."""
        own = [block for block in self.blocks.values() if block.ablation == ablation]
        for block in own:
            if block.state == "queued":
                block.state = "cancelled"
        self.states[ablation] = "cancelling"

    def settle(self, ablation: str) -> str:
        """Return the state that an ablation has now."""
        self._end_early([block for block in self.blocks.values() if block.ablation == ablation])
        by_state = Counter(block.state for block in self.blocks.values() if block.ablation == ablation)
        if self.states[ablation] in ("completed", "failed", "cancelled") or by_state["queued"] + by_state["running"]:
            return self.states[ablation]
        if self.states[ablation] == "cancelling" and by_state["cancelled"]:
            self.states[ablation] = "cancelled"
        else:
            self.states[ablation] = "completed" if by_state["done"] else "failed"
        return self.states[ablation]

    @staticmethod
    def _end_early(own: list[Block]) -> None:
        """If code or data could not be prepared for the only block that ended, cancel the waiting ones."""
        ended = [block for block in own if block.state in ("done", "failed")]
        last = ended[0].attempts[-1] if len(ended) == 1 else None
        if last is not None and last.ended in OF_THE_CODE and last.arm is None:
            for block in own:
                block.state = "cancelled" if block.state == "queued" else block.state

    def pass_time(self) -> None:
        """Let every pause, and every wish for another node, be over."""
        for block in self.blocks.values():
            block.rests, block.avoids = False, None

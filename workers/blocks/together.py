"""A block that this node runs together with others: when each trial begins and ends on all of them.

The nodes talk by heartbeats to the service, which stores the part of each node in a trial and returns those of the
others. The ranks of a trial talk directly.
"""

import time
from collections.abc import Callable

from experiments.records.messages import BlockNodes, ClaimedBlock, NodePart
from workers.processes.result import Meeting

PAUSE_S = 0.2
"""Between two looks at the other nodes while no trial runs here."""
PATIENCE_S = 10.0
"""How long the ranks of one node may go on after those of another have ended: some libraries notice no lost rank."""


class Together:
    """The parts of this node and of the others in the current trial."""

    def __init__(self, block: ClaimedBlock, nodes: BlockNodes, *, interface: str) -> None:
        self._attempt_id, self._nodes, self._interface = block.attempt_id, nodes, interface
        self.exchange: Callable[[], bool] = lambda: False
        """Sends a heartbeat now; returns whether the service accepted it."""
        self.part: NodePart | None = None
        """Of this node, for the next heartbeat."""
        self.others: tuple[NodePart, ...] = ()
        """Of the other nodes in the same trial, as far as they sent one."""
        self._ended_at: float | None = None
        """When another node was first seen to have ended the trial that runs here."""

    @property
    def is_first(self) -> bool:
        """Whether this node writes the receipts."""
        return self._nodes.own == 0

    @property
    def number_of_nodes(self) -> int:
        """Nodes that share the block."""
        return len(self._nodes.all)

    def name_of(self, place: int) -> str:
        """Return the name of the node whose part is at `place` of `others`, seen by the first node."""
        return self._nodes.all[place + 1].name

    def meeting(self, trial_id: str) -> Meeting:
        """Return where the ranks of a trial meet."""
        host, _colon, port = self._nodes.all[0].meeting.rpartition(":")
        return Meeting(
            number=self._nodes.own,
            nodes=self.number_of_nodes,
            host=host,
            port=int(port),
            name=f"{self._attempt_id}/{trial_id}",
            interface=self._interface,
        )

    def begin(self, trial_id: str, pause: Callable[[float], None]) -> None:
        """Wait until every node is ready to begin a trial. `pause` sleeps, and raises if the block has to stop."""
        self._send(NodePart(trial_id=trial_id), pause, until=lambda: len(self.others) == self.number_of_nodes - 1)

    def end(self, part: NodePart, pause: Callable[[float], None]) -> tuple[NodePart, ...]:
        """Send the part of this node in a trial that is over here; on the first node, return those of all others."""
        everywhere = self.number_of_nodes - 1 if self.is_first else 0
        self._send(part, pause, until=lambda: sum(one.over for one in self.others) >= everywhere)
        return self.others

    def _send(self, part: NodePart, pause: Callable[[float], None], *, until: Callable[[], bool]) -> None:
        self._ended_at = None
        if self.part is None or self.part.trial_id != part.trial_id:
            self.others = ()
        self.part = part
        while not (self.exchange() and until()):
            pause(PAUSE_S)

    def receive(self, sent: NodePart | None, others: tuple[NodePart, ...]) -> None:
        """Note the answer to a heartbeat with the part `sent`."""
        if sent is None or self.part is None or sent.trial_id != self.part.trial_id:
            return
        self.others = others
        if self._ended_at is None and any(one.over for one in others):
            self._ended_at = time.monotonic()

    def was_left(self) -> bool:
        """Whether the trial still runs here though another node ended it a while ago."""
        late = self._ended_at is not None and time.monotonic() - self._ended_at >= PATIENCE_S
        return late and self.part is not None and not self.part.over

"""This node as the service knows it: registered, asking for blocks, registered again where it was forgotten."""

import logging

import httpx

from experiments.records.messages import ClaimedBlock, ClaimRequest, NodeRegistered
from workers.devices.node_health import NodeHealth, device_state
from workers.errors import ApiRefused
from workers.identity.node import Node
from workers.leases.service_api import ServiceApi

_log = logging.getLogger(__name__)


class ServiceNode:
    """Speaks for this node, with the state of its devices at every word."""

    def __init__(self, api: ServiceApi, node: Node, health: NodeHealth, *, public_key: str | None) -> None:
        self._api = api
        self._node = node
        self._health = health
        self._public_key = public_key
        self.id = ""
        """As the service gave it out; empty before the first registration."""
        self.problem: str | None = None
        """Why this node takes no block, at the last look."""

    def register(self) -> NodeRegistered:
        """Tell the service what this node is and how it is."""
        self._look()
        found = self._node.registration(self._public_key).model_copy(
            update={
                "lanes": self._health.lanes,
                "device_state": device_state(self.problem),
                "device_reason": self.problem,
            }
        )
        registered = self._api.register(self._node.name, found)
        self.id = registered.node_id
        return registered

    def claim(self) -> ClaimedBlock | None:
        """Ask for a block; a service that does not know this node, after a restore of its database, is told again."""
        try:
            return self._ask()
        except ApiRefused as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise
        self.register()
        _log.warning("the service did not know this node any more; it is registered again as %s", self.id)
        return self._ask()

    def _ask(self) -> ClaimedBlock | None:
        self._look()
        return self._api.claim(
            ClaimRequest(node_id=self.id, device_state=device_state(self.problem), device_reason=self.problem)
        )

    def _look(self) -> None:
        before, self.problem = self.problem, self._health.problem()
        if self.problem != before:
            _log.error("takes no block: %s", self.problem) if self.problem else _log.warning("takes blocks again")

"""Enrolment: a worker that a cluster started, with an enrolment token and no key, makes itself a node of its own.

The node has the name of its allocation and leaves with it. Its key is in the memory of this process only.
"""

import logging
import re
import secrets
from dataclasses import dataclass

from pydantic import SecretStr

from ablate.experiments.digest import digest_bytes
from ablate.experiments.ids import fresh_secret
from ablate.experiments.records.messages import Enrolment
from ablate.workers.environment_variables import allocation_of_cluster
from ablate.workers.errors import WorkerError
from ablate.workers.leases.service_api import ServiceApi, service_api
from ablate.workers.settings import Settings

_log = logging.getLogger(__name__)

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_MOST_OF_A_NAME = 56
"""Letters of the host and of the allocation in a node's name, each."""


@dataclass(frozen=True, kw_only=True)
class Enroller:
    """What a worker needs to make itself a node."""

    settings: Settings
    """With the name of the new node and its key."""
    allocation: str
    token: str

    def enrol(self, node_class: str) -> None:
        """Let the service accept the key; a repetition after a lost answer uses nothing up. Raises ApiUnreachable."""
        api = service_api(self.settings, token=self.token)
        try:
            key = self.settings.read_token() or ""
            api.enrol(self.settings.node_name, Enrolment(node_class=node_class, key_digest=digest_bytes(key.encode())))
        finally:
            api.close()
        _log.info("enrolled as node %s of allocation %s", self.settings.node_name, self.allocation)

    def leave(self, api: ServiceApi) -> None:
        """End the node, because this worker ends. If that fails, the service does so after the allocation's time."""
        try:
            api.leave(self.settings.node_name)
        except WorkerError as error:
            _log.warning("this node stays listed until its time is over: %s", error)


def enroller(settings: Settings) -> Enroller | None:
    """Return the enroller of a worker without a key that has an enrolment token; None for another worker."""
    token = None if settings.read_token() is not None else settings.read_enrolment_token()
    if token is None:
        return None
    named = settings.allocation or allocation_of_cluster() or f"run-{secrets.token_hex(4)}"
    allocation = _NOT_IN_A_NAME.sub("-", named).strip("._-")[:_MOST_OF_A_NAME]
    host = settings.node_name[:_MOST_OF_A_NAME]
    parts = [allocation] if allocation.endswith(host) else [host, allocation]
    own = {"node_name": "-".join([*parts, secrets.token_hex(3)]), "worker_token": SecretStr(fresh_secret())}
    return Enroller(settings=settings.model_copy(update=own), allocation=allocation, token=token)

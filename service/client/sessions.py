"""The part of the Python client about sessions: many proposals under one error budget."""

import uuid
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from ablate.service.client.connection import Connection, named, parsed
from ablate.service.schemas.sessions import (
    ProposalAccepted,
    ProposalAnswer,
    ProposalPublic,
    SessionList,
    SessionPath,
    SessionPublic,
)

if TYPE_CHECKING:
    from ablate.service.client.ablations import Ablations
    from ablate.service.schemas.submissions import SpecBody


class Sessions:
    """Calls about sessions."""

    def __init__(self, connection: Connection, ablations: "Ablations") -> None:
        self._connection = connection
        self._ablations = ablations

    def open(self, name: str, spec: "SpecBody | Mapping[str, Any] | str | PathLike[str]") -> SessionPath:
        """Open a session whose incumbent is the baseline of a spec, a mapping or the path of a file."""
        return parsed(SessionPath, self._send("/v1/sessions/{name}:open", name, spec, {}))

    def propose(
        self,
        name: str,
        spec: "SpecBody | Mapping[str, Any] | str | PathLike[str]",
        *,
        idempotency_key: str | None = None,
    ) -> ProposalAccepted:
        """Submit the one variant of a spec as the next proposal; the same key and spec give the same proposal."""
        key = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        return parsed(ProposalAccepted, self._send("/v1/sessions/{name}:try", name, spec, key))

    def _send(self, route: str, name: str, spec: Any, headers: Mapping[str, str]) -> Any:
        from ablate.service.schemas.submissions import SpecBody

        body = SpecBody.of(spec)
        self._ablations.send_code(body.archives)
        headers = {"Content-Type": body.content_type, **headers}
        return self._connection.call("POST", named(route, name), content=body.content, headers=headers)

    def wait(self, accepted: ProposalAccepted, *, timeout_s: float | None = None) -> ProposalPublic:
        """Wait for the answer to a proposal and return it. Raises StillRunning, Unreachable."""
        self._ablations.wait(accepted.accepted.id, timeout_s=timeout_s)
        return self.answer(accepted).proposal

    def answer(self, accepted: ProposalAccepted) -> ProposalAnswer:
        """Return a proposal and its session as they are now."""
        session = self.get(accepted.session)
        proposal = session.path[accepted.number - 1]
        return ProposalAnswer(outcome=proposal.outcome, proposal=proposal, session=session)

    def get(self, name: str) -> SessionPath:
        """Return a session with its proposals, and a spec to begin the next one with."""
        return self._connection.get(named("/v1/sessions/{name}", name), SessionPath)

    def list(self) -> list[SessionPublic]:
        """Return all sessions, newest first."""
        return self._connection.get("/v1/sessions", SessionList).items

    def close(self, name: str) -> SessionPath:
        """Close a session; it takes no more proposals."""
        return self._connection.post(named("/v1/sessions/{name}:close", name), SessionPath)

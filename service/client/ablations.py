"""The parts of the Python client about ablations and trials."""

import io
import math
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from os import PathLike
from typing import TYPE_CHECKING, Any

import httpx

from ablate.experiments.ids import id_pattern
from ablate.experiments.outcomes import AblationState
from ablate.service.client.connection import PAUSE_S, ClientError, Connection, Refused, Unreachable, checked, parsed
from ablate.service.lifecycle import OVER, EventKind
from ablate.service.schemas.ablations import AblationPublic, BlockPublic, Event, TrialPublic
from ablate.service.schemas.problems import Problem

if TYPE_CHECKING:
    from ablate.experiments.analysis.verdicts import Verdict
    from ablate.experiments.records.code_archive import PackedCode
    from ablate.experiments.records.plan_file import PlanFile
    from ablate.experiments.records.receipt_check import SignedReceipt
    from ablate.service.schemas.share_links import ShareLink, ShareLinkPublic
    from ablate.service.schemas.submissions import AblationAccepted, CodeShared, ImportPublic, PlanPublic, SpecBody

_STREAM_TIMEOUT = httpx.Timeout(60.0, connect=3.0)
_WATCH_PATIENCE_S = 60.0
"""How long `watch` and `wait` retry while the service does not answer."""
_POLL_S = 2.0
"""Between two polls of `wait`, which cost the service less than a stream."""
_REPORT_PATIENCE_S = 60.0
_LAST_PLACE = 999_999_999
"""Largest place in a cursor."""
_ID = re.compile(id_pattern("abl"))


class StillRunning(ClientError):
    """An ablation was not over at the end of the waiting time; it goes on."""


class Ablations:
    """Calls about ablations."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def plan(self, spec: "SpecBody | Mapping[str, Any] | str | PathLike[str]") -> "PlanPublic":
        """Return the plan of a spec, a mapping or the path of a file, without running it."""
        from ablate.service.schemas.submissions import PlanPublic, SpecBody

        body = SpecBody.of(spec)
        answer = self._connection.call(
            "POST", "/v1/ablations:plan", content=body.content, headers={"Content-Type": body.content_type}
        )
        return parsed(PlanPublic, answer)

    def submit(
        self, spec: "SpecBody | Mapping[str, Any] | str | PathLike[str]", *, idempotency_key: str | None = None
    ) -> "AblationAccepted":
        """Submit a spec, a mapping or the path of a file; the same key and spec give the same ablation."""
        from ablate.service.schemas.submissions import AblationAccepted, SpecBody

        body = SpecBody.of(spec)
        self.send_code(body.archives)
        headers = {"Content-Type": body.content_type, "Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        answer = self._connection.call("POST", "/v1/ablations", content=body.content, headers=headers)
        return parsed(AblationAccepted, answer)

    def send_code(self, archives: "Sequence[PackedCode]") -> None:
        """Send the archives that the service lacks."""
        from ablate.service.schemas.submissions import CodeMissing

        if not archives:
            return
        wanted = {"digests": [archive.digest for archive in archives]}
        missing = self._connection.post("/v1/code:find", CodeMissing, wanted).missing
        for archive in archives:
            if archive.digest in missing:
                self._connection.call(
                    "POST",
                    "/v1/code:upload",
                    params={"digest": archive.digest},
                    content=_Resent(archive),
                    headers={"Content-Type": "application/gzip", "Content-Length": str(archive.size)},
                )

    def code(self, digest: str) -> bytes:
        """Return an archive of code that this token may use."""
        return self._connection.call("GET", f"/v1/code/{digest}").content

    def import_bundles(
        self, bundles: Sequence[Mapping[str, bytes]], *, trust: Sequence[str] = (), unsigned: bool = False
    ) -> "ImportPublic":
        """Import the bundles of one plan, each a mapping from path to content; repeating it changes nothing.

        The service trusts the keys in `trust` from now on. `unsigned` allows bundles without a signature.
        """
        from ablate.service.schemas.submissions import ImportPublic

        answer = self._connection.call(
            "POST",
            "/v1/ablations:import",
            content=_archive(bundles),
            headers={"Content-Type": "application/x-tar"},
            params={"trust": list(trust), "unsigned": unsigned},
        )
        return parsed(ImportPublic, answer)

    def register_plan(self, file: "PlanFile") -> "PlanFile":
        """Count a plan's questions as asked from now on; return the plan with the seeds that the service drew.

        Raises PlanFileError if this version does not make the plan that the service registered.
        """
        from ablate.experiments.errors import PlanFileError
        from ablate.experiments.records.plan_file import plan_file_text, registered_file
        from ablate.service.schemas.submissions import PlanRegistered

        content, headers = plan_file_text(file), {"Content-Type": "application/json"}
        answer = self._connection.call("POST", "/v1/plans:register", content=content, headers=headers)
        own = parsed(PlanRegistered, answer)
        whole = registered_file(file, own.seeds, own.registered)
        if whole.digest != own.digest:
            raise PlanFileError(f"the service registered plan {own.digest}; this version makes {whole.digest}")
        return whole

    def find(self, name: str) -> AblationPublic:
        """Return the ablation of a name, an id or an unambiguous prefix, or the newest for `latest`."""
        return self._connection.get("/v1/ablations:find", AblationPublic, params={"name": name})

    def id_of(self, name: str) -> str:
        """Return the id of the ablation that `find` returns; a whole id is returned unchanged."""
        return name if _ID.fullmatch(name) else self.find(name).id

    def wait(
        self, name: str, *, timeout_s: float | None = None, each: Callable[[AblationPublic], object] | None = None
    ) -> AblationPublic:
        """Wait until an ablation is over and has its verdict, if it gets one; return it. `each` gets its states so far.

        Raises StillRunning after `timeout_s`, and Unreachable when the service stays away for a minute.
        """
        ablation_id, began, answered_at = self.id_of(name), time.monotonic(), time.monotonic()
        while True:
            try:
                row, answered_at = self.get(ablation_id), time.monotonic()
                if self._is_judged(row):
                    return row
                if each is not None:
                    each(row)
            except Unreachable:
                if time.monotonic() - answered_at > _WATCH_PATIENCE_S:
                    raise
            left_s = math.inf if timeout_s is None else began + timeout_s - time.monotonic()
            if left_s <= 0:
                raise _still_running(ablation_id, timeout_s)
            time.sleep(min(_POLL_S, left_s))

    def _is_judged(self, row: AblationPublic) -> bool:
        """Return whether the ablation is over and nothing more comes; the verdict follows a moment later."""
        if row.state not in OVER or row.state == AblationState.CANCELLED:
            return row.state in OVER
        return self._has_verdict(row.id)

    def _has_verdict(self, ablation_id: str) -> bool:
        try:
            self.verdict(ablation_id)
        except Refused as refusal:
            if refusal.problem.status == HTTPStatus.CONFLICT:
                return False
            raise
        return True

    def get(self, ablation_id: str) -> AblationPublic:
        """Return one ablation."""
        return self._connection.get(f"/v1/ablations/{ablation_id}", AblationPublic)

    def list(
        self, *, state: str | None = None, label: str | None = None, name: str | None = None, owner: str | None = None
    ) -> Iterator[AblationPublic]:
        """Yield ablations, newest first; `owner` is the name of the token that submitted them."""
        wanted = {"state": state, "label": label, "name": name, "owner": owner}
        return self._connection.pages("/v1/ablations", AblationPublic, wanted)

    def blocks(self, ablation_id: str) -> Iterator[BlockPublic]:
        """Yield the blocks of one ablation."""
        return self._connection.pages(f"/v1/ablations/{ablation_id}/blocks", BlockPublic, {})

    def trials(self, ablation_id: str, *, from_block: int = 0) -> Iterator[TrialPublic]:
        """Yield the trials of one ablation in order, from the block with this index on."""
        cursor = f"{from_block - 1}.{_LAST_PLACE}" if from_block else None
        return self._connection.pages(f"/v1/ablations/{ablation_id}/trials", TrialPublic, {"cursor": cursor})

    def cancel(self, ablation_id: str) -> AblationPublic:
        """Cancel an ablation; it is `cancelling` until its worker has stopped."""
        return self._connection.post(f"/v1/ablations/{ablation_id}:cancel", AblationPublic)

    def share(self, ablation_id: str, *, hours: float) -> "ShareLink":
        """Return a new link that shows the report to anybody for some hours."""
        from ablate.service.schemas.share_links import ShareLink

        return self._connection.post_once(f"/v1/ablations/{ablation_id}:share", ShareLink, {"hours": hours})

    def share_code(self, ablation_id: str, *, name: str) -> "CodeShared":
        """Let the token `name` submit with the code of an ablation; return what it could not use before."""
        from ablate.service.schemas.submissions import CodeShared

        return self._connection.post(f"/v1/ablations/{ablation_id}:share-code", CodeShared, {"name": name})

    def shares(self, ablation_id: str) -> "Sequence[ShareLinkPublic]":
        """Return the share links of an ablation, newest first."""
        from ablate.service.schemas.share_links import ShareLinkList

        return self._connection.get(f"/v1/ablations/{ablation_id}/shares", ShareLinkList).items

    def end_share(self, ablation_id: str, share_id: str) -> "Sequence[ShareLinkPublic]":
        """End a share link now; return all links of the ablation."""
        from ablate.service.schemas.share_links import ShareLinkList

        return self._connection.post(f"/v1/ablations/{ablation_id}/shares/{share_id}:revoke", ShareLinkList).items

    def set_priority(self, ablation_id: str, priority: int) -> AblationPublic:
        """Change the priority of an ablation's waiting blocks; higher runs first."""
        answer = self._connection.call("PATCH", f"/v1/ablations/{ablation_id}", json={"priority": priority})
        return parsed(AblationPublic, answer)

    def verdict(self, ablation_id: str) -> "Verdict":
        """Return the verdict. Raises Refused (409) before there is one."""
        from ablate.experiments.analysis.verdicts import Verdict

        return self._connection.get(f"/v1/ablations/{ablation_id}/verdict", Verdict)

    def spec(self, ablation_id: str) -> "SpecBody":
        """Return the spec as it was submitted."""
        from ablate.service.schemas.submissions import SpecBody, SpecText

        spec = self._connection.get(f"/v1/ablations/{ablation_id}/spec", SpecText)
        return SpecBody(content=spec.text.encode(), content_type=spec.content_type)

    def report(self, ablation_id: str, *, patience_s: float = _REPORT_PATIENCE_S) -> str:
        """Return the report as one HTML page. Raises Refused (409) if there is none.

        The report follows the verdict by some seconds; this waits for it, at most `patience_s`.
        """
        until = time.monotonic() + patience_s
        while True:
            try:
                return self._connection.call("GET", f"/v1/ablations/{ablation_id}/report").text
            except Refused as refusal:
                comes = refusal.problem.status == HTTPStatus.CONFLICT and self._has_verdict(ablation_id)
                if not comes or time.monotonic() > until:
                    raise
            time.sleep(PAUSE_S)

    def watch(self, ablation_id: str, *, after: int = 0) -> Iterator[Event]:
        """Yield the events after sequence number `after` up to `end`; reconnects when the connection breaks.

        Raises Unreachable when the service stays away for a minute.
        """
        lost_at: float | None = None
        while True:
            try:
                for event in self._stream(ablation_id, after):
                    lost_at, after = None, max(after, event.seq)
                    yield event
                    if event.kind == EventKind.END:
                        return
            except httpx.TransportError as error:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > _WATCH_PATIENCE_S:
                    raise self._connection.unreachable(error) from error
            time.sleep(PAUSE_S)

    def _stream(self, ablation_id: str, after: int) -> Iterator[Event]:
        import httpx_sse

        path, headers = f"/v1/ablations/{ablation_id}/events", {"Last-Event-ID": str(after)}
        with httpx_sse.connect_sse(
            self._connection.http, "GET", path, headers=headers, timeout=_STREAM_TIMEOUT
        ) as source:
            if not source.response.is_success:
                source.response.read()
                checked(source.response)
            for message in source.iter_sse():
                if not message.data:  # a keep-alive comment
                    continue
                yield Event.of(message.event, message.id, message.json())


class _Resent:
    """A body that begins anew with each request, so that a request may be repeated."""

    def __init__(self, archive: "PackedCode") -> None:
        self._archive = archive

    def __iter__(self) -> Iterator[bytes]:
        return self._archive.pieces()


def _archive(bundles: Sequence[Mapping[str, bytes]]) -> bytes:
    """Return a compressed tar archive with one folder for each bundle."""
    import tarfile

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for number, files in enumerate(bundles, start=1):
            for path, content in files.items():
                member = tarfile.TarInfo(f"bundle-{number}/{path}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def _still_running(ablation_id: str, timeout_s: float | None) -> StillRunning:
    detail = f"{ablation_id} is not over after {timeout_s:g} s; it goes on: ablate watch {ablation_id}"
    return StillRunning(Problem(title="Still running", detail=detail))


class Trials:
    """Calls about trials."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def receipt(self, trial_id: str) -> "SignedReceipt":
        """Return the receipt of a trial with its block's signature. Raises Refused before there is one."""
        from ablate.experiments.records.receipt_check import SignedReceipt

        return self._connection.get(f"/v1/trials/{trial_id}/receipt", SignedReceipt)

    def log(self, trial_id: str, *, offset: int = 0) -> tuple[str, int]:
        """Return the log from a byte offset on, and the offset of its end."""
        answer = self._connection.call("GET", f"/v1/trials/{trial_id}/log", params={"offset": offset})
        return answer.text, int(answer.headers["X-Log-End-Offset"])

"""Finished blocks on disk until the service has answered: they survive its absence, and the end of this worker."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from experiments.documents import Frozen
from experiments.records.messages import BlockReport
from workers.errors import ApiRefused, ApiUnreachable, StaleLease

_log = logging.getLogger(__name__)

FOLDER = "spool"
"""Below the state folder."""

_KEY_TROUBLE = frozenset({401, 403})
"""Refusals that say nothing of the report: the worker key is wrong, and another one may come."""

Send = Callable[[str, BlockReport], None]


class SpooledReport(Frozen):
    """The report of one attempt."""

    attempt_id: str
    report: BlockReport


class Spool:
    """Reports that the service has not taken yet, each in a file that its owner alone can read: it holds a token."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, attempt_id: str, report: BlockReport) -> None:
        """Write a report so that it is there after a power failure, or not at all. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self._folder / f"{attempt_id}.part"
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(SpooledReport(attempt_id=attempt_id, report=report).model_dump_json())
            file.flush()
            os.fsync(handle)
        part.replace(self._folder / f"{attempt_id}.json")

    def waiting(self) -> list[Path]:
        """Return the files of all reports that are kept, oldest first: ids sort by time."""
        return sorted(self._folder.glob("*.json"))

    def send_all(self, send: Send) -> None:
        """Send what is kept; a report goes when the service has taken or refused it.

        Raises:
            ApiUnreachable: the service does not answer; the rest is kept.
            ApiRefused: the worker key is not accepted; the rest is kept.

        """
        for path in self.waiting():
            kept = _read(path)
            if kept is not None:
                _send(kept, send)
                path.unlink()


def _read(path: Path) -> SpooledReport | None:
    try:
        return SpooledReport.model_validate_json(path.read_bytes())
    except ValidationError as error:
        _log.error("%s is no report (%s); it is left there, as %s.bad", path, error.errors()[0]["msg"], path.name)
        path.rename(path.with_name(path.name + ".bad"))
        return None


def _send(kept: SpooledReport, send: Send) -> None:
    try:
        send(kept.attempt_id, kept.report)
    except StaleLease as error:
        _log.warning("attempt %s does not count any more: %s", kept.attempt_id, error)
    except ApiRefused as error:
        if error.status in _KEY_TROUBLE:
            raise
        _log.error("attempt %s is refused: %s", kept.attempt_id, error)
    except ApiUnreachable as error:
        raise ApiUnreachable(f"attempt {kept.attempt_id} is kept and sent later: {error}") from error

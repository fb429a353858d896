"""Reports on disk until the service has answered: they survive its absence, and the end of this worker."""

import logging
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from ablate.experiments.documents import Frozen, first_problem, move_aside, write_whole
from ablate.experiments.records.identity import BlockReport
from ablate.workers.errors import ApiRefused, ApiUnreachable, StaleLease

_log = logging.getLogger(__name__)

FOLDER = "spool"
"""Below the state folder."""

_KEY_TROUBLE = frozenset({401, 403})
"""The service rejects the worker key, not the report: the operator may replace the key."""

SendReport = Callable[[str, BlockReport], None]


class SpooledReport(Frozen):
    """The report of one attempt."""

    attempt_id: str
    report: BlockReport


class Spool:
    """Reports that the service has not accepted yet. Each file contains a token, so only its owner can read it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, attempt_id: str, report: BlockReport) -> None:
        """Write a report so that a power failure leaves all of it or nothing. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = SpooledReport(attempt_id=attempt_id, report=report).model_dump_json()
        write_whole(self._folder / f"{attempt_id}.json", text, mode=0o600)

    def waiting(self) -> list[Path]:
        """Return the files of all reports, oldest first: ids sort by time."""
        return sorted(self._folder.glob("*.json"))

    def send_all(self, send: SendReport) -> None:
        """Send all reports, and delete each that the service accepts or rejects.

        Raises:
            ApiUnreachable: the service does not answer; the other reports stay.
            ApiRefused: the service rejects the worker key; the other reports stay.

        """
        for path in self.waiting():
            spooled = _read(path)
            if spooled is not None:
                _send(spooled, send)
                path.unlink()


def _read(path: Path) -> SpooledReport | None:
    try:
        return SpooledReport.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else error.strerror
        _log.error("%s is no report (%s); it is renamed to %s", path, reason, move_aside(path).name)
        return None


def _send(spooled: SpooledReport, send: SendReport) -> None:
    try:
        send(spooled.attempt_id, spooled.report)
    except StaleLease as error:
        _log.warning("attempt %s no longer counts: %s", spooled.attempt_id, error)
    except ApiRefused as error:
        if error.status in _KEY_TROUBLE:
            raise
        _log.error("the service rejected attempt %s: %s", spooled.attempt_id, error)
    except ApiUnreachable as error:
        raise ApiUnreachable(f"the report of attempt {spooled.attempt_id} is stored and sent later: {error}") from error

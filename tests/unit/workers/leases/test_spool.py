from pathlib import Path

import pytest

from ablate.workers.leases.spool import Spool


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\0", None])
def test_a_damaged_report_is_renamed_and_stops_nothing(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "att_1.json"
    path.mkdir() if content is None else path.write_bytes(content)
    sent: list[str] = []
    Spool(tmp_path).send_all(lambda attempt_id, _report: sent.append(attempt_id))
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("att_1.json.damaged-")
    assert sent == []

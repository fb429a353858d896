"""`ablate offline trace`: the profiled step of a stored receipt, and what it says without one."""

import json
from pathlib import Path

import pytest

from ablate.experiments.outcomes import ExitCode
from tests import views
from tests.cli import ablate
from tests.factories import make_plan, make_receipt


def stored(tmp_path: Path, **changes: object) -> str:
    """Return the path of a file with a receipt."""
    path = tmp_path / "receipt.json"
    path.write_text(make_receipt(make_plan(), 0, "psiv-on", **changes).model_dump_json(), encoding="utf-8")
    return str(path)


def test_a_receipt_gives_its_trace(tmp_path: Path) -> None:
    done = ablate("offline", "trace", stored(tmp_path, step_trace=views.trace(5)), "-o", str(tmp_path / "trace.json"))
    assert done.code == 0, done.err
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2
    assert next(event["args"]["name"] for event in events if event["name"] == "process_name").endswith(": psiv-on")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "workload.profile: true"), ("[{}, {}]", "has 2 receipts"), ("[]", "neither a receipt nor a list")],
)
def test_without_a_trace_it_says_why(tmp_path: Path, content: str | None, message: str) -> None:
    path = stored(tmp_path)
    if content is not None:
        Path(path).write_text(content, encoding="utf-8")
    done = ablate("offline", "trace", path)
    assert done.code == ExitCode.ERROR
    assert message in " ".join(done.err.split())

"""What the container tests ask of the running service, as a person or a program outside would."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

SPEC = Path(__file__).with_name("six-blocks.yaml")
MLFLOW = "http://127.0.0.1:8322"


def ablate(environment: dict[str, str], *words: str) -> str:
    """Run the program and return what it printed."""
    program = [str(Path(sys.executable).with_name("ablate")), *words]
    found = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert found.returncode in range(5), found.stderr
    return found.stdout


def headers(environment: dict[str, str]) -> dict[str, str]:
    return {"Authorization": f"Bearer {environment['ABLATE_TOKEN']}"}


def get(environment: dict[str, str], path: str) -> dict[str, Any]:
    """Return an answer of the API; {} while no part of it answers."""
    try:
        answer = httpx.get(environment["ABLATE_URL"] + path, headers=headers(environment), timeout=10)
        return answer.json() if answer.status_code == httpx.codes.OK else {}
    except httpx.TransportError:
        return {}


def done(ablation: dict[str, Any]) -> int:
    return ablation.get("blocks", {}).get("done", 0)


def over(ablation: dict[str, Any]) -> dict[str, Any] | None:
    return ablation if ablation.get("state") in {"completed", "failed"} else None


def eventually(look, what: str, patience_s: float = 300.0):
    """Wait until `look` finds something, and return it."""
    deadline = time.monotonic() + patience_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what} did not happen within {patience_s:.0f} s"
        time.sleep(1)
    return found

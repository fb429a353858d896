"""What the container tests ask of the running service, as a person or a program outside would."""

import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.containers import compose_stack as stack

log = logging.getLogger(__name__)

CLIENT = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
"""A new connection for every request, without the proxy that tests/conftest.py names, where nobody listens."""
SPEC = Path(__file__).with_name("six-blocks.yaml")
OUTBOX = (
    "import urllib.request as u; lines = u.urlopen('http://127.0.0.1:8321/metrics').read().decode().splitlines();"
    "print(sum(float(l.split()[-1]) for l in lines if l.startswith('ablate_outbox_rows{')))"
)


def mlflow_url() -> str:
    """Return MLflow's published address with the account of the service."""
    return f"http://ablate:{(stack.ROOT / 'secrets' / 'mlflow_password').read_text()}@127.0.0.1:8322"


def ablate(environment: dict[str, str], *words: str) -> str:
    """Run the program and return what it printed."""
    program = [str(Path(sys.executable).with_name("ablate")), *words]
    process = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert process.returncode in range(5), process.stderr
    return process.stdout


def headers(environment: dict[str, str]) -> dict[str, str]:
    return {"Authorization": f"Bearer {environment['ABLATE_TOKEN']}"}


def answer(environment: dict[str, str], path: str) -> httpx.Response:
    """Return an answer of the API, with any status."""
    return CLIENT.get(environment["ABLATE_URL"] + path, headers=headers(environment), timeout=10)


def get(environment: dict[str, str], path: str) -> dict[str, Any]:
    """Return a good answer of the API to the first request."""
    began = time.monotonic()
    try:
        got = answer(environment, path)
    except httpx.TransportError as error:
        raise AssertionError(f"GET {path}: {error!r} after {time.monotonic() - began:.1f} s") from error
    took = f"after {time.monotonic() - began:.1f} s"
    assert got.status_code == httpx.codes.OK, f"GET {path}: {got.status_code} {took}: {got.text[:500]}"
    return got.json()


def get_if_up(environment: dict[str, str], path: str) -> dict[str, Any]:
    """Return an answer of the API while parts of it restart; {} for any but a good one, which is logged."""
    try:
        return get(environment, path)
    except AssertionError as error:
        log.warning("%s", error)
        return {}


def outbox_rows() -> float:
    """Return how many verdicts, reports and projections wait."""
    return float(stack.engine("exec", stack.container("api"), "python", "-c", OUTBOX))


def done(ablation: dict[str, Any]) -> int:
    return ablation.get("blocks", {}).get("done", 0)


def over(ablation: dict[str, Any]) -> dict[str, Any] | None:
    return ablation if ablation.get("state") in {"completed", "failed"} else None


def eventually(look, what: str, patience_s: float = 300.0):
    """Wait until `look` finds something, and return it."""
    deadline = time.monotonic() + patience_s
    while not (result := look()):
        assert time.monotonic() < deadline, f"{what} did not happen within {patience_s:.0f} s"
        time.sleep(1)
    return result

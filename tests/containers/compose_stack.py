"""The compose file as a test runs it: with Docker, or with podman-compose where there is no Docker engine.

podman 4 neither waits for health nor starts a chain of dependencies, so services are started one after another in the
order of `depends_on`, and health is asked for.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVICES = ("postgres", "redis", "mlflow", "migrate", "api", "background", "gateway", "worker-cpu")
"""In the order in which they start."""
WITH_HEALTH = ("postgres", "redis", "mlflow", "api")


def _docker_answers() -> bool:
    """Tell whether a Docker engine runs here; the client alone does not help."""
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    return (
        shutil.which("docker") is not None and not subprocess.run(command, capture_output=True, check=False).returncode
    )


ENGINE = "docker" if _docker_answers() else "podman"
COMPOSE = ("docker", "compose") if ENGINE == "docker" else ("podman-compose",)


def why_not() -> str | None:
    """Return why the compose file cannot be run here, or None."""
    if shutil.which(COMPOSE[0]) is None:
        return "neither a Docker engine nor podman-compose is here"
    missing = [
        image
        for image in images()
        if subprocess.run([ENGINE, "image", "inspect", image], capture_output=True, check=False).returncode
    ]
    return f"images are missing: {', '.join(missing)}; build them first (docker/README.md)" if missing else None


def images() -> tuple[str, ...]:
    """Return the images that the compose file names."""
    own = tuple(
        f"localhost/{name}:local" if ENGINE == "podman" else f"{name}:local"
        for name in ("ablate-service", "ablate-mlflow", "ablate-worker-cpu")
    )
    return (*own, "docker.io/library/postgres:16", "docker.io/library/redis:7", "docker.io/library/nginx:1")


def compose(*words: str, timeout_s: float = 300.0) -> str:
    """Run a compose command; raise with its output when it fails."""
    found = subprocess.run(
        [*COMPOSE, "-f", str(ROOT / "compose.yaml"), *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=ROOT,
    )
    if found.returncode:
        raise RuntimeError(f"compose {' '.join(words)} failed:\n{found.stdout}\n{found.stderr}")
    return found.stdout


def container(service: str) -> str:
    """Return the name of the container of `service`."""
    return f"ablate_{service}_1" if ENGINE == "podman" else f"ablate-{service}-1"


def engine(*words: str, check: bool = True, timeout_s: float = 120.0) -> str:
    """Run a command of the container engine; return what it printed, both ways."""
    found = subprocess.run([ENGINE, *words], capture_output=True, text=True, timeout=timeout_s, check=False)
    if check and found.returncode:
        raise RuntimeError(f"{ENGINE} {' '.join(words)} failed: {found.stderr}")
    return found.stdout + found.stderr


def wait_healthy(service: str, *, patience_s: float = 400.0) -> None:
    """Run the health check of `service` until it passes."""
    deadline = time.monotonic() + patience_s
    while not _is_healthy(service):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{service} is not healthy: {engine('logs', container(service), check=False)[-2000:]}")
        time.sleep(1)


def _is_healthy(service: str) -> bool:
    if ENGINE == "docker":
        return engine("inspect", "--format", "{{.State.Health.Status}}", container(service)).strip() == "healthy"
    command = [ENGINE, "healthcheck", "run", container(service)]
    return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0


@contextmanager
def running() -> Iterator[dict[str, str]]:
    """Start everything from nothing; yield the environment of a client; remove everything, volumes too."""
    compose("down", "--volumes")
    subprocess.run([str(ROOT / "docker" / "make-secrets.sh")], check=True, cwd=ROOT, capture_output=True)
    try:
        for service in SERVICES:
            compose("up", "-d", "--no-build", "--no-deps", service)
            if service in WITH_HEALTH:
                wait_healthy(service)
            elif service == "migrate":
                assert engine("wait", container(service)).strip().startswith("0")
        token = (ROOT / "secrets" / "ablate_admin_token").read_text()
        yield {**os.environ, "ABLATE_URL": "http://127.0.0.1:8321", "ABLATE_TOKEN": token}
    finally:
        compose("down", "--volumes")

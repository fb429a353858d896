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

from tests.console_blocks import commands_of, without_comment

ROOT = Path(__file__).parents[2]
SERVICES = ("postgres", "redis", "mlflow", "migrate", "api", "background", "gateway", "worker-cpu")
"""In the order in which they start."""
COUNTS = {"api": 2, "background": 2}
"""Processes of a service; of all others one."""


def _docker_answers() -> bool:
    """Tell whether a Docker engine runs here; the client alone does not help."""
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    return (
        shutil.which("docker") is not None and not subprocess.run(command, capture_output=True, check=False).returncode
    )


ENGINE = "docker" if _docker_answers() else "podman"
COMPOSE = ("docker", "compose") if ENGINE == "docker" else ("podman-compose",)
SHIM = Path(__file__).with_name("podman-as-docker.sh")


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


def compose(*words: str, timeout_s: float = 300.0, **more: str) -> str:
    """Run a compose command; raise with its output when it fails."""
    process = subprocess.run(
        [*COMPOSE, "-f", str(ROOT / "compose.yaml"), *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=ROOT,
        env=variables() | more,
    )
    if process.returncode:
        raise RuntimeError(f"compose {' '.join(words)} failed:\n{process.stdout}\n{process.stderr}")
    return process.stdout


def variables() -> dict[str, str]:
    """Return the environment of a compose command: two processes of what may be several, names as Docker gives them."""
    counts = {f"ABLATE_{service.upper()}_PROCESSES": str(count) for service, count in COUNTS.items()}
    return {**surroundings(), **counts, "PODMAN_COMPOSE_NAME_SEPARATOR_COMPAT": "true"}


def surroundings() -> dict[str, str]:
    """Return the environment without the proxy of tests/conftest.py, which podman would hand to every container."""
    return {name: value for name, value in os.environ.items() if name.lower() != "http_proxy"}


def container(service: str, number: int = 1) -> str:
    """Return the name of a container of `service`."""
    return f"ablate-{service}-{number}"


def containers(service: str) -> list[str]:
    """Return the names of all containers of `service`."""
    return [container(service, number) for number in range(1, COUNTS.get(service, 1) + 1)]


def documented(heading: str) -> list[str]:
    """Return the commands for containers that docs/operate.md gives below a heading."""
    lines = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8").splitlines()
    begin = lines.index(f"## {heading}") + 1
    end = next((n for n, line in enumerate(lines[begin:], begin + 1) if line.startswith("## ")), len(lines) + 1)
    commands = [one for one in commands_of("docs/operate.md") if begin < one.line < end]
    return [without_comment(one.text) for one in commands if one.kind == "containers"]


def typed(command: str, folder: Path, *, timeout_s: float = 600.0) -> str:
    """Run a command of a page in `folder`, with podman as `docker` where there is no Docker; raise when it fails."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    if ENGINE == "podman" and not (programs / "docker").exists():
        (programs / "docker").symlink_to(SHIM)
    environment = {**variables(), "COMPOSE_FILE": str(ROOT / "compose.yaml")}
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    run = ["bash", "-euo", "pipefail", "-c", command]
    process = subprocess.run(
        run, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if process.returncode:
        raise RuntimeError(f"{command}\nended with {process.returncode}:\n{process.stdout}\n{process.stderr}")
    return process.stdout


def engine(*words: str, check: bool = True, timeout_s: float = 120.0) -> str:
    """Run a command of the container engine; return what it printed, both ways."""
    command = [ENGINE, *words]
    process = subprocess.run(
        command, env=surroundings(), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if check and process.returncode:
        raise RuntimeError(f"{ENGINE} {' '.join(words)} failed: {process.stderr}")
    return process.stdout + process.stderr


def image_id(name: str) -> str:
    """Return the id that a container of the image `name` would be made from."""
    return engine("image", "inspect", "--format", "{{.Id}}", name).strip()


def wait_healthy(name: str, *, patience_s: float = 400.0) -> None:
    """Run the health check of the container `name` until it passes."""
    deadline = time.monotonic() + patience_s
    while not is_healthy(name):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} is not healthy: {engine('logs', name, check=False)[-2000:]}")
        time.sleep(1)


def is_healthy(name: str) -> bool:
    """Ask for the health of the container `name`: by what Docker found last, by running the check with podman."""
    if ENGINE == "docker":
        return engine("inspect", "--format", "{{.State.Health.Status}}", name).strip() == "healthy"
    command = [ENGINE, "healthcheck", "run", name]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@contextmanager
def running() -> Iterator[dict[str, str]]:
    """Start everything from nothing; yield the environment of a client; remove everything, volumes too."""
    compose("down", "--volumes")
    subprocess.run([str(ROOT / "docker" / "make-secrets.sh")], check=True, cwd=ROOT, capture_output=True)
    try:
        for service in SERVICES:
            compose("up", "-d", "--no-build", "--no-deps", service)
            if service == "migrate":
                assert engine("wait", container(service)).strip().startswith("0")
                continue
            for name in containers(service):
                wait_healthy(name)
        token = (ROOT / "secrets" / "ablate_admin_token").read_text()
        yield {**surroundings(), "ABLATE_URL": "http://127.0.0.1:8321", "ABLATE_TOKEN": token}
    finally:
        compose("down", "--volumes")

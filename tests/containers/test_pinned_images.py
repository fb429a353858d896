"""docker/pin-images.sh against a registry on this machine: images by digest, also when their tags name others later."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.containers import compose_stack as stack
from tests.ports import free_port
from tests.waiting import until

REGISTRY = shutil.which("docker-registry") or shutil.which("registry")
NAMES = {"NGINX": "nginx:1", "POSTGRES": "postgres:16", "PYTHON": "python:3.11-slim-bookworm", "REDIS": "redis:7"}
DIGESTS = {"Accept": "application/vnd.docker.distribution.manifest.v2+json, application/vnd.oci.image.manifest.v1+json"}
pytestmark = [
    pytest.mark.skipif(
        shutil.which(stack.COMPOSE[0]) is None, reason="neither a Docker engine nor podman-compose is here"
    ),
    pytest.mark.skipif(REGISTRY is None, reason="no registry is here (Debian's package docker-registry)"),
]


class Registry:
    """A registry on loopback, with images of one file under the names of the foreign ones."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.address = folder, f"127.0.0.1:{port}"
        self.environment = {**stack.surroundings(), "CONTAINERS_REGISTRIES_CONF": str(folder / "registries.conf")}
        (folder / "registries.conf").write_text(f'[[registry]]\nlocation = "{self.address}"\ninsecure = true\n')
        (folder / "config.yml").write_text(
            f"version: 0.1\nhttp: {{addr: {self.address}}}\n"
            f"storage: {{filesystem: {{rootdirectory: {folder}/images}}}}\n"
        )

    def push(self, name: str, content: str) -> str:
        """Make an image and push it; return the digest that the registry names."""
        context = self.folder / "context"
        context.mkdir(exist_ok=True)
        (context / "content").write_text(content)
        (context / "Dockerfile").write_text("FROM scratch\nCOPY content /content\n")
        self._engine("build", "--quiet", "--tag", f"{self.address}/{name}", str(context))
        self._engine("push", "--quiet", f"{self.address}/{name}")
        self._engine("image", "rm", f"{self.address}/{name}")
        repository, _, tag = name.partition(":")
        url = f"http://{self.address}/v2/{repository}/manifests/{tag}"
        return httpx.head(url, headers=DIGESTS, timeout=20, trust_env=False).headers["Docker-Content-Digest"]

    def pin(self, file: Path, **sources: str) -> "subprocess.CompletedProcess[str]":
        """Run the script with the images of this registry."""
        programs = self.folder / "bin"
        programs.mkdir(exist_ok=True)
        if stack.ENGINE == "podman" and not (programs / "docker").exists():
            (programs / "docker").symlink_to(stack.SHIM)
        own = {f"{name}_IMAGE": f"{self.address}/{image}" for name, image in NAMES.items()} | sources
        environment = {**self.environment, **own, "PATH": f"{programs}:{os.environ['PATH']}"}
        command = [str(stack.ROOT / "docker" / "pin-images.sh"), str(file)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    def content(self, image: str) -> str:
        """Pull an image and return its file."""
        self._engine("pull", "--quiet", image)
        name = self._engine("create", image, "nothing").strip()
        self._engine("cp", f"{name}:/content", str(self.folder / "copied"))
        self._engine("rm", name)
        return (self.folder / "copied").read_text()

    def _engine(self, *words: str) -> str:
        command = [stack.ENGINE, *words]
        ended = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, f"{' '.join(command)}: {ended.stderr}"
        return ended.stdout


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    served = Registry(tmp_path_factory.mktemp("registry"), free_port())
    command = [str(REGISTRY), "serve", str(served.folder / "config.yml")]
    with (served.folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            until(lambda: (served.folder / "log").read_text().count("listening on"), 30, what="the registry's start")
            yield served
        finally:
            server.terminate()
            for image in NAMES.values():
                repository = f"{served.address}/{image.partition(':')[0]}"
                left = stack.engine("images", "--quiet", "--filter", f"reference={repository}").split()
                stack.engine("image", "rm", "--force", *left)


def pins_of(file: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text().splitlines() if "_IMAGE=" in line)


def test_images_stay_the_same_when_a_tag_moves_until_they_are_pinned_again(registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("ABLATE_API_PROCESSES=2\n")
    digests = {name: registry.push(image, f"first {name}") for name, image in NAMES.items()}
    first = registry.pin(file)
    assert first.returncode == 0, first.stderr
    expected = {
        f"{name}_IMAGE": f"{registry.address}/{NAMES[name].partition(':')[0]}@{digest}"
        for name, digest in digests.items()
    }
    assert pins_of(file) == expected
    assert file.read_text().startswith("ABLATE_API_PROCESSES=2\n")
    moved = registry.push(NAMES["POSTGRES"], "second POSTGRES")
    assert registry.content(expected["POSTGRES_IMAGE"]) == "first POSTGRES"
    assert registry.pin(file).returncode == 0
    again = pins_of(file)
    assert again["POSTGRES_IMAGE"].endswith(moved)
    assert again | {"POSTGRES_IMAGE": ""} == expected | {"POSTGRES_IMAGE": ""}


def test_compose_takes_the_pinned_images(registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    for name, image in NAMES.items():
        registry.push(image, f"first {name}")
    assert registry.pin(file).returncode == 0
    command = [*stack.COMPOSE, "--env-file", str(file), "-f", str(stack.ROOT / "compose.yaml"), "config"]
    shown = subprocess.run(command, cwd=stack.ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    for image in pins_of(file).values():
        assert image in shown


def test_an_image_that_cannot_be_pulled_changes_nothing(registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("POSTGRES_IMAGE=kept\n")
    missing = registry.pin(file, POSTGRES_IMAGE=f"{registry.address}/absent:1")
    assert missing.returncode != 0
    assert "absent" in missing.stderr
    assert file.read_text() == "POSTGRES_IMAGE=kept\n"

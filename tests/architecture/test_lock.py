"""The lock: it agrees with pyproject.toml, and everything is installed from it, each file with a digest."""

import hashlib
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from requirements import install
from tests.architecture.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
APART = {"tpu"}
"""Extras with an environment of their own."""
BY_PIP_ALONE = {
    "Makefile": 6,  # peer: kernels; clients: generators; mutants: mutmut; audit: pip-audit; in folders of their own
    "docs/own-recipe.md": 1,  # a package of the reader
    "docs/releases.md": 1,  # our own wheel
    "docker/service.Dockerfile": 1,  # our own wheel, without an index
    "docker/worker.Dockerfile": 1,
}


@pytest.fixture(scope="module")
def packages() -> dict[str, install.Locked]:
    return install.read_lock(install.LOCK)


def requirements() -> list[Requirement]:
    listed = [one for extra, lines in EXTRAS.items() if extra not in APART for one in lines]
    return [Requirement(line) for line in (*PROJECT["project"]["dependencies"], *listed)]


def versions(locked: install.Locked) -> list[Version]:
    return [Version(one) for one in re.findall(r"^[A-Za-z0-9._-]+==([^ ]+)", locked.lines, re.MULTILINE)]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_lock_has_a_version_that_pyproject_allows(
    requirement: Requirement, packages: dict[str, install.Locked]
) -> None:
    locked = packages[install.name_of(requirement.name)]
    assert "ablate" in locked.needed_by
    assert all(version in requirement.specifier for version in versions(locked))


def test_lock_names_nothing_that_pyproject_dropped(packages: dict[str, install.Locked]) -> None:
    listed = {install.name_of(one.name) for one in requirements()}
    assert {name for name, one in packages.items() if "ablate" in one.needed_by} == listed
    needed = install.selected(packages, listed)
    assert packages.keys() == needed.keys()


def test_build_tools_come_from_the_lock() -> None:
    listed = {Requirement(one).name for one in EXTRAS["build"]}
    assert {Requirement(one).name for one in PROJECT["build-system"]["requires"]} <= listed


def test_torch_without_cuda_is_of_the_same_version(packages: dict[str, install.Locked]) -> None:
    (own,), (cpu,) = versions(packages["torch"]), versions(install.read_lock(install.CPU_LOCK)["torch"])
    assert (cpu.base_version, cpu.local) == (own.base_version, "cpu")


def test_tpu_lane_has_the_same_versions(packages: dict[str, install.Locked]) -> None:
    lines = (ROOT / "requirements/tpu.lock").read_text(encoding="utf-8").splitlines()
    own = dict(line.partition(";")[0].split("==") for line in lines if line[0] != "#")
    both = {name for name in own if install.name_of(name) in packages} - {"torch", "triton"}
    assert len(both) > 20
    locked = {name: versions(packages[install.name_of(name)]) for name in both}
    assert {name: version for name, version in locked.items() if version != [Version(own[name])]} == {}


def test_tpu_lane_has_what_a_worker_imports() -> None:
    lines = (ROOT / "requirements/tpu.lock").read_text(encoding="utf-8").splitlines()
    locked = {install.name_of(line.partition("==")[0]) for line in lines if line[0] != "#"}
    needed = {
        install.name_of(Requirement(one).name) for one in (*PROJECT["project"]["dependencies"], *EXTRAS["worker"])
    }
    assert needed - locked == {"ruptures"}, "only the judge of bundles imports ruptures"


def test_an_installation_takes_only_what_its_extras_need(packages: dict[str, install.Locked]) -> None:
    service = install.selected(packages, install.roots(["service"]))
    worker = install.selected(packages, install.roots(["worker", "cpu"]))
    server = install.selected(packages, install.roots(["mlflow-server"], with_base=False))
    assert {"sqlalchemy", "celery", "numpy"} <= service.keys()
    assert service.keys() & {"torch", "mlflow", "pytest"} == set()
    assert {"torch", "tokenizers", "sympy"} <= worker.keys()
    assert worker.keys() & {"sqlalchemy", "fastapi", "tilelang", "nvidia-cuda-nvcc"} == set()
    assert {"mlflow", "flask-wtf", "psycopg-binary"} <= server.keys()
    assert server.keys() & {"typer", "torch"} == set()
    assert install.selected(packages, install.roots(["build"], with_base=False)).keys() == {"pip", "setuptools"}


def test_a_build_of_torch_without_cuda_brings_no_library_of_it(packages: dict[str, install.Locked]) -> None:
    roots = install.roots(["worker", "cpu"])
    used = {"filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions"}
    chosen = install.without_unused(packages, roots, used)
    assert used <= chosen.keys()
    assert "mpmath" in chosen  # sympy's
    assert [name for name in chosen if name.startswith(("nvidia-", "cuda-", "triton"))] == ["nvidia-ml-py"]


def test_a_package_without_a_digest_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    lock.write_text(
        "# a lock\nhttpx==0.28.1 \\\n    --hash=sha256:00\n    # via ablate\nrich==14.0.0\n    # via ablate\n"
    )
    with pytest.raises(SystemExit, match=r"a\.lock: 'rich==14\.0\.0' needs == with a version and --hash"):
        install.read_lock(lock)


def test_unknown_extra_is_refused_and_named() -> None:
    with pytest.raises(SystemExit, match="unknown extra 'gpu'; allowed: service, embedded, worker, cpu, cuda"):
        install.roots(["gpu"])


def test_pip_takes_only_a_file_with_the_digest_of_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "small_one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("small_one.py", "")
        information = "small_one-1.0.dist-info"
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: small-one\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    environment = install.Environment(tmp_path / "environment")
    line = "small-one==1.0 \\\n    --hash=sha256:"
    assert "DO NOT MATCH THE HASHES" in environment.tried([line + "0" * 64])
    assert environment.tried([line + hashlib.sha256(wheel.read_bytes()).hexdigest()]) == ""


def test_nothing_else_is_installed_by_pip() -> None:
    files = [ROOT / "Makefile", ROOT / ".ci" / "run", *ROOT.glob("*.md"), *(ROOT / "docker").glob("*.Dockerfile")]
    files += [*(ROOT / "docs").glob("*.md"), *(ROOT / "docker").glob("*.md")]
    by_pip = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8").count("pip install") for path in files
    }
    assert {name: count for name, count in by_pip.items() if count} == BY_PIP_ALONE


def test_every_foreign_image_can_be_pinned_by_its_digest() -> None:
    """docker/pin-images.sh reads the names from compose.yaml."""
    composed = re.findall(r"^ +image: (.+)$", (ROOT / "compose.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    allowed = re.compile(r"ablate-[a-z-]+:.+|\$\{[A-Z]+_IMAGE:-[a-z]+:[^}]+\}")
    assert len(composed) == 6
    assert [image for image in composed if not allowed.fullmatch(image)] == []
    for file in (ROOT / "docker").glob("*.Dockerfile"):
        text = file.read_text(encoding="utf-8")
        stages = set(re.findall(r"^FROM .+ AS ([a-z-]+)$", text, re.MULTILINE))
        bases = {base for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE) if base not in stages}
        assert bases - {"worker-${DEVICE:-cpu}"} == {"${PYTHON_IMAGE}"}, file.name

"""`make release`, its refusals, and its wheel: the files in it, and the demo from it in an empty environment."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.acceptance.test_demo import check_demo
from tests.architecture.pages import ROOT

PACKAGES = ("service", "workers", "experiments", "model", "kernels")
OTHERS = ("pyproject.toml", "Makefile", "CHANGELOG.md", ".gitignore")
BUILT_APART = {"ablate/experiments/in_trial/pyproject.toml"}
"""Of the package that users may install beside their own program."""
IDENTITY = {
    f"GIT_{person}_{part}": "tester@example.org" for person in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")
}


def git(folder: Path, *words: str) -> str:
    command = ["git", *words]
    return subprocess.run(command, cwd=folder, env=IDENTITY, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a clean repository with the files of this one that a release needs, and a dated list of changes."""
    folder = tmp_path / "checkout"
    for name in (*PACKAGES, "src"):
        leftovers = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=leftovers)
    for name in OTHERS:
        shutil.copy(ROOT / name, folder / name)
    date_changes(folder, "2026-12-01")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "All")
    return folder


def date_changes(folder: Path, date: str) -> None:
    file = folder / "CHANGELOG.md"
    file.write_text(re.sub(r"^(## [0-9.]+), .*", rf"\1, {date}", file.read_text(), count=1, flags=re.M))


def release(folder: Path) -> subprocess.CompletedProcess[str]:
    """Release a checkout with this environment, and print the command that builds the images instead of running it."""
    binaries = f"BIN={Path(sys.executable).parent}"
    images = "COMPOSE=printenv ABLATE_VERSION; echo"
    return subprocess.run(
        ["make", binaries, images, "--old-file=.venv/.installed", "release"],
        cwd=folder,
        env={**IDENTITY, "PATH": "/usr/bin:/bin"},
        check=False,
        capture_output=True,
        text=True,
    )


def version_of(folder: Path) -> str:
    match = re.search(r'^version = "(.+)"$', (folder / "pyproject.toml").read_text(), flags=re.M)
    assert match is not None
    return match[1]


def test_a_release_is_a_wheel_with_every_file_of_the_packages_images_and_a_tag(checkout: Path) -> None:
    leftover = checkout / "build" / "lib" / "service" / "leftover.py"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    done = release(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    version = version_of(checkout)
    (wheel,) = (checkout / "dist").iterdir()
    assert wheel.name == f"ablate-{version}-py3-none-any.whl"
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {f"ablate/{name}" for name in git(checkout, "ls-files", *PACKAGES).split()}
    assert names == (files | {"ablate/__init__.py"}) - BUILT_APART
    assert f"\n{version}\nbuild\n" in done.stdout, "the images get the version"
    assert git(checkout, "rev-parse", f"v{version}^{{commit}}") == git(checkout, "rev-parse", "HEAD")


@pytest.mark.parametrize("kind", ["changed", "untracked", "tagged", "without a date"])
def test_no_release_of_uncommitted_changes_an_existing_tag_or_a_heading_without_a_date(
    checkout: Path, kind: str
) -> None:
    version = version_of(checkout)
    reason = "there are uncommitted changes"
    if kind in ("changed", "untracked"):
        with (checkout / ("pyproject.toml" if kind == "changed" else "new.py")).open("a") as file:
            file.write("\n")
    elif kind == "tagged":
        git(checkout, "tag", f"v{version}")
        reason = f"the tag v{version} exists; raise the version in pyproject.toml"
    else:
        date_changes(checkout, "soon")
        git(checkout, "commit", "--quiet", "--all", "--message", "Undated")
        reason = f"CHANGELOG.md has no heading '## {version}, YYYY-MM-DD'"
    tags = git(checkout, "tag")
    done = release(checkout)
    assert done.returncode != 0
    assert reason in done.stdout
    assert git(checkout, "tag") == tags
    assert not (checkout / "dist").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_wheel_runs_the_demo_in_an_empty_environment(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert release(checkout).returncode == 0
    (wheel,) = (checkout / "dist").iterdir()
    environment, outside = tmp_path / "environment", tmp_path / "outside"
    outside.mkdir()
    python, install = environment / "bin" / "python", ROOT / "requirements" / "install.py"
    for command in (
        (sys.executable, install, "--packages", environment, "service", "embedded", "worker", "cpu"),
        (python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel),
        (python, "-m", "pip", "check"),
    ):
        done = subprocess.run(command, cwd=outside, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(checkout)
    check_demo(environment / "bin" / "ablate", tmp_path / "home", cwd=outside)

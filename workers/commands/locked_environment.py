"""Python environments that a node builds once from a lock: a text that names every package with its exact version.

Only wheels are installed, so no code of a package runs. Packages come from the index that the operator has chosen
(pip's settings, such as PIP_INDEX_URL); a lock cannot name another one.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from ablate.experiments.design.problems import shown
from ablate.experiments.digest import digest
from ablate.experiments.system.processes import OWN_PYTHON
from ablate.model.errors import DataError

KEPT = 8
"""Environments that a node keeps; the one that was not asked for longest goes first."""
_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--no-cache-dir")
_WHEELS = ("--quiet", "--no-deps", "--only-binary", ":all:")
_MOST_LETTERS = 600
"""Of pip's reason."""
_COMPLETE = "ablate-complete"
"""File of an environment that was built to its end."""
_PACKAGE = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[A-Za-z0-9._, -]*\])?\s*==\s*[0-9][A-Za-z0-9._+!]*\s*"  # its name and version
    r"(;((?!\s-)[\w\s.<>=!~'\"()+-])*)?(\s+--hash[= ]sha(256|384|512):[0-9a-f]+)*"  # a marker and hashes
)
_ALLOWED = (
    "NAME==VERSION, with hashes and a marker if wanted, as `uv export --no-emit-project` and `pip freeze` write it"
)


def packages_of(name: str, text: str) -> list[str]:
    """Return the packages of a lock, one in each line. Raises DataError for a line that names anything else."""
    packages = []
    for line in text.replace("\\\n", "  ").splitlines():
        words = re.sub(r"(^|\s)#.*", "", line).strip()
        if not words:
            continue
        if _PACKAGE.fullmatch(words) is None:
            raise DataError(f"{name} has {shown(words)}; allowed: {_ALLOWED}. The node's operator chooses the index")
        packages.append(" ".join(words.split()))
    if not packages:
        raise DataError(f"{name} names no packages; allowed: {_ALLOWED}")
    return packages


def locked_environment(name: str, text: str, folder: Path) -> Path:
    """Return the environment below `folder` with the packages of a lock, which is built unless it is there.

    Its Python is that of this process. Raises DataError for a lock that is not allowed, or cannot be installed.
    """
    packages = packages_of(name, text)
    folder.mkdir(parents=True, exist_ok=True)
    key = digest([*packages, sys.version, sys.prefix, sysconfig.get_platform()]).removeprefix("sha256:")[:32]
    target = folder / key
    with (folder / f"{key}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # another worker may build the same one
        if not (target / _COMPLETE).is_file():
            shutil.rmtree(target, ignore_errors=True)
            _build(name, packages, target)
        os.utime(target)
    _prune(folder, keep=target)
    return target


def _build(name: str, packages: list[str], target: Path) -> None:
    venv.create(target, symlinks=True, with_pip=False)
    with tempfile.TemporaryDirectory(dir=target) as temporary:  # that of a trial is too small
        requirements = Path(temporary) / "requirements.txt"
        requirements.write_text("\n".join(packages) + "\n", encoding="utf-8")
        pip = ("env", f"TMPDIR={temporary}", *OWN_PYTHON, *_PIP, "--python", str(target / "bin" / "python"))
        install = [*pip, "install", *_WHEELS, "--requirement", str(requirements)]
        done = subprocess.run(install, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        shutil.rmtree(target, ignore_errors=True)
        words = " ".join(done.stderr.split())
        reason = words[max(0, words.find("ERROR:")) :][:_MOST_LETTERS]
        raise DataError(f"the Python environment of {name} cannot be built: {reason}")
    (target / _COMPLETE).touch()


def _prune(folder: Path, *, keep: Path) -> None:
    """Remove the environments beyond `KEPT`. Those of running blocks were asked for last."""
    built = sorted((one.parent for one in folder.glob(f"*/{_COMPLETE}")), key=lambda one: one.stat().st_mtime)
    for one in [path for path in built if path != keep][: max(0, len(built) - KEPT)]:
        shutil.rmtree(one, ignore_errors=True)

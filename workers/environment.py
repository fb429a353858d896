"""What a trial runs on, for its receipt: code, versions, machine. Read once, when the worker starts."""

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from experiments.digest import SOURCE_ROOT, code_digest, digest_bytes
from workers.devices import Devices

_DISTRIBUTIONS = ("torch", "numpy", "tokenizers", "tilelang", "torch_xla", "triton")
_GIT_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class CodeState:
    """Which code this worker loaded."""

    digest: str
    """Of the source files of `experiments.digest.CODE_PACKAGES`."""
    git_commit: str | None
    git_dirty_digest: str | None


def read_code(root: Path = SOURCE_ROOT) -> CodeState:
    """Digest the source below `root` and ask git about it."""
    commit = _git(root, "rev-parse", "HEAD") if _is_checkout(root) else None
    return CodeState(
        digest=code_digest(root),
        git_commit=commit.decode().strip() if commit else None,
        git_dirty_digest=_dirty_digest(root) if commit else None,
    )


def versions(devices: Devices) -> dict[str, str]:
    """Return the versions of everything that may change a measurement, as far as present."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if devices.driver is not None:
        found["driver"] = devices.driver
    return found


def lacks() -> tuple[str, ...]:
    """Return sentences about what this machine does not have and what that means."""
    missing = []
    if shutil.which("git") is None:
        missing.append("git is not installed: receipts carry the code digest, but no commit")
    if compiler() is None:
        missing.append("no C++ compiler (g++, clang++): arms with compile: true will fail")
    return tuple(missing)


def compiler() -> str | None:
    """Return the C++ compiler that torch.compile would find."""
    return next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def load_average() -> float:
    """Return the one-minute load average."""
    return os.getloadavg()[0]


def _is_checkout(root: Path) -> bool:
    """Say whether `root` itself is a git work tree, and not merely a folder inside somebody else's."""
    top = _git(root, "rev-parse", "--show-toplevel")
    return top is not None and Path(os.fsdecode(top.rstrip(b"\n"))).resolve() == root


def _dirty_digest(root: Path) -> str | None:
    patch = _git(root, "diff", "--binary", "HEAD") or b""
    untracked = _git(root, "ls-files", "--others", "--exclude-standard") or b""
    return digest_bytes(patch + b"\0" + untracked) if patch or untracked else None


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return None
    return answer.stdout

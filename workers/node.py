"""This node: code, versions and devices, read once at the start, and the private key that it signs with.

The key never leaves this machine and is no part of a bundle. Anybody who can read its file can sign as this node.
"""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from rich.table import Table

from ablate.experiments.digest import SOURCE_ROOT, code_digest, digest, digest_bytes
from ablate.experiments.documents import write_whole
from ablate.experiments.errors import CodeArchiveError, SigningUnavailable
from ablate.experiments.records.git_repository import run_git
from ablate.experiments.records.messages import NodeRegistration
from ablate.experiments.records.signing import Signer, signing_problem
from ablate.kernels.backends import NodeClass
from ablate.workers.devices.inventory import Devices, find_devices, memory_limit_bytes
from ablate.workers.errors import NodeKeyError
from ablate.workers.isolation.reach import ISOLATED, NOT_ISOLATED, isolation_problem

_XLA = ("torch_xla", "torchax", "jax", "jaxlib", "libtpu")
_BACK_ENDS = ("flash-attn-4", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl")
_DISTRIBUTIONS = ("torch", "numpy", "tokenizers", "tilelang", "triton", *_BACK_ENDS, *_XLA)
_TOOLS = {"c++": ("g++", "clang++", "c++"), "nvcc": ("nvcc",)}
"""Compilers outside of Python, by their name in receipts; the first that exists counts."""
_ISOLATION = "isolation"
"""Entry of the versions: receipts and the service then know it from every node."""
_TOOL_TIMEOUT_S = 20.0
_VERSION = re.compile(r"\d+(?:\.\d+)+")


@dataclass(frozen=True, kw_only=True)
class CodeState:
    """The code of this worker."""

    digest: str
    """Of the source files of `ablate.experiments.digest.CODE_PACKAGES`."""
    git_commit: str | None
    git_dirty_digest: str | None


@dataclass(frozen=True, kw_only=True)
class Node:
    """Properties of this machine that do not change while the worker runs."""

    name: str
    devices: Devices
    code: CodeState
    versions: dict[str, str]
    cores: int
    memory_limit_bytes: int
    lacks: tuple[str, ...]
    allocation: str | None = None
    """The job of a cluster that this worker, which enrolled, is a part of."""
    nodes: tuple[str, ...] = ()
    """The nodes of its job if it has several, as the cluster calls them; the devices are those of each."""

    @property
    def node_class(self) -> NodeClass:
        """Class under which this node claims blocks."""
        return self.devices.node_class

    @property
    def trial_memory_limit_bytes(self) -> int:
        """Memory for a trial: the device's, or on the host the limit of processes."""
        return self.memory_limit_bytes if self.node_class.on_host else self.devices.first.memory_bytes

    @property
    def isolates(self) -> bool:
        """Whether trials run isolated here."""
        return self.versions[_ISOLATION] == ISOLATED

    def kernels(self, data_dir: Path) -> Path:
        """Return the folder for compiled code below `data_dir`; other versions have another one."""
        versions = {name: version for name, version in self.versions.items() if name != _ISOLATION}
        return data_dir / "kernels" / digest(versions).removeprefix("sha256:")[:12]

    def changed(self) -> str | None:
        """Return what changed since the start of this worker, so that its receipts would be wrong; None if nothing."""
        if code_digest() != self.code.digest:
            return "the source code changed after this worker had started; start it again"
        old = {**self.versions, "number of cores": str(self.cores)}
        new = {**_versions(self.devices), "number of cores": str(cores())}
        other = next((name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)), None)
        if other is None:
            return None
        values = f"from {old.get(other, 'absent')} to {new.get(other, 'absent')}"
        return f"{other} changed {values} after this worker had started; start it again"

    def registration(self, public_key: str | None) -> NodeRegistration:
        """Return the registration; `public_key` belongs to this node's signatures, None if it cannot sign."""
        return NodeRegistration(
            node_class=self.node_class.name,
            devices=self.devices.devices,
            versions=self.versions,
            code_digest=self.code.digest,
            lacks=self.lacks,
            public_key=public_key,
            allocation=self.allocation,
            cores=self.cores,
        )

    def table(self) -> Table:
        """Return a table for the terminal."""
        table = Table(title=f"node {self.name}", show_header=False, title_justify="left")
        table.add_row("class", self.node_class.name)
        for device in self.devices.devices:
            table.add_row(f"device {device.index}", f"{device.name}, {device.memory_bytes / 2**30:.1f} GiB")
        table.add_row("cores", str(self.cores))
        table.add_row("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items()))
        dirty = " with uncommitted changes" if self.code.git_dirty_digest else ""
        table.add_row("code", f"{self.code.digest[:19]}, commit {(self.code.git_commit or 'unknown')[:12]}{dirty}")
        for sentence in self.lacks:
            table.add_row("[yellow]lacks[/yellow]", sentence)
        return table


def find_node(name: str, node_class: str | None = None) -> Node:
    """Describe this machine; `node_class` overrides the choice of the probes. Raises DeviceMissing."""
    devices = find_devices(node_class)
    return Node(
        name=name,
        devices=devices,
        code=read_code(),
        versions=_versions(devices),
        cores=cores(),
        memory_limit_bytes=memory_limit_bytes(),
        lacks=(*devices.lacks, *_lacks()),
    )


def read_code(root: Path = SOURCE_ROOT) -> CodeState:
    """Return the digest and the git commit of the source below `root`."""
    commit = _git(root, "rev-parse", "HEAD") if _is_checkout(root) else None
    return CodeState(
        digest=code_digest(root),
        git_commit=commit.decode().strip() if commit else None,
        git_dirty_digest=_dirty_digest(root) if commit else None,
    )


def compiler() -> str | None:
    """Return the path of the C++ compiler for torch.compile, None without one."""
    return _first_program(_TOOLS["c++"])


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _versions(devices: Devices) -> dict[str, str]:
    """Return the installed versions of all software that may change a measurement."""
    isolation = ISOLATED if isolation_problem() is None else NOT_ISOLATED
    versions = {"python": platform.python_version(), "kernel": platform.release(), _ISOLATION: isolation}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if devices.driver is not None:
        versions["driver"] = devices.driver
    return versions | {name: version for name, tools in _TOOLS.items() if (version := _tool_version(tools))}


def _tool_version(tools: Sequence[str]) -> str | None:
    """Return the full version of the first existing tool: the printed number with most dots."""
    path = _first_program(tools)
    if path is None:
        return None
    try:
        printed = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TOOL_TIMEOUT_S,
            check=True,
        )
    except (subprocess.SubprocessError, OSError):
        return None
    numbers = _VERSION.findall(printed.stdout.partition("Copyright (C)")[0])
    return max(numbers, key=lambda number: number.count("."), default=None)


def _first_program(names: Sequence[str]) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


def _lacks() -> tuple[str, ...]:
    """Return sentences about missing programs and their consequences."""
    missing = []
    if shutil.which("git") is None:
        missing.append("git is not installed: receipts carry the code digest, but no commit")
    if compiler() is None:
        missing.append("no C++ compiler (g++, clang++): arms with compile: true will fail")
    if (problem := isolation_problem()) is not None:
        missing.append(f"trials are not isolated and can read this node's keys: {problem}")
    return tuple(missing)


def _is_checkout(root: Path) -> bool:
    """Return whether `root` itself is a git work tree, and not a folder inside another one."""
    top = _git(root, "rev-parse", "--show-toplevel")
    return top is not None and Path(os.fsdecode(top.rstrip(b"\n"))).resolve() == root


def _dirty_digest(root: Path) -> str | None:
    patch = _git(root, "diff", "--binary", "HEAD") or b""
    untracked = _git(root, "ls-files", "--others", "--exclude-standard") or b""
    return digest_bytes(patch + b"\0" + untracked) if patch or untracked else None


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        return run_git(root, *arguments)
    except CodeArchiveError:
        return None


KEY_FILE = Path("keys") / "node"
"""Below the state folder."""

_OTHERS = 0o077
_REMEDY = "restore it from a copy, or remove it to sign with a new key, which an operator must trust (docs/trust.md)"


def node_signer(path: Path) -> Signer:
    """Return the signer with the key in `path`, which is created if it does not exist.

    Raises:
        SigningUnavailable: the library is missing.
        NodeKeyError: the file is no Ed25519 key, is readable for others, or cannot be written.

    """
    problem = signing_problem()
    if problem is not None:
        raise SigningUnavailable(problem)
    try:
        if not path.exists():
            _create(path)
        return Signer(_read(path))
    except OSError as error:
        raise NodeKeyError(f"the key of this node cannot be read or written in {path}: {error}") from error


def _create(path: Path) -> None:
    """Write a new key whole. If another process writes one at the same time, the first counts."""
    formats = _formats()
    pem = (
        _ed25519()
        .Ed25519PrivateKey.generate()
        .private_bytes(formats.Encoding.PEM, formats.PrivateFormat.PKCS8, formats.NoEncryption())
    )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(path, pem.decode(), mode=0o600, replace=False)


def _read(path: Path) -> bytes:
    mode = path.stat().st_mode
    if mode & _OTHERS:
        raise NodeKeyError(f"{path} has mode {mode & 0o777:04o}: others can read this node's key; allowed: 0600")
    formats = _formats()
    try:
        private = formats.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise NodeKeyError(f"{path} is no private key in PEM format ({error}); {_REMEDY}") from error
    if not isinstance(private, _ed25519().Ed25519PrivateKey):
        raise NodeKeyError(f"{path} contains a {type(private).__name__}; expected an Ed25519 private key; {_REMEDY}")
    return bytes(private.private_bytes_raw())


def _ed25519() -> Any:
    return import_module("cryptography.hazmat.primitives.asymmetric.ed25519")


def _formats() -> Any:
    return import_module("cryptography.hazmat.primitives.serialization")

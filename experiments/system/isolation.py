"""Isolation of a process: the files, the network and the other processes that it reaches.

Trials enter one, and so does the MLflow server of the embedded stack, each in its own process, before it runs anything.
See docs/trust.md.
"""

import os
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ablate.experiments.digest import IMPORT_ROOT
from ablate.experiments.errors import IsolationFailed
from ablate.experiments.system.kernel_limits import (
    CHANGE,
    LIST,
    READ,
    WRITE,
    FileRight,
    drop_capabilities,
    drop_rights,
    filter_calls,
)
from ablate.experiments.system.own_tree import OwnTree, keep_own_process_writable

_SYSTEM = ("usr", "lib", "lib32", "lib64", "bin", "sbin", "opt", "nix/store", "gnu/store", "proc", "sys")
_CONFIGURATION = (
    *("alternatives", "ca-certificates.conf", "debian_version", "fonts", "group", "host.conf", "hostname", "hosts"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.conf", "localtime", "machine-id"),
    *("mime.types", "nsswitch.conf", "nvidia", "OpenCL", "os-release", "passwd", "pki/tls/certs", "protocols"),
    *("python3", "resolv.conf", "services", "ssl/certs", "ssl/openssl.cnf", "timezone", "vulkan"),
)
"""Files in /etc without secrets. /etc as a whole contains keys and passwords of other programs."""
PLAIN_DEVICES = ("null", "zero", "full", "random", "urandom")
"""Files in /dev that every program expects."""
_DEVICES = (
    *(*PLAIN_DEVICES, "shm"),
    *("nvidia*", "nvidia-caps", "nvidia-caps-imex-channels", "dri", "kfd", "accel*", "vfio", "infiniband"),
)
"""Patterns of files in /dev for trials: shared memory and accelerators too. Terminals and disks are missing."""


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """What one trial, or another program, may use. Everything else is closed."""

    readable: tuple[Path, ...] = ()
    """Files and folders to read and execute."""
    writable: tuple[Path, ...] = ()
    """Folders to change. None of them may contain a hidden one."""
    hidden: tuple[Path, ...] = ()
    """Folders with secrets. They stay closed inside of a readable folder; a readable folder inside of them is open."""
    sockets: bool = False
    """Whether it may connect: to networks, and to Unix sockets of the worker's user."""
    programs: bool = False
    """Whether it starts processes that may use CUDA, which names its threads in files of /proc. Not for root, who could
    change settings of the kernel there: `compile_in_process` spares a built-in trial of root such processes."""
    devices: tuple[str, ...] = _DEVICES
    """Patterns of files in /dev to read and write."""
    own_tree: bool = False
    """Whether it gets a file tree of its own."""
    own_network: bool = False
    """With a tree of its own, whether its sockets reach only its own processes."""

    def enter_tree(self, *, alone: bool) -> None:
        """Give this process and all its later children their file tree, if they have one. Raises as `enter`."""
        if self.own_tree:
            # root's files in /proc are settings of the kernel; processes inside of `enclose` can mount nothing there
            proc = () if alone and os.geteuid() == 0 else (Path("/proc"),)
            OwnTree(
                writable=(*(path.resolve() for path in self.writable), *proc),
                readable=tuple(self.rules()),
                own_network=self.own_network,
            ).enter()

    def enter(self, *, alone: bool = True) -> None:
        """Isolate this process and all its later children for ever.

        Processes that have to reach each other are not `alone`: an ancestor has called `enter_tree` and
        `kernel_limits.enclose`.

        The process has one thread, and has taken its device locks, which are sockets. Only it may reset the peak of its
        memory, none of its children.

        Raises:
            IsolationFailed: the kernel refused, or a folder cannot be opened without opening a secret.

        """
        if alone:
            self.enter_tree(alone=True)
            if self.own_tree and os.geteuid() == 0:
                keep_own_process_writable()
        drop_rights(self.rules() | _own_process(), alone=alone)
        drop_capabilities()
        filter_calls(sockets=self.sockets)

    def rules(self) -> dict[Path, FileRight]:
        """Return the rights on every file or folder that is open. Raises IsolationFailed."""
        hidden = tuple(path.resolve() for path in self.hidden)
        rules: dict[Path, FileRight] = {}
        for path in map(Path.resolve, self.readable):
            for part, rights in _without(path, hidden):
                rules[part] = rules.get(part, FileRight(0)) | rights
        for path in map(Path.resolve, self.writable):
            inside = [str(one) for one in hidden if one.is_relative_to(path)]
            if inside:
                raise IsolationFailed(
                    f"a trial has to write to {path}, which contains {inside[0]} with the keys of this node; "
                    "choose another folder for one of them"
                )
            if not path.is_dir():
                raise IsolationFailed(f"a trial has to write to {path}, which is no folder")
            rules[path] = rules.get(path, FileRight(0)) | WRITE
        if self.programs and os.geteuid() != 0:
            rules[Path("/proc")] = READ | CHANGE
        rules[IMPORT_ROOT] = rules.get(IMPORT_ROOT, FileRight(0)) | LIST  # imports list the folder of the package
        return rules | dict.fromkeys(_files_in_dev(self.devices), WRITE)


def _without(path: Path, hidden: tuple[Path, ...]) -> Iterator[tuple[Path, FileRight]]:
    """Yield rights to read `path` except the folders `hidden` inside of it, whose names stay visible."""
    if path in hidden:
        return
    if not any(one.is_relative_to(path) for one in hidden):
        yield path, READ
        return
    yield path, LIST
    for child in path.iterdir():
        if not child.is_symlink():  # its target needs a rule of its own
            yield from _without(child, hidden)


def use_temporary(folder: Path) -> None:
    """Make a folder for temporary files, and let this process and its later children use it."""
    folder.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = _short(folder)
    tempfile.tempdir = None


def short_link(pid: int) -> Path:
    """Return the short path of the temporary folder of a trial by its process; the worker removes it.

    The path of a Unix socket has at most 107 characters, and processes that load data make sockets among their
    temporary files. Below a long state folder they failed, and their program waited for them for ever.
    """
    return Path("/tmp") / f"ablate-{os.getuid()}-{pid}"  # noqa: S108 - a link of this user, to a folder of the trial


def remove_short_links(folder: Path) -> None:
    """Remove the short paths to everything below `folder`, also that of a trial whose process nobody has noted yet."""
    for link in Path("/tmp").glob(f"ablate-{os.getuid()}-*"):  # noqa: S108
        with suppress(OSError):  # no link, of another user, or removed meanwhile
            if link.readlink().is_relative_to(folder):
                link.unlink()


def _short(folder: Path) -> str:
    link = short_link(os.getpid())
    link.unlink(missing_ok=True)  # of a trial whose worker was killed
    link.symlink_to(folder)
    return str(link)


def _own_process() -> dict[Path, FileRight]:
    """Return the right to write to this process's files in /proc: the peak of its memory is reset there.

    The folder stays open for the life of the process. Otherwise the kernel may forget the folder when it needs memory,
    and make another one, to which no right belongs.
    """
    handle = os.open("/proc/self", os.O_PATH)
    return {Path(f"/proc/self/fd/{handle}").resolve(): READ | CHANGE}


def _files_in_dev(patterns: tuple[str, ...]) -> Iterator[Path]:
    for pattern in patterns:
        yield from Path("/dev").glob(pattern)


def system_folders() -> tuple[Path, ...]:
    """Return the files and folders that Python, compilers and drivers read on this machine."""
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values(), *site.getsitepackages()}
    if site.ENABLE_USER_SITE:
        python.add(site.getusersitepackages())
    return (
        *(Path("/") / name for name in _SYSTEM),
        *(Path("/etc") / name for name in _CONFIGURATION),
        *map(Path, sorted(python)),
    )


def python_folders(prefix: Path) -> tuple[Path, ...]:
    """Return the folders of the Python environment at `prefix`, and of the installation that it is based on."""
    python = prefix / "bin" / "python"
    return prefix, *(folder for folder in (python.resolve().parents[1],) if folder != Path("/"))

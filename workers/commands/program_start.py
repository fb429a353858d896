"""Start a command with its environment, or say why it could not be started.

The reason lies in its file, in the first line of its file, or in the interpreter that the line names.
"""

import errno
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.system.isolation import Isolation
from ablate.experiments.system.kernel_limits import FileRight, drop_rights, keep_apart, landlock_version
from ablate.experiments.system.processes import die_with_parent
from ablate.model.errors import DataError
from ablate.workers.isolation.environment import outside_variables
from ablate.workers.trials.result import MODULE_FOLDER, TrialOrder

VARIABLE = "ABLATE_TRIAL"
"""Variable with the settings of a trial for the module, as JSON."""
RESUMED = "ABLATE_RESUMED"
"""Variable that says that the program was killed, and has to go on from its checkpoint."""
_MOST_BYTES = 256
"""Of a first line, as the kernel reads it."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class ProgramFolders:
    """Folders of a program in its trial."""

    working: Path
    """A copy of its code, or an empty folder."""
    out: Path
    """For files that stay until the end of the trial."""
    home: Path | None
    """None for the home of the worker's user."""


def program_environment(
    order: TrialOrder,
    config: ProgramArm,
    folders: ProgramFolders,
    *,
    address: str,
    logging: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment of a program: that of this process, its variables, and the module's settings.

    `logging` are the variables that say into which folder it logs.
    """
    variables = outside_variables(devices=config.devices if order.device_type == "cuda" else 0)
    prefix = sys.prefix if order.program_prefix is None else str(order.program_prefix)
    variables["PATH"] = os.pathsep.join([f"{prefix}/bin", variables.get("PATH", os.defpath)])
    variables["VIRTUAL_ENV"] = prefix
    variables |= order.environment
    if folders.home is not None:
        variables["HOME"] = str(folders.home)
    variables |= {**config.env, **order.secrets, **logging}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(MODULE_FOLDER), config.env.get("PYTHONPATH")]))
    settings = {
        "socket": address,
        "seed": config.seed,
        "out": str(folders.out),
        "code": None if config.code is None else str(folders.working),
        "warmup": config.steps.warmup,
        "timed": config.steps.timed,
        "slice": config.steps.slice,
        "asks": True,
        "profile": config.profile,
        "trace": order.trace,
        "resume_at": config.resume_at,
        **config.trial_settings,
    }
    return {**variables, VARIABLE: json.dumps(settings)}


def resumed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a program that was killed and is started again."""
    settings = {**json.loads(environment[VARIABLE]), "resumed": True}
    return {RESUMED: "1", VARIABLE: json.dumps(settings)}


def start_program(
    argv: list[str], folder: Path, environment: Mapping[str, str], *, output: int, reach: Isolation | None = None
) -> "subprocess.Popen[bytes]":
    """Start a program, which may use less than this process if `reach` says so.

    Raises DataError with the reason why it cannot be started.
    """
    problem = start_problem(argv[0], folder, environment["PATH"])
    try:
        if problem is None:
            return subprocess.Popen(
                argv,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a program may signal its whole group, and this process is not of it
                preexec_fn=partial(_begin, {} if reach is None else reach.rules()),
            )
    except OSError as error:
        problem = start_problem(argv[0], folder, environment["PATH"], error)
    raise DataError(problem)


def _begin(rules: Mapping[Path, FileRight]) -> None:
    """Run in the process of the program, before it: end with the trial's process, which it can then not change."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # a worker in the background of a shell ignores some
    die_with_parent()
    if landlock_version():
        keep_apart()
    if rules:
        drop_rights(rules, alone=False)  # it has to reach the socket of this process


def start_problem(name: str, folder: Path, path: str, error: OSError | None = None) -> str | None:
    """Return why program `name` cannot be started in `folder` with the variable PATH; None if nothing is wrong.

    After a failed attempt, `error` is the kernel's answer, and there is always a reason.
    """
    on_path = None if "/" in name else shutil.which(name, path=path)
    file = folder / (on_path or name)
    reason = next(_problems(name, file, path, on_path=on_path is not None), None)
    if reason is None and error is not None:
        reason = _by_kernel(name, file, error)
    return None if reason is None else f"the command cannot be started: {reason}"


def _problems(name: str, file: Path, path: str, *, on_path: bool) -> Iterator[str]:
    if "/" not in name and not on_path:
        if file.is_file():
            yield f"{name} is a file of the code and not a program of the node; type ./{name}"
        yield f"the node has no program {name} in {path}"
    elif file.is_symlink() and not file.exists():
        yield f"{name} is a link to {file.readlink()}, which is missing on the node"
    elif not file.exists():
        yield f"{name} is missing; the code has only the files that were sent, without those that git ignores"
    elif file.is_dir():
        yield f"{name} is a folder; type the program that has to run"
    elif not os.access(file, os.X_OK):
        yield f"{name} may not be executed; type chmod +x {name}, or name its interpreter: {_interpreter(name)} {name}"
    else:
        yield from filter(None, [_of_first_line(name, file, path)])


def _interpreter(name: str) -> str:
    return "bash" if name.endswith((".sh", ".bash")) else "python"


def _of_first_line(name: str, file: Path, path: str) -> str | None:
    """Return what is wrong with the first line of a script."""
    try:
        with file.open("rb") as content:
            line = content.read(_MOST_BYTES).partition(b"\n")[0]
    except OSError:  # a program that nobody may read
        return None
    if line.startswith(_BYTE_ORDER_MARK + b"#!"):
        return f"{name} begins with a byte order mark, so the kernel does not see its #!; save it as UTF-8 without one"
    if not line.startswith(b"#!"):
        return None
    text = line[2:].decode("utf-8", "replace")
    if text.endswith("\r"):
        return (
            f"the first line of {name} ends with a carriage return (line ends of Windows), so that its interpreter is"
            f" {text.strip(' ')!r}; type sed -i 's/\\r$//' {name}, and in .gitattributes: * text=auto eol=lf"
        )
    interpreter, _space, arguments = text.strip().partition(" ")
    problem = _of_interpreter(interpreter)
    if problem is None and interpreter.rpartition("/")[2] == "env":
        interpreter = _named_to_env(arguments)
        if interpreter and "/" not in interpreter and shutil.which(interpreter, path=path) is None:
            problem = f"is not in {path}"
        elif "/" in interpreter:
            problem = _of_interpreter(interpreter)
    if problem is None:
        return None
    return (
        f"{name} is there, but its first line asks for the interpreter {interpreter!r}, which {problem};"
        f" write #!/usr/bin/env {_interpreter(name)}, or type {_interpreter(name)} {name}"
    )


def _of_interpreter(interpreter: str) -> str | None:
    if not interpreter:
        return "is no name"
    if not Path(interpreter).exists():
        return "is missing on the node"
    usable = Path(interpreter).is_file() and os.access(interpreter, os.X_OK)
    return None if usable else "is no program"


def _named_to_env(arguments: str) -> str:
    """Return the program that `env` has to run, empty if it is not clear."""
    try:
        words = shlex.split(arguments.removeprefix("-S"))
    except ValueError:
        return ""
    return next((word for word in words if not word.startswith("-") and "=" not in word), "")


def _by_kernel(name: str, file: Path, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return f"{name} is there, but was built for another system: its loader is missing on the node"
    if error.errno != errno.ENOEXEC:
        return f"{name}: {error.strerror}"
    with file.open("rb") as content:
        start = content.read(4)
    if start == b"\x7fELF":
        return f"{name} was built for another processor than this node's ({platform.machine()})"
    return f"{name} has no first line such as #!/bin/sh; write one, or type {_interpreter(name)} {name}"

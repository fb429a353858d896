"""`ablate check`: run the program of a command or of a spec a few steps long without a service, as trials run it."""

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ablate.experiments.catalog.files import CONTENT_TYPE_OF_SUFFIX
from ablate.experiments.design.kinds.command import CommandArm
from ablate.experiments.design.kinds.program import marked_steps
from ablate.experiments.design.program_files import ARCHIVE
from ablate.experiments.errors import CodeArchiveError, SpecError
from ablate.experiments.outcomes import ExitCode
from ablate.experiments.records.code_archive import pack_code
from ablate.experiments.records.spec_code import PackedSpec
from ablate.experiments.system.logs import style_of
from ablate.experiments.system.shell_python import in_shell_python
from ablate.workers.blocks.surroundings import busiest, process_times, read_load
from ablate.workers.devices.device_lock import DeviceLock
from ablate.workers.devices.inventory import find_devices
from ablate.workers.errors import DeviceBusy, WorkerError
from ablate.workers.offline.check_runs import Keeper, WantedRun, results_of, secrets_named
from ablate.workers.offline.checks import CheckedSpec, ProgramCheck, SpecCheck, checks_of

_LOOK_S = 1.0
"""Length of the look at the load by others, before any run."""
SEEDS = (1, 1, 2)
"""Seeds of the runs: a repeat shows whether the program is exact, another seed whether it uses its seed."""


def check(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC | -- COMMAND...",
            help="A spec file, - for YAML from standard input, or program and arguments; {seed} is filled in.",
        ),
    ],
    code: Annotated[
        Path, typer.Option(help="Folder of the program. It is packed as for `code: .`, and runs in a copy.")
    ] = Path(),
    data: Annotated[
        list[Path] | None, typer.Option(help="File or folder that trials may read, as workload.data; repeatable.")
    ] = None,
    secret: Annotated[
        list[str] | None, typer.Option(help="Variable with a key, from the file of ABLATE_SECRETS; repeatable.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps of the measured window.")] = 5,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one run may take.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Run a training program a few steps long, isolated as a trial, and say what Ablate sees of it and what is missing.

    A command runs three times, a spec once for each arm, without a service.

    Exit code: 0 when a spec can measure it, 6 when something needed is missing, 5 when nothing could run.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        if command[0] == "-" or Path(command[0]).suffix.lower() in CONTENT_TYPE_OF_SUFFIX:
            if len(command) > 1:
                raise typer.BadParameter(f"options come before the spec {command[0]}; found {command[1]} after it")
            checks = _of_spec(Path(command[0]), console, timeout_s=timeout, as_json=as_json)
        else:
            shell = in_shell_python(command, code)
            readable = *(data or ()), *map(Path, shell.folders)
            env = {"PYTHONPATH": shell.search_path} if shell.search_path else {}
            wanted = _Command(shell.argv, code, env, readable, tuple(secret or ()), steps, timeout)
            checks = _of_command(wanted, console, as_json=as_json)
    except SpecError as error:
        for problem in error.problems:
            hint = f" ({problem.hint})" if problem.hint else ""
            console.print(f"[red]not run:[/] {escape(f'{problem.pointer} {problem.detail}{hint}')}")
        raise typer.Exit(ExitCode.ERROR) from error
    except (CodeArchiveError, WorkerError, OSError) as error:
        console.print(f"[red]not run:[/] {escape(str(error))}")
        raise typer.Exit(ExitCode.ERROR) from error
    if any(one.needed and not one.passed for one in checks):
        raise typer.Exit(ExitCode.UNMET)


@dataclasses.dataclass(frozen=True)
class _Command:
    """A command that is to be checked."""

    argv: tuple[str, ...]
    code: Path
    env: Mapping[str, str]
    data: tuple[Path, ...]
    secrets: tuple[str, ...]
    steps: int
    timeout_s: float


def _of_command(wanted: _Command, console: Console, *, as_json: bool) -> Sequence[ProgramCheck]:
    packed = pack_code(wanted.code)
    secrets = secrets_named(wanted.secrets)
    config = CommandArm(
        command=wanted.argv,
        env=wanted.env,
        code={ARCHIVE: packed.digest},
        data=tuple(_data(path, wanted.code) for path in wanted.data),
        secrets=wanted.secrets,
        profile=True,
        steps=marked_steps(warmup=1, timed=wanted.steps),
    )
    runs = [WantedRun(config=config, seed=seed, words=f", seed {seed}") for seed in SEEDS]
    archives = PackedSpec(content=b"", content_type="", archives=(packed,), packed=())
    keeper = Keeper(runs, archives, origin=wanted.code, secrets=secrets, timeout_s=wanted.timeout_s)
    with _devices_alone(console):
        results = [run.result for run in results_of(keeper, console) if run.result is not None]
    checks = list(checks_of(config, results))
    if as_json:
        sys.stdout.write(json.dumps([dataclasses.asdict(one) for one in checks], indent=2) + "\n")
    else:
        Console().print(_table("check of a program", checks))
    return checks


@contextmanager
def _devices_alone(console: Console) -> Iterator[None]:
    """Have this machine's devices; wait, and say so, while a worker runs a block there."""
    lock = DeviceLock(find_devices().locks("block"))
    try:
        lock.take()
    except DeviceBusy as busy:
        console.print(f"[yellow]note[/] the check waits for its turn: {escape(str(busy))}", soft_wrap=True)
        lock.take(patience_s=math.inf)
    try:
        yield
    finally:
        lock.release()


def _data(path: Path, code: Path) -> str | dict[str, str]:
    """Return the data at a path as a configuration has it: beside the code, or anywhere else."""
    place, folder = path.absolute(), code.absolute()
    if place.is_relative_to(folder):
        return {"path": str(place), "at": str(place.relative_to(folder))}
    return str(place)


def _of_spec(path: Path, console: Console, *, timeout_s: float, as_json: bool) -> Sequence[ProgramCheck]:
    checked = CheckedSpec.read(path)
    for line in checked.packed.packed:
        console.print(line, style=style_of(line), markup=False)
    secrets = secrets_named(checked.spec.workload.secrets)
    keeper = Keeper(checked.wanted, checked.packed, origin=checked.origin, secrets=secrets, timeout_s=timeout_s)
    with _devices_alone(console):
        before, processes = read_load(), process_times()
        time.sleep(_LOOK_S)
        load = read_load().share_since(before)
        others = busiest(processes, process_times(), exclude={os.getpid()})
        runs = results_of(keeper, console, until_failure=False)
    answer = checked.answer(runs, node_class=find_devices().node_class.name, load=load, others=others)
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(answer), indent=2) + "\n")
    else:
        Console().print(_table(f"check of {escape(str(path))}", answer.checks))
        Console(soft_wrap=True, highlight=False).print(time_words(answer))
    return answer.checks


def time_words(answer: SpecCheck) -> str:
    """Say how long the ablation takes on a machine that does nothing else."""
    minutes = answer.blocks * answer.block_s / 60
    return f"about {answer.block_s:.0f} s for a block, {minutes:.0f} min for {answer.blocks} blocks"


def _table(title: str, checks: Sequence[ProgramCheck]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("check", "state", "detail"):
        table.add_column(column, overflow="fold")
    for one in checks:
        state = "[green]ok[/]" if one.passed else "[red]missing[/]" if one.needed else "[yellow]absent[/]"
        table.add_row(one.name, state, escape(one.detail))
    return table

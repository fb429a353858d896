"""`ablate fleet`: workers that a cluster starts, as many as the waiting work asks for."""

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ablate.experiments.design.spec import MOST_NODES
from ablate.experiments.system.setting_values import is_loopback, read_secret
from ablate.service.cli import slurm
from ablate.service.cli.arguments import ClassArgument, duration
from ablate.service.cli.output import err, guarded, out
from ablate.service.client.api import Client
from ablate.service.client.connection import ClientError
from ablate.service.client.settings import get_client_settings
from ablate.service.errors import FleetError

app = typer.Typer(name="fleet", help="Workers that a cluster starts.", no_args_is_help=True)

_PROGRAM = str(Path(sys.executable).with_name("ablate"))
_SHARED = "on a file system that the nodes share"


@app.callback()
def fleet() -> None:
    """Keep `slurm` a command of its own."""


@app.command("slurm")
@guarded
def slurm_(  # noqa: PLR0913, PLR0917 - a command's options are its function's arguments
    node_class: ClassArgument,
    token_file: Annotated[Path, typer.Option(help=f"File with an enrolment token of the class, {_SHARED}.")],
    devices: Annotated[int, typer.Option(min=1, help="Devices of each node, for blocks of as many.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, max=MOST_NODES, help="Nodes of a job, for blocks over as many.")] = 1,
    most: Annotated[int, typer.Option("--max", min=1, help="Most jobs that run or wait.")] = 8,
    work: Annotated[str, typer.Option(help="Start one job for so much waiting work.")] = "30m",
    limit: Annotated[str, typer.Option("--time", help="Time limit of a job.")] = "8h",
    early: Annotated[str, typer.Option("--signal", help="Warn a worker so long before the end of its job.")] = "10m",
    idle: Annotated[str, typer.Option(help="A worker without work ends after this.")] = "5m",
    partition: Annotated[str, typer.Option(help="Partition of the jobs.")] = "",
    gres: Annotated[str, typer.Option(help="Devices of a job as Slurm calls them: gpu:h200:1.")] = "",
    account: Annotated[str, typer.Option(help="Account that pays.")] = "",
    exclusive: Annotated[bool, typer.Option("--exclusive", help="Whole nodes, so that nobody disturbs times.")] = False,
    requeue: Annotated[bool, typer.Option(help="Let Slurm start a job again after a failure of its node.")] = True,
    array: Annotated[bool, typer.Option("--array", help="Submit missing jobs as one array.")] = False,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="Another option, such as --qos=low.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help=f"Folder for the logs of jobs, {_SHARED}.")] = None,
    caches: Annotated[Path | None, typer.Option(help=f"Folder for compiled kernels and data, {_SHARED}.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting.")] = None,
    setup: Annotated[list[str] | None, typer.Option(metavar="LINE", help="A shell line before the worker.")] = None,
    program: Annotated[str, typer.Option(help="The program `ablate` on the nodes.")] = _PROGRAM,
    name: Annotated[str, typer.Option(help="Name of the jobs. Default: ablate-CLASS-DEVICES.")] = "",
    every: Annotated[str, typer.Option(help="Pause between two looks.")] = "30s",
    once: Annotated[bool, typer.Option("--once", help="Look once, for cron.")] = False,
    only_print: Annotated[bool, typer.Option("--print", help="Print the job script and submit nothing.")] = False,
) -> None:
    """Keep as many jobs running or waiting in Slurm as the waiting work asks for, until Ctrl-C. Jobs end themselves."""
    named = {"partition": partition, "gres": gres, "account": account, "output": f"{logs}/%x-%j.log" if logs else ""}
    flags = [*(["--exclusive"] if exclusive else []), "--requeue" if requeue else "--no-requeue", *(sbatch or ())]
    shared = [] if caches is None else [f"ABLATE_DATA_DIR={caches.absolute()}"]
    shared += ["ABLATE_ALLOW_HTTP=true"] if get_client_settings().allow_http else []
    with Client() as client:
        jobs = slurm.SlurmFleet(
            name=name or f"ablate-{node_class}-{devices}{f'x{nodes}' if nodes > 1 else ''}",
            node_class=node_class,
            devices=devices,
            nodes=nodes,
            url=client.url,
            token_file=_checked(token_file),
            program=program,
            time_s=duration(limit, "--time"),
            signal_s=duration(early, "--signal"),
            idle_s=duration(idle, "--idle"),
            options=(*(f"--{option}={value}" for option, value in named.items() if value), *flags),
            settings=(*shared, *(settings or ())),
            setup=tuple(setup or ()),
        )
        if only_print:
            typer.echo(jobs.script(), nl=False)
            return
        pause_s = None if once else duration(every, "--every")
        _keep(client, jobs, most, duration(work, "--work"), array=array, every_s=pause_s)


def _checked(token_file: Path) -> Path:
    if read_secret(token_file) is None:
        raise FleetError(
            f"{token_file} is missing or empty; make it: (umask 077; ablate nodes enrol CLASS --uses 100 --for 7d > "
            f"{shlex.quote(str(token_file))})"
        )
    return token_file.absolute()


def _keep(client: Client, jobs: slurm.SlurmFleet, most: int, work_s: int, *, array: bool, every_s: int | None) -> None:
    """Adjust the number of jobs, once or for ever. After the first time, a refusal is printed and tried again."""
    if is_loopback(client.url):
        err().print(f"jobs will ask for work at {escape(client.url)}, as only this machine can: set ABLATE_URL")
    last, is_first = "", True
    while True:
        try:
            done = slurm.adjust(jobs, jobs.wanted(client.waiting(), work_s=work_s, most=most), array=array)
        except (FleetError, ClientError) as error:
            if is_first:
                raise
            done = f"[yellow]not adjusted:[/] {escape(str(error))}"
        else:
            done = escape(done)
        if done != last:
            (err() if every_s else out()).print(done)
        if every_s is None:
            return
        last, is_first = done, False
        time.sleep(every_s)

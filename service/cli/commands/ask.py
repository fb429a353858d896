"""`ablate ask`: from a command and a change of it to a first answer, with nothing else to set up."""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from ablate.experiments.design.spec import MIN_BLOCKS
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.documents import write_whole
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.records.code_archive import ASKED
from ablate.experiments.records.git_repository import Repository
from ablate.experiments.reporting import wording
from ablate.experiments.system.processes import OWN_PYTHON
from ablate.experiments.system.shell_python import in_shell_python
from ablate.service.cli.arguments import read_spec
from ablate.service.cli.asking import AskedQuestion, CheckedTimes, asked_change, check_devices, checked
from ablate.service.cli.follow import run_spec
from ablate.service.cli.output import StreamOption, err, guarded
from ablate.service.cli.verdicts import exit_code
from ablate.service.client.settings import get_client_settings

app = typer.Typer()

_HEAD = f"{ASKED}, which overwrites it. Run it again: ablate run {{}}\n"
_LONG_MIN = 10
"""From here on a shorter program is advised."""
_CHECK = (*OWN_PYTHON, "-c", "from ablate.experiments.system.console import main; main()", "check", "--json")


CommandArgument = Annotated[
    list[str],
    typer.Argument(metavar="-- COMMAND...", help="Program and arguments of the baseline; {seed} is filled in."),
]
VsOption = Annotated[
    list[str] | None,
    typer.Option(metavar="ARGUMENTS", help="Arguments of the variant: one of the same name is replaced, others added."),
]
VsCommitOption = Annotated[
    str | None, typer.Option(metavar="REVISION", help="The variant is the folder as it is in this commit.")
]
VsEnvOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="Variable of the variant; repeatable.")
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        help="What decides: a metric, a line that prints it, such as 'val loss {}', or tensorboard:TAG. Such a number "
        "needs --seed '{seed}' in the command. Default: speed."
    ),
]
BetterOption = Annotated[Literal["lower", "higher"] | None, typer.Option(help="Better direction of --metric.")]
DataOption = Annotated[
    list[str] | None, typer.Option(help="File or folder that trials may read, as workload.data; repeatable.")
]
StepsOption = Annotated[int | None, typer.Option(min=1, max=10_000, help="Steps of a trial's window.")]
BlocksOption = Annotated[int, typer.Option(min=MIN_BLOCKS, help="Blocks; each runs every arm once.")]
TimeoutOption = Annotated[float, typer.Option(min=1, help="Seconds that one run of the check may take.")]


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@guarded
def ask(  # noqa: PLR0913, PLR0917 - a command's options are its function's arguments
    command: CommandArgument,
    vs: VsOption = None,
    vs_commit: VsCommitOption = None,
    vs_env: VsEnvOption = None,
    metric: MetricOption = None,
    better: BetterOption = None,
    data: DataOption = None,
    steps: StepsOption = None,
    blocks: BlocksOption = MIN_BLOCKS,
    timeout: TimeoutOption = 300.0,
    as_json: StreamOption = False,
) -> None:
    """Ask whether a change of your own program is better: check it, measure it, and show the answer.

    Starts the stack if none runs, which then keeps running. Writes the spec beside the program.

    The exit code is that of `ablate verdict`, 6 if the check fails, or 130 after Ctrl-C, which cancels nothing.
    """
    shell = in_shell_python(command)
    question = asked_change(
        shell.argv,
        changes=_words(vs or ()),
        env=_variables(vs_env or ()),
        commit=None if vs_commit is None else Repository.around(Path()).commit(vs_commit),
        revision=vs_commit or "",
        metric=metric,
        better=better,
        data=(*(data or ()), *shell.folders),
        search_path=shell.search_path,
        steps=steps,
        blocks=blocks,
    )
    for arm, line in question.command_lines():
        err().print(f"[bold]{escape(arm)}[/]  {escape(line)}", soft_wrap=True)
    file, has_service = Path(f"{question.name}.yaml"), bool(get_client_settings().url)
    if not has_service:
        check_devices()
    code, question, times = checked(question, lambda one: _check(file, one, timeout))
    if code:
        err().print(f"not measured, because the check failed; the spec is {escape(str(file))}")
        raise typer.Exit(code)
    _write(file, question.spec(times))
    for line in question.remarks(times):
        err().print(line)
    err().print(f"wrote {escape(str(file))}: the question, and the rule that answers it")
    _say_how_long(question, times)
    if not has_service:
        _start_stack()
    _id, verdict = run_spec(read_spec(str(file)), as_json=as_json)
    raise typer.Exit(exit_code(verdict.variants, None))


def _say_how_long(question: AskedQuestion, times: CheckedTimes) -> None:
    minutes = max(1, round(question.expected_s(times) / 60))
    long = wording.counted(minutes, "minute")
    err().print(f"{question.blocks} blocks of 3 trials, about {long}")
    if minutes > _LONG_MIN and times.step_s is None:
        err().print("sooner: an argument for fewer steps or epochs, or marked steps (docs/own-code.md)")


def _start_stack() -> None:
    """Start the stack of this home unless it runs."""
    from ablate.service.cli.stack_commands import print_progress  # imports the settings of the service
    from ablate.service.stack import control
    from ablate.service.stack.layout import home_files

    control.start(home_files(), print_progress)


def _words(values: Sequence[str]) -> tuple[str, ...]:
    if len(values) > 1:
        detail = f"{len(values)} changes were given; it asks about one, which may change several arguments"
        hint = f"--vs={shlex.quote(' '.join(values))}, or a spec with several variants: ablate init SPEC --like command"
        raise SpecError([SpecProblem(pointer="--vs", detail=detail, hint=hint)])
    text = "".join(values)
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        detail = f"--vs is {text!r}, which a shell would not read: {error}"
        raise SpecError([SpecProblem(pointer="--vs", detail=detail, hint="close the quotes")]) from error


def _variables(values: Sequence[str]) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    wrong = next((name for name, equals, _value in pairs if not (name and equals)), None)
    if wrong is not None:
        detail = f"--vs-env is {wrong!r}; allowed: a name, '=' and a value"
        raise SpecError([SpecProblem(pointer="--vs-env", detail=detail, hint="--vs-env OMP_NUM_THREADS=1")])
    return {name: value for name, _equals, value in pairs}


def _write(file: Path, values: dict[str, Any]) -> None:
    """Write the spec. Raises SpecError for a file that another command wrote."""
    head = _HEAD.format(shlex.quote(file.name))
    if file.exists() and not file.read_text(encoding="utf-8").startswith(head):
        detail = f"{str(file)!r} exists, and `ablate ask` did not write it"
        raise SpecError([SpecProblem(pointer="SPEC", detail=detail, hint="rename it, or run it: ablate run SPEC")])
    write_whole(file, head + spec_yaml(values).decode())


def _check(file: Path, question: AskedQuestion, timeout_s: float) -> tuple[int, CheckedTimes]:
    """Run a short trial of every arm; return the exit code of the check and the times. Exits if nothing could run."""
    _write(file, question.spec())
    command = [*_CHECK, "--timeout", f"{timeout_s:g}", str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise typer.Exit(done.returncode)
    times = CheckedTimes.read(done.stdout)
    for check in times.checks:
        state = "[green]ok[/]" if check["passed"] else "[red]failed[/]" if check["needed"] else "[yellow]note[/]"
        err().print(f"  {state}  {escape(check['name'])}: {escape(check['detail'])}", soft_wrap=True)
    return done.returncode, times

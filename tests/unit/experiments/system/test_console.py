from importlib.metadata import EntryPoint, entry_points

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from ablate.experiments.outcomes import ExitCode
from ablate.experiments.system.console import GROUP, MOVED, PANELS, build

merged = typer.Typer()
named = typer.Typer(name="machine")


@merged.command()
def hello() -> None:
    typer.echo("hello")


@merged.command()
def other() -> None:
    typer.echo("other")


@named.command()
def start() -> None:
    typer.echo("started")


@named.command()
def stop() -> None:
    typer.echo("stopped")


def _program(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    apps = {"first": merged, "second": named}

    def load(entry: EntryPoint) -> typer.Typer:
        if entry.name == "third":
            raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")
        return apps[entry.name]

    monkeypatch.setattr(EntryPoint, "load", load)
    return build(EntryPoint(name=name, value="somewhere:app", group=GROUP) for name in ("third", "second", "first"))


def test_build_merges_a_group_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(_program(monkeypatch), ["hello"]).output == "hello\n"


def test_build_keeps_a_named_group_as_a_sub_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(_program(monkeypatch), ["machine", "start"]).output == "started\n"


def test_build_lists_a_group_whose_package_is_absent_and_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    program = _program(monkeypatch)
    assert "fastapi" in CliRunner().invoke(program, ["--help"]).output
    done = CliRunner().invoke(program, ["third", "--anything", "at-all"])
    assert done.exit_code == ExitCode.ERROR
    assert "package 'fastapi' is not installed" in done.output


def test_wrong_usage_is_no_decision() -> None:
    assert CliRunner().invoke(build(entry_points(group=GROUP)), ["plan"]).exit_code == ExitCode.USAGE


def test_version_prints_one_line() -> None:
    done = CliRunner().invoke(build(entry_points(group=GROUP)), ["--version"])
    assert done.output.startswith("ablate ")
    assert done.exit_code == 0


def test_every_listed_command_has_its_name_and_prints_its_help() -> None:
    program = get_command(build(entry_points(group=GROUP)))
    context = typer.Context(program)
    listed = program.list_commands(context)
    assert {name: program.get_command(context, name).name for name in listed} == {name: name for name in listed}
    assert listed == [name for names in PANELS.values() for name in names]
    codes = {name: CliRunner().invoke(build(entry_points(group=GROUP)), [name, "--help"]).exit_code for name in listed}
    assert codes == dict.fromkeys(listed, 0)


def test_a_command_of_the_first_release_says_what_to_type_now() -> None:
    program = build(entry_points(group=GROUP))
    for old, words in MOVED.items():
        done = CliRunner().invoke(program, [old, "anything"])
        text = " ".join(done.output.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())
        assert (done.exit_code, f"It is now: {words}" in text) == (ExitCode.USAGE, True), old
        first, second = words.removeprefix("ablate ").partition(",")[0].split()[:2]
        assert second == "SPEC" or second in CliRunner().invoke(program, [first, "--help"]).output.split()


def test_an_entry_adds_its_command_to_a_group_of_another() -> None:
    program = build(entry_points(group=GROUP))
    assert {"exec", "import", "verify"} <= set(CliRunner().invoke(program, ["offline", "--help"]).output.split())

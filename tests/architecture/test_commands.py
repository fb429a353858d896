"""What pages say about commands: every command and option that they name exists, and what is not run says why."""

import re
import shlex
from importlib.metadata import entry_points

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from ablate.experiments.system import console
from tests.architecture.pages import ROOT
from tests.console_blocks import KINDS, PAGES, all_commands, commands_of

SPAN = re.compile(r"`(ablate [^`]+)`")
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
PROGRAM = typer.main.get_command(console.build(entry_points(group=console.GROUP)))
FREE = ("exec",)
"""Commands that hand their options on."""


def unknown_in(text: str) -> str | None:
    """Return the first word of a command line of `ablate` that is no command or option of it, None when all are."""
    command, context = PROGRAM, typer.Context(PROGRAM)
    words = iter(shlex.split(text, comments=True)[1:])
    for word in words:
        if isinstance(command, TyperGroup) and not word.startswith("-"):
            if word == "...":
                return None
            subcommand = command.get_command(context, word)
            if subcommand is None:
                return None if command.invoke_without_command else word
            command = subcommand
        elif word in (">", "|", "&&", "--"):  # the words after it are not ours
            return None
        elif word.startswith("--") and command.name not in FREE and not takes(command, word.partition("=")[0]):
            return word
    return None


def lacking_in(text: str) -> list[str]:
    """Return the options that a command line of `ablate` must have and has not; none where it asks for help."""
    command, context = PROGRAM, typer.Context(PROGRAM)
    words = shlex.split(text, comments=True)[1:]
    for word in words:
        if isinstance(command, TyperGroup) and (subcommand := command.get_command(context, word)) is not None:
            command = subcommand
    given = {word.partition("=")[0] for word in words}
    needed = [one for one in command.params if one.required and one.param_type_name == "option"]
    return [] if "--help" in given else [one.opts[0] for one in needed if not given & set(one.opts)]


def takes(command: TyperCommand | TyperGroup, option: str) -> bool:
    known = [name for one in command.params for name in (*one.opts, *one.secondary_opts)]
    return option in (*known, "--help")


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/LOG.md"])
def test_commands_and_options_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = [" ".join(span.split()) for span in SPAN.findall(text)]
    lines = [line for line in [*named, *typed_in(page)] if line.startswith("ablate ")]
    wrong = {line: word for line in lines if (word := unknown_in(line)) is not None}
    assert wrong == {}


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/LOG.md"])
def test_command_lines_of_blocks_give_the_options_that_are_needed(page: str) -> None:
    lines = [line for line in typed_in(page) if line.startswith("ablate ")]
    assert {line: options for line in lines if (options := lacking_in(line))} == {}


def typed_in(page: str) -> list[str]:
    """Return the command lines of a page's blocks, run by tests or not, without the settings before them."""
    prefix = r"(?:(?:\w+=(?:\$\([^)]*\)|\S)+|taskset -c \S+|sudo) )*(?:\.venv/bin/)?"
    parts = [part for command in commands_of(page) for part in command.text.split(" && ")]
    return [re.sub(f"^{prefix}", "", part) for part in parts]


def test_make_targets_that_pages_name_exist() -> None:
    named = {
        target
        for page in PAGES
        for target in re.findall(r"(?:`|\$ |&& )make ([a-z-]+)", (ROOT / page).read_text(encoding="utf-8"))
    }
    assert named - set(TARGETS) == set()


def test_commands_stand_in_console_blocks_where_they_are_found() -> None:
    stray = [
        f"{page}: {line.strip()}"
        for page in PAGES
        for line in re.sub(r"^```.*?^```", "", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL).split(
            "\n"
        )
        if re.match(r"\s+(\$ )?(ablate|make|docker|pip) ", line)
    ]
    assert stray == []


def test_a_command_that_is_not_run_says_why_in_known_words_and_names_files_that_exist() -> None:
    marked = [command for command in all_commands() if command.kind is not None]
    assert {command.kind for command in marked} <= set(KINDS)
    named = [path for command in marked for path in re.findall(r"(?:tests|docs)/[\w./-]+\w", command.remark)]
    assert [path for path in named if not (ROOT / path).is_file()] == []
    assert [str(command) for command in marked if not command.remark] == []

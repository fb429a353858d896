"""The commands of the documentation: lines that begin with `$ ` in ```console blocks, page by page.

A block that cannot be run here stands behind a comment that says why: `<!-- not run: KIND; more -->`. "run by FILE" in
it names the test that runs the same, "FILE is what it gave" what is left of a run by hand.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.architecture.pages import ROOT

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docker").glob("**/*.md")]
)
KINDS = ("another machine", "a program of yours", "a download of packages", "an H200", "containers", "minutes", "root")
"""Why a command is not run here."""
_MARK = re.compile(r"<!-- not run: ([^;>]+?)(?:; ([^>]+?))? -->")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a page."""

    page: str
    line: int
    text: str
    """As a shell takes it, comment included."""
    kind: str | None
    """Why it is not run; None for one that is."""
    remark: str
    """What the mark says besides."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {without_comment(self.text)}"


def without_comment(text: str) -> str:
    """Return a command without what a shell would not read."""
    return re.sub(r"\s#\s.*$", "", text).strip()


def commands_of(page: str) -> Iterator[Command]:
    """Yield the commands of a page in their order."""
    language, mark = None, None
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            language = None if language is not None else line.removeprefix("```")
        elif language == "console" and line.startswith("$ "):
            kind, remark = mark.groups("") if mark else (None, "")
            yield Command(page=page, line=number, text=line[2:], kind=kind, remark=remark)
        elif language is None:
            mark = _MARK.fullmatch(line)


def all_commands() -> list[Command]:
    """Return the commands of every page."""
    return [command for page in PAGES for command in commands_of(page)]

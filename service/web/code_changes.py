"""The lines in which the sent code of a variant differs from the baseline's, for readers who may use both archives."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from ablate.experiments.design.program_files import ARCHIVE
from ablate.experiments.errors import CodeArchiveError
from ablate.experiments.outcomes import VARIANT
from ablate.experiments.records.code_archive import read_files
from ablate.experiments.reporting import wording
from ablate.service.principals import Principal
from ablate.service.store.files import code_archives

MOST_PACKED = 2**20
MOST_EXPANDED = 2**23
"""Bytes of an archive that a page reads, packed and expanded."""
MOST_FILE_LINES = 3_000
MOST_LINES = 120
"""Lines of all differences of a variant that a page shows."""
_CONTEXT = 2
_TONES = {"+": "added", "-": "removed", "@": "place"}


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """One file that differs."""

    name: str
    what: str
    """Added and removed lines in numbers, or what else is different."""
    lines: tuple[tuple[str, str], ...] = ()
    """(class, text) of each line of the difference."""


@dataclass(frozen=True, kw_only=True)
class CodeChange:
    """The files in which a variant's code differs."""

    arm: str
    files: tuple[FileChange, ...]
    left_out: str = ""
    """What is not shown, and why."""


def code_changes(
    connection: Connection, arms: Sequence[Mapping[str, Any]], principal: Principal
) -> tuple[CodeChange, ...]:
    """Return the changed code of every variant; none for code that the principal may not use or that is dropped."""
    base, *others = [(arm, _archive(arm)) for arm in arms]
    own = ((arm["name"], digest) for arm, digest in others if arm["role"] == VARIANT)
    changed = [(name, digest) for name, digest in own if digest not in ("", base[1])]
    if not changed or not base[1]:
        return ()
    digests = {base[1], *(digest for _name, digest in changed)}
    usable = code_archives.usable_by(connection, digests, user=code_archives.user_of(principal))
    read = {one: code_archives.read_small(connection, one, most_bytes=MOST_PACKED) for one in sorted(usable)}
    return tuple(
        _change(name, theirs, mine)
        for name, digest in changed
        if (theirs := read.get(base[1])) is not None and (mine := read.get(digest)) is not None
    )


def _archive(arm: Mapping[str, Any]) -> str:
    code = arm["config"].get("code")
    return str(code.get(ARCHIVE, "")) if isinstance(code, Mapping) else ""


def _change(arm: str, base: bytes, own: bytes) -> CodeChange:
    try:
        before, after = (read_files(one, most_bytes=MOST_EXPANDED) for one in (base, own))
    except CodeArchiveError as error:
        return CodeChange(arm=arm, files=(), left_out=f"Its code cannot be shown: {error}.")
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    files, room = [], MOST_LINES
    for name in names:
        file = _file(name, before.get(name), after.get(name))
        files.append(FileChange(name=name, what=file.what, lines=file.lines[:room]))
        room -= len(files[-1].lines)
        if len(files[-1].lines) < len(file.lines) or not room:
            break
    left = len(names) - len(files)
    more = f", and {wording.counted(left, 'more file')}" if left else ""
    return CodeChange(arm=arm, files=tuple(files), left_out=f"The first {MOST_LINES} lines{more}." if room <= 0 else "")


def _file(name: str, before: bytes | None, after: bytes | None) -> FileChange:
    texts = [_lines(content) for content in (before, after)]
    if any(lines is None for lines in texts):
        return FileChange(name=name, what="another file that is no text, or is long")
    old, new = texts
    shown = list(_difference(old or [], new or []))
    added, removed = (sum(tone == kind for tone, _text in shown) for kind in ("added", "removed"))
    what = "new file" if before is None else "removed file" if after is None else f"+{added} \N{MINUS SIGN}{removed}"
    return FileChange(name=name, what=what, lines=tuple(shown))


def _lines(content: bytes | None) -> list[str] | None:
    """Return the lines of a text; none of a file that is not there, None of any other or a long one."""
    try:
        lines = (content or b"").decode().splitlines()
    except UnicodeDecodeError:
        return None
    return None if len(lines) > MOST_FILE_LINES or "\0" in "".join(lines) else lines


def _difference(old: list[str], new: list[str]) -> Iterator[tuple[str, str]]:
    for line in list(difflib.unified_diff(old, new, lineterm="", n=_CONTEXT))[2:]:
        yield _TONES.get(line[0], "same"), line

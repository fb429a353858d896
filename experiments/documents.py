"""Documents: frozen models that reject unknown fields, the digest that seals one, and files that appear whole.

Every spec, plan, receipt, bundle, message and verdict is a `Frozen` model. The field `digest` of a sealed document is
the digest of all its other fields, except a `signature` over that digest.
"""

import os
import secrets
import stat
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from ablate.experiments.digest import digest


def _number(value: Any) -> Any:
    """Reject text and booleans, which pydantic would convert although the schema forbids them."""
    if isinstance(value, str | bytes | bool):
        raise ValueError(f"expected a number, got {value!r:.80}")
    return value


Whole = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]


class Frozen(BaseModel):
    """A document: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Document = TypeVar("Document", bound=BaseModel)


def content_digest(document: BaseModel) -> str:
    """Return the digest of `document` without digest and signatures.

    Raises ValueError unless all numbers are finite.
    """
    return digest(document.model_dump(mode="json", exclude={"digest", "signature"}))


def seal(unsealed: Document) -> Document:
    """Return `unsealed` with its digest. Raises ValueError unless all numbers are finite."""
    return unsealed.model_copy(update={"digest": content_digest(unsealed)})


def seal_problem(document: BaseModel) -> str | None:
    """Return "was altered: ..." when the digest does not fit the content, or nothing could; else None."""
    stored = dict(document)["digest"]
    try:
        expected = content_digest(document)
    except ValueError as error:  # an infinite number, or half of a character
        return f"was altered: its content has no digest: {error}"
    if stored == expected:
        return None
    return f"was altered: its digest is {stored}, the content gives {expected}"


def first_problem(error: ValidationError) -> str:
    """Return pydantic's first error as "field.part: message"."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}".removeprefix(": ")


def settings_problems(error: ValidationError) -> list[str]:
    """Return pydantic's errors about settings, each with its environment variable. No value of a secret appears."""
    problems = []
    for line in error.errors(include_url=False, include_input=False):
        variable = "_".join(["ABLATE", *(str(part).upper() for part in line["loc"])])
        problems.append(f"{variable}: {line['msg'].removeprefix('Value error, ')}")
    return problems


def make_state_folder(folder: Path) -> None:
    """Make a folder for our files unless it exists; git ignores a new one, with all that it will hold."""
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")


def write_whole(path: Path, text: str, *, mode: int | None = None, replace: bool = True) -> None:
    """Write a UTF-8 file so that a reader, even after a power failure, finds all of it or nothing. Raises OSError.

    Args:
        path: the file. A device, a pipe or another special file is written in place.
        text: its content.
        mode: permissions; None keeps those of an existing file, and uses the process's default for a new one.
        replace: whether to replace an existing file; otherwise its content stays, and `text` is dropped.

    """
    if _is_special(path):
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link stays a link
    if mode is None and path.exists():
        mode = stat.S_IMODE(path.stat().st_mode)
    part = path.with_name(f"{path.name}.part" if replace else f"{path.name}.{secrets.token_hex(4)}.part")
    part.unlink(missing_ok=True)  # a killed process may have left it with another mode
    try:
        _write_synced(part, text, mode)
        if replace:
            part.replace(path)
        else:
            with suppress(FileExistsError):
                os.link(part, path)
        _sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _write_synced(path: Path, text: str, mode: int | None) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        if mode is not None:
            os.fchmod(handle, mode)
        file.write(text)
        file.flush()
        os.fsync(handle)


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power failure, if the file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def move_aside(path: Path) -> Path:
    """Rename a damaged file or folder, whatever its kind or mode, and return its new path. Raises OSError."""
    aside = path.with_name(f"{path.name}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}")
    path.rename(aside)
    return aside

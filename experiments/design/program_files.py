"""The files and packages of a program in a spec: its code, its data and its Python environment."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Field, field_validator

from ablate.experiments.design.problems import shown
from ablate.experiments.design.spec_values import MOST_LETTERS, NAME_PATTERN, Name, SpecPart, refuse

ARCHIVE = "archive"
"""Key of code that was packed and sent, in place of a folder on the node."""
HIDDEN = "hidden"
"""In place of the digest of an archive that a reader may not use."""
MAX_DATA = 32
_ANY_FOLDER = "^[^\\u0000-\\u001f\\u007f]{1,1000}$"
_ABSOLUTE = "^/[^\\u0000-\\u001f\\u007f]{1,1000}$"
_DIGEST = "^sha256:[0-9a-f]{64}$"
_COMMIT = "^[0-9a-f]{7,64}$"
COMMIT = re.compile(_COMMIT[1:-1])
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|[^/@\s]+@[^/:\s]+:")


def is_url(text: str) -> bool:
    """Return whether a text is the address of a repository on another machine, such as git@host:repository."""
    return _URL.match(text) is not None


def _refuse_url(text: str) -> None:
    if is_url(text):
        hint = f"clone it, and write its folder: git clone {text}"
        raise refuse(f"code is {shown(text)}, an address; allowed: a folder, because a node fetches nothing", hint)


def _check_code(value: object) -> object:
    allowed = "a folder to pack and send, such as '.', an absolute folder on the node"
    if isinstance(value, str):
        _refuse_url(value)
        if not re.fullmatch(_ANY_FOLDER[1:-1], value):
            detail = f"code {shown(value)} is no folder; allowed: {allowed}"
            raise refuse(detail, "or {git: /srv/git/lab.git, commit: 4f2a9c1}")
        return value
    if isinstance(value, Mapping) and set(value) == {"git", "commit"}:
        if not isinstance(value["git"], str) or not re.fullmatch(_ANY_FOLDER[1:-1], value["git"]):
            raise refuse(
                f"git is {shown(value['git'])}; allowed: a folder beside the spec, or an absolute one on the node"
            )
        _refuse_url(value["git"])
        _check_commit(value["commit"])
        return dict(value)
    if isinstance(value, Mapping) and set(value) == {ARCHIVE}:
        if value[ARCHIVE] == HIDDEN:
            hint = "its sender types: ablate share ABLATION --code-with NAME"
            raise refuse("the archive belongs to somebody else, who has not shared it with you", hint)
        if not isinstance(value[ARCHIVE], str) or not re.fullmatch(_DIGEST[1:-1], value[ARCHIVE]):
            raise refuse(f"archive is {shown(value[ARCHIVE])}; allowed: sha256: and 64 hexadecimal digits")
        return dict(value)
    others = "{git: folder, commit: hexadecimal digits}, or {archive: digest}"
    raise refuse(f"code is {shown(value)}; allowed: {allowed}, {others}")


def _check_commit(value: object) -> None:
    if not isinstance(value, str) or not re.fullmatch(_COMMIT[1:-1], value):
        raise refuse(f"commit is {shown(value)}; allowed: 7 to 64 hexadecimal digits; a branch may move")


def _check_variant_code(value: object) -> object:
    if isinstance(value, Mapping) and set(value) == {"commit"}:
        _check_commit(value["commit"])
        return dict(value)
    return _check_code(value)


def _check_data(value: object) -> object:
    if isinstance(value, str):
        if not re.fullmatch(_ANY_FOLDER[1:-1], value) or not value.strip("/"):
            detail = f"data {shown(value)} is no file or folder; allowed: one beside the spec, such as data/"
            raise refuse(detail, "or an absolute path on the node, other than / as a whole")
        return value
    if isinstance(value, Mapping) and set(value) == {"path", "at"}:
        return dict(value)
    raise refuse(f"data is {shown(value)}; allowed: a path beside the spec, or an absolute one on the node")


def _below_the_code(name: str, value: str, example: str) -> str:
    if value.startswith("/") or ".." in value.split("/"):
        raise refuse(f"{name} is {shown(value)}; allowed: a place below the folder of the code, such as {example}")
    return value


class Commit(SpecPart):
    """A commit of the workload's repository."""

    commit: Annotated[str, Field(pattern=_COMMIT, description="7 to 64 hexadecimal digits.")]


class RepositoryCommit(SpecPart):
    """A commit of a repository: one beside the spec, whose files commands pack and send, or one on the node."""

    git: Annotated[
        str,
        Field(
            pattern=_ANY_FOLDER, description="A folder in a repository beside the spec, or a repository on the node."
        ),
    ]
    commit: Annotated[str, Field(pattern=_COMMIT, description="7 to 64 hexadecimal digits.")]


class SentCode(SpecPart):
    """Code that was packed and sent to the service, or travels with a plan."""

    archive: Annotated[str, Field(pattern=_DIGEST, description="Digest of the archive; `code: .` makes it.")]


class DataBeside(SpecPart):
    """Data that the program finds beside its code, although it was not sent."""

    path: Annotated[str, Field(pattern=_ABSOLUTE, description="The file or folder on the node.")]
    at: Annotated[str, Field(pattern=_ANY_FOLDER, description="Its place below the folder of the code.")]

    @field_validator("at")
    @classmethod
    def _below(cls, value: str) -> str:
        return _below_the_code("at", value, "data")


class LockedEnvironment(SpecPart):
    """A Python environment that each node builds once, from packages with exact versions."""

    lock: Annotated[
        str,
        Field(
            pattern=_ANY_FOLDER,
            description="A file of the code with NAME==VERSION in each line, as `uv export` and `pip freeze` write it.",
        ),
    ]


def _check_environment(value: object) -> object:
    if isinstance(value, str) and len(value) <= MOST_LETTERS and re.fullmatch(NAME_PATTERN[1:-1], value):
        return value
    if isinstance(value, LockedEnvironment):
        return value
    if isinstance(value, Mapping) and set(value) == {"lock"}:
        lock = value["lock"]
        if not isinstance(lock, str) or not re.fullmatch(_ANY_FOLDER[1:-1], lock):
            raise refuse(f"lock is {shown(lock)}; allowed: a file of the code, such as requirements.lock")
        return {"lock": _below_the_code("lock", lock, "requirements.lock")}
    allowed = f"a name of up to {MOST_LETTERS} of a-z, 0-9 and '-', or {{lock: FILE}} with a file of the code"
    raise refuse(f"environment is {shown(value)}; allowed: {allowed}", "environment: {lock: requirements.lock}")


def _check_variant_environment(value: object) -> object:
    if isinstance(value, str):
        detail = (
            f"environment is {shown(value)}; a variant's packages are a lock, {{lock: FILE}} with a file of the code"
        )
        raise refuse(detail, "environment: {lock: requirements.lock}")
    return _check_environment(value)


Environment: TypeAlias = Annotated[
    Annotated[Name, Field(max_length=MOST_LETTERS)] | LockedEnvironment, BeforeValidator(_check_environment)
]
"""A Python environment of the node by its name, or one that each node builds."""
VariantEnvironment: TypeAlias = Annotated[LockedEnvironment, BeforeValidator(_check_variant_environment)]
_Folder: TypeAlias = Annotated[str, Field(pattern=_ANY_FOLDER)]
Code: TypeAlias = Annotated[_Folder | RepositoryCommit | SentCode, BeforeValidator(_check_code)]
"""A folder to send, a folder on the node, a commit of a repository on the node, or an archive that was sent."""
VariantCode: TypeAlias = Annotated[_Folder | RepositoryCommit | SentCode | Commit, BeforeValidator(_check_variant_code)]
"""As `Code`, or another commit of the workload's repository."""
Data: TypeAlias = Annotated[
    tuple[Annotated[_Folder | DataBeside, BeforeValidator(_check_data)], ...],
    Field(strict=False, max_length=MAX_DATA),
]
"""Files and folders beside the spec, which its reader makes `DataBeside`, or absolute ones on the node."""


def without_archives(text: str, digests: Iterable[str]) -> str:
    """Return the text of a spec or a plan with `HIDDEN` in place of these digests."""
    for digest in digests:
        text = text.replace(digest, HIDDEN)
    return text

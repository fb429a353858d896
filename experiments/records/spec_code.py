"""Folders of code and data in a spec: pack code and name its archives in the text instead; make data absolute."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

from ablate.experiments.design.load import load_values
from ablate.experiments.design.problems import listed, nearest, pointer
from ablate.experiments.design.program_files import ARCHIVE, COMMIT, is_url
from ablate.experiments.design.workload import COMMAND
from ablate.experiments.errors import CodeArchiveError, SpecError, SpecProblem
from ablate.experiments.ids import COMMIT_LABEL
from ablate.experiments.outcomes import BASELINE
from ablate.experiments.records.code_archive import PackedCode, pack_code, pack_commit
from ablate.experiments.system.logs import WARNING

_RELATIVE = "the folder is relative to the spec; an absolute one is on the node"
_Place = tuple[str, ...]
_Source = tuple[str, str | None]
"""A folder, and the commit of its repository; None for the files as they are."""
_WORKLOAD: _Place = ("workload", "code")
_EVALUATION: _Place = ("workload", "evaluate", "code")
_SCRIPTS = (".py", ".sh")
_READS_SEED = re.compile(rb"(?m)^\s*(?:import|from)\s.*\bablate\b|ABLATE_TRIAL")
"""In programs that can learn the seed of their trial without an argument."""
_HAS_SEED = re.compile(rb"(?i)seed")


@dataclass(frozen=True, kw_only=True)
class PackedSpec:
    """A spec whose folders of code are archives."""

    content: bytes
    content_type: str
    archives: tuple[PackedCode, ...]
    """Without repetitions."""
    packed: tuple[str, ...]
    """A line for people about each folder or commit that was packed, and warnings."""


def pack_spec(
    content: bytes, content_type: str, folder: Path, commits: Mapping[str, str] = MappingProxyType({})
) -> PackedSpec:
    """Pack the folders of code that a spec names relative to `folder`. Raises SpecError with a pointer to each.

    `commits` has revisions by arm, and replaces the folders of these arms by their state in the commit. Every arm of a
    commit gets a label with the commit's whole name. A spec without such folders, or one that cannot be read, comes
    back unchanged: its reader says what is wrong.
    """
    unchanged = PackedSpec(content=content, content_type=content_type, archives=(), packed=())
    try:
        values = load_values(content, content_type)
    except SpecError:
        return unchanged
    places = dict(_folders(values)) | _at_commits(values, commits)
    hidden = _Hidden.of(values, folder, places)
    data = _data(values, folder)
    by_source = _packed(places, folder) if places else {}
    by_place = {place: by_source[source] for place, source in places.items()}
    shared = () if hidden is None else hidden.checked(by_place)
    if not places and data is None:
        return unchanged
    _check_evaluation(values["workload"], by_place)
    digests = {place: by_source[source].digest for place, source in places.items()}
    archives = {packed.digest: packed for packed in by_source.values()}
    names = {place: by_source[source].commit for place, source in places.items()}
    labels = {f"{COMMIT_LABEL}{_arm(place)}": one for place, one in names.items() if one and place != _EVALUATION}
    text, kind = _with_digests(content, content_type, values, _Edits(digests, labels, data))
    lines = [*(_line(source, packed) for source, packed in by_source.items()), *shared]
    lines += _without_seed(values, archives.values())
    lines += [f"data {one['at']}: {one['path']}, read there" for one in data or () if isinstance(one, Mapping)]
    return PackedSpec(content=text, content_type=kind, archives=tuple(archives.values()), packed=tuple(lines))


def _data(values: Mapping[str, Any], folder: Path) -> list[Any] | None:
    """Return the data of a spec with absolute paths; None if none is relative. Raises SpecError.

    Relative ones are relative to the spec, and lie below the folder of the code, where the program looks for them.
    """
    workload = values.get("workload")
    if not isinstance(workload, Mapping) or COMMAND not in workload or not isinstance(workload.get("data"), list):
        return None
    named = workload["data"]
    if not any(map(_is_relative, named)):
        return None
    code = _absolute(folder / (_folder_of(workload.get("code")) or ""))
    return [_beside(one, number, folder, code) if _is_relative(one) else one for number, one in enumerate(named)]


def _check_evaluation(workload: Mapping[str, Any], packed: Mapping[_Place, PackedCode]) -> None:
    """Raise SpecError if the evaluation runs a file that its packed code lacks."""
    own = workload.get("evaluate")
    command, code = (own.get(COMMAND), own.get("code")) if isinstance(own, Mapping) else (own, None)
    place = _WORKLOAD if code is None else _EVALUATION
    script = _script_of(command)
    if script is None or place not in packed or os.path.normpath(script) in packed[place].names():
        return
    detail = f"the evaluation runs {script!r}, and the packed code has no such file"
    hint = "files that git ignores are not packed; its path is relative to the folder of the code"
    raise SpecError([SpecProblem(pointer=pointer("workload", "evaluate"), detail=detail, hint=hint)])


@dataclass(frozen=True)
class _Hidden:
    """The folder of an evaluation that is not that of the program, so that no program may read its answers."""

    name: str
    """As the spec has it."""
    spec: Path
    """Folder of the spec."""
    folder: str
    """Its place, links resolved."""
    arms: Mapping[_Place, str]
    """Places of the code of the arms."""
    data: Mapping[_Place, str]
    """Places of the data."""

    @classmethod
    def of(cls, values: Mapping[str, Any], folder: Path, places: Mapping[_Place, _Source]) -> "_Hidden | None":
        """Return the evaluation's folder; None where it has none of its own, or one that is not known here."""
        workload = values.get("workload")
        own = workload.get("evaluate") if isinstance(workload, Mapping) and COMMAND in workload else None
        name = _named(own.get("code")) if isinstance(own, Mapping) else None
        if name is None or not isinstance(workload, Mapping):
            return None
        names = {place: _named(code) for place, code in _codes(values)} | {p: one for p, (one, _) in places.items()}
        arms = {place: _real(folder, one) for place, one in names.items() if one and place != _EVALUATION}
        listed_data = workload["data"] if isinstance(workload.get("data"), list) else []
        paths = [one.get("path") if isinstance(one, Mapping) else one for one in listed_data]
        data: dict[_Place, str] = {
            ("workload", "data", str(n)): _real(folder, path) for n, one in enumerate(paths) if (path := _named(one))
        }
        hidden = cls(name, folder, _real(folder, name), arms, data)
        return None if hidden.folder == arms.get(_WORKLOAD) else hidden

    def checked(self, packed: Mapping[_Place, PackedCode]) -> list[str]:
        """Return a line about files that the program has, too. Raises SpecError if its arms or data have the folder."""
        problems = [*self._in_code(packed), *self._in_data()]
        if problems:
            raise SpecError(problems)
        if _EVALUATION not in packed:
            return []
        files = {name: digest for name, digest in packed[_EVALUATION].file_digests().items() if not self._of_arm(name)}
        has = {place: set(code.file_digests().values()) for place, code in packed.items() if place != _EVALUATION}
        base = has.pop(_WORKLOAD, set())
        shared = sorted(name for name, digest in files.items() if digest in base)
        if files and len(shared) == len(files):
            detail = f"the program's own code has every file of {self.name!r}, so it can read the right answers"
            raise SpecError([SpecProblem(pointer=pointer(*_EVALUATION), detail=detail, hint=_HIDE)])
        problems = [
            SpecProblem(pointer=pointer(*place), detail=copied_detail(names), hint=_LEAVE_OUT)
            for place, own in has.items()
            if (names := [name for name, digest in files.items() if digest in own - base])
        ]
        if problems:
            raise SpecError(problems)
        also = f"the program has {len(shared)} of its {len(files)} files, too ({listed(shared)})"
        return [f"evaluation {self.name}: {also}"] if shared else []

    def _of_arm(self, name: str) -> bool:
        """Return whether a file of the evaluation's folder belongs to an arm whose code lies in that folder."""
        path, own = Path(self.folder, name), Path(self.folder)
        return any(path.is_relative_to(arm) for arm in self.arms.values() if not own.is_relative_to(arm))

    def _in_code(self, packed: Mapping[_Place, PackedCode]) -> Iterator[SpecProblem]:
        for place, arm in self.arms.items():
            if not Path(self.folder).is_relative_to(arm):
                continue
            inner = Path(self.folder).relative_to(arm)
            names = packed[place].names() if place in packed else None  # a folder on the node is copied whole
            if names is None or any(Path(name).is_relative_to(inner) for name in names):
                detail = f"the code of arm '{_arm(place)}' has the evaluation's folder {self.name!r} in it, {_READABLE}"
                yield SpecProblem(pointer=pointer(*place), detail=detail, hint=self._beside(arm))

    def _in_data(self) -> Iterator[SpecProblem]:
        for place, path in self.data.items():
            inside = Path(path).is_relative_to(self.folder) and not self._of_arm(os.path.relpath(path, self.folder))
            if inside or Path(self.folder).is_relative_to(path):
                detail = f"{path} opens files of the evaluation's folder {self.name!r} to the program, {_READABLE}"
                yield SpecProblem(pointer=pointer(*place), detail=detail, hint=self._beside(path))

    def _beside(self, outer: str) -> str:
        """Say where the folder of the evaluation can lie."""
        if outer == self.folder or not Path(self.folder).is_relative_to(outer):
            return "give the program another folder"
        beside = Path(outer).parent / Path(self.folder).name
        name = os.path.relpath(beside, os.path.realpath(self.spec))
        return f"move it beside {outer}, and write evaluate: {{command: [...], code: {name}}}"


_READABLE = "so the program could read the right answers"
_HIDE = "keep the right answers in a folder that the program has no copy of"
_LEAVE_OUT = "take them out; files that a program may read, such as a model's code, belong to the baseline's code, too"


def copied_detail(names: Collection[str]) -> str:
    """Say that the code of an arm has files of the protected evaluation, which the baseline's lacks."""
    return f"this code has files of the protected evaluation ({listed(sorted(names))}), {_READABLE}"


def _named(code: object) -> str | None:
    """Return the folder of a code, beside the spec or on the node; None for an archive, a commit alone or no code."""
    if isinstance(code, Mapping):
        code = code.get("git")
    return code if isinstance(code, str) and code and "\0" not in code and not is_url(code) else None


def _real(folder: Path, name: str) -> str:
    return os.path.realpath(folder / os.path.expanduser(name))  # noqa: PTH111 - pathlib's raises for unknown users


def _script_of(command: object) -> str | None:
    """Return the file of the code that a command runs; None for a program of the node, or where it is not clear."""
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        return None
    words = [word for number, word in enumerate(command) if (number == 0 and "/" in word) or word.endswith(_SCRIPTS)]
    before = command[: command.index(words[0])] if words else ()
    if not words or words[0].startswith("/") or "{" in words[0] or {"-c", "-m"}.intersection(before):
        return None
    return str(words[0])


def _without_seed(values: Mapping[str, Any], archives: Collection[PackedCode]) -> Iterator[str]:
    """Warn if a number that the program reports decides, and neither the spec nor the code uses the block's seed."""
    metrics, verdict = values["workload"].get("metrics"), values.get("verdict")
    primary = verdict.get("primary") if isinstance(verdict, Mapping) else None
    decides = primary.get("metric") if isinstance(primary, Mapping) else None
    if not isinstance(metrics, Mapping) or decides not in metrics or "{seed}" in json.dumps(values, default=str):
        return
    if archives and not any(code.mentions(_READS_SEED) for code in archives):  # other code cannot be seen from here
        has_seed = any(code.mentions(_HAS_SEED) for code in archives)
        put = "put --seed '{seed}' into the command, or read ablate.trial().seed"
        yield (
            f"{WARNING}every block may report the same {decides}, because nothing here uses the block's seed: {put}"
            if has_seed
            else f"{WARNING}the code has no seed, so every block may report the same {decides}"
        )


def _absolute(path: Path) -> Path:
    """Return the path from the root without `..`; links stay, because a program uses them by these names."""
    return Path(os.path.normpath(path.absolute()))


def _beside(name: str, number: int, folder: Path, code: Path) -> str | dict[str, str]:
    if name.startswith("~"):
        return str(Path(name).expanduser())
    path, where = _absolute(folder / name), pointer("workload", "data", str(number))
    if not path.exists():
        detail = f"there is no {name!r} beside the spec"
        raise SpecError([SpecProblem(pointer=where, detail=detail, hint="an absolute path is on the node")])
    if not path.is_relative_to(code):
        detail, hint = f"{name!r} is outside of the code's folder {code}", f"write its absolute path: {path}"
        raise SpecError([SpecProblem(pointer=where, detail=detail, hint=hint)])
    return {"path": str(path), "at": str(path.relative_to(code))}


def _line(source: _Source, packed: PackedCode) -> str:
    name, commit = source
    where = f"commit {commit} of {name}" if commit else name
    files = f"{packed.files:,} file{'s' * (packed.files != 1)}"
    return f"code {where}: {files}, {packed.size:,} bytes packed, {packed.digest[:19]}"


def _arm(place: _Place) -> str:
    return place[1] if place[0] == "variants" else BASELINE


def _at_commits(values: Mapping[str, Any], commits: Mapping[str, str]) -> dict[_Place, _Source]:
    """Return the places and sources of arms whose code is to be that of a commit. Raises SpecError."""
    workload, variants = values.get("workload"), values.get("variants")
    base = _folder_of(workload.get("code")) if isinstance(workload, Mapping) and COMMAND in workload else None
    if commits and base is None:
        detail = "workload.code names no folder beside the spec, so no arm can be one of its commits"
        hint = "a recipe runs the code of the node; write a command with `code: .` to measure a commit"
        raise SpecError([SpecProblem(pointer=pointer("workload", "code"), detail=detail, hint=hint)])
    arms = variants if isinstance(variants, Mapping) else {}
    places: dict[_Place, _Source] = {}
    for arm, revision in commits.items():
        if arm not in (BASELINE, *arms):
            detail = f"there is no arm {arm!r} for commit {revision}; arms: {listed((BASELINE, *arms))}"
            raise SpecError(
                [SpecProblem(pointer=pointer("variants"), detail=detail, hint=nearest(arm, (BASELINE, *arms)))]
            )
        own = arms[arm] if arm != BASELINE else None
        code = own.get("code") if isinstance(own, Mapping) else None
        place = _WORKLOAD if arm == BASELINE else ("variants", arm, "code")
        places[place] = (_folder_of(code) or str(base), revision)
    return places


def _folder_of(code: object) -> str | None:
    """Return the folder beside the spec that a code is in; None for any other code."""
    if isinstance(code, Mapping) and set(code) == {"git", "commit"}:
        code = code["git"]
    return code if _is_relative(code) else None


def _codes(values: Mapping[str, Any]) -> Iterator[tuple[_Place, Any]]:
    """Yield the place of each code that a spec may name, the workload's first."""
    workload, variants = values.get("workload"), values.get("variants")
    if not isinstance(workload, Mapping) or COMMAND not in workload:
        return
    yield _WORKLOAD, workload.get("code")
    if isinstance(workload.get("evaluate"), Mapping):
        yield _EVALUATION, workload["evaluate"].get("code")
    for name, own in variants.items() if isinstance(variants, Mapping) else ():
        if isinstance(own, Mapping):
            yield ("variants", name, "code"), own.get("code")


def _folders(values: Mapping[str, Any]) -> Iterator[tuple[_Place, _Source]]:
    """Yield the place and source of each code to pack; an absolute folder is on the node.

    A commit alone is one of the repository around the workload's folder.
    """
    codes = dict(_codes(values))
    base = _folder_of(codes.get(_WORKLOAD))
    for place, code in codes.items():
        if not isinstance(code, Mapping):
            if _is_relative(code):
                yield place, (code, None)
            continue
        folder = _folder_of(code) if "git" in code or place == _EVALUATION else base
        if folder is not None and set(code) - {"git"} == {"commit"} and _is_commit(code["commit"]):
            yield place, (folder, code["commit"])


def _is_commit(value: object) -> bool:
    return isinstance(value, str) and COMMIT.fullmatch(value) is not None


def _is_relative(code: object) -> TypeGuard[str]:
    return isinstance(code, str) and code != "" and not code.startswith("/") and not is_url(code)


def _packed(places: Mapping[_Place, _Source], folder: Path) -> dict[_Source, PackedCode]:
    packed: dict[_Source, PackedCode] = {}
    problems = []
    for place, source in places.items():
        name, commit = source
        try:
            if source not in packed:
                packed[source] = pack_commit(folder / name, commit) if commit else pack_code(folder / name)
        except CodeArchiveError as error:
            hint = error.hint if folder.joinpath(name).is_dir() else _RELATIVE
            problems.append(SpecProblem(pointer=pointer(*place), detail=error.detail, hint=hint))
    if problems:
        raise SpecError(problems)
    return packed


@dataclass(frozen=True)
class _Edits:
    """What a spec gets in place of its folders."""

    digests: Mapping[_Place, str]
    labels: Mapping[str, str]
    data: list[Any] | None


def _with_digests(content: bytes, content_type: str, values: dict[str, Any], edits: _Edits) -> tuple[bytes, str]:
    """Return the spec's text with archives, data and labels: YAML keeps its comments."""
    wanted, digests, labels = deepcopy(values), edits.digests, edits.labels
    if edits.data is not None:
        wanted["workload"]["data"] = edits.data
    if labels and isinstance(values.get("labels", {}), Mapping):
        wanted["labels"] = {**labels, **values.get("labels", {})}
    for place, digest in digests.items():
        at = wanted
        for name in place[:-1]:
            at[name] = at[name] or {}
            at = at[name]
        at[place[-1]] = {ARCHIVE: digest}
    if "yaml" not in content_type:
        return json.dumps(wanted).encode(), content_type
    from ablate.experiments.design.spec_yaml import (
        edited,
        labelled,
        spec_yaml,  # lazy: a yaml.py beside a user's script hides the library
    )

    archives: dict[_Place, str] = {place: f'{{{ARCHIVE}: "{digest}"}}' for place, digest in digests.items()}
    if edits.data is not None:
        archives["workload", "data"] = json.dumps(edits.data, ensure_ascii=False)
    text = labelled(edited(content.decode(), archives), wanted.get("labels"), labels)
    return (text.encode() if _says(text, content_type, wanted) else spec_yaml(wanted)), content_type


def _says(text: str, content_type: str, wanted: Mapping[str, Any]) -> bool:
    try:
        return load_values(text.encode(), content_type) == wanted
    except SpecError:
        return False

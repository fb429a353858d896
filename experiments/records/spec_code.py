"""Folders of code in a spec: pack them, and name their archives in the text instead."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.design.load import load_values, spec_yaml
from experiments.design.problems import pointer
from experiments.design.workload import ARCHIVE, COMMAND, COMMIT
from experiments.errors import CodeArchiveError, SpecError, SpecProblem
from experiments.records.code_archive import PackedCode, pack_code, pack_commit

_YAML = "application/yaml"
_Place = tuple[str, ...]
_Source = tuple[str, str | None]
"""A folder, and the commit of its repository; None for the files as they are."""


@dataclass(frozen=True, kw_only=True)
class PackedSpec:
    """A spec whose folders of code are archives."""

    content: bytes
    content_type: str
    archives: tuple[PackedCode, ...]
    """Without repetitions."""
    packed: tuple[str, ...]
    """A line for people about each folder or commit that was packed."""


def pack_spec(content: bytes, content_type: str, folder: Path) -> PackedSpec:
    """Pack the folders of code that a spec names relative to `folder`. Raises SpecError with a pointer to each.

    A spec without such folders, or one that cannot be read, comes back unchanged: its reader says what is wrong.
    """
    try:
        values = load_values(content, content_type)
    except SpecError:
        return PackedSpec(content=content, content_type=content_type, archives=(), packed=())
    places = dict(_folders(values))
    if not places:
        return PackedSpec(content=content, content_type=content_type, archives=(), packed=())
    by_source = _packed(places, folder)
    digests = {place: by_source[source].digest for place, source in places.items()}
    archives = {packed.digest: packed for packed in by_source.values()}
    text, kind = _with_digests(content, content_type, values, digests)
    lines = tuple(_line(source, packed) for source, packed in by_source.items())
    return PackedSpec(content=text, content_type=kind, archives=tuple(archives.values()), packed=lines)


def _line(source: _Source, packed: PackedCode) -> str:
    name, commit = source
    where = f"commit {commit} of {name}" if commit else name
    files = f"{packed.files:,} file{'s' * (packed.files != 1)}"
    return f"code {where}: {files}, {packed.size:,} bytes packed, {packed.digest[:19]}"


def _folders(values: Mapping[str, Any]) -> Iterator[tuple[_Place, _Source]]:
    """Yield the place and source of each code to pack; an absolute folder is on the node.

    A commit of a variant is one of the repository around the workload's folder.
    """
    workload, variants = values.get("workload"), values.get("variants")
    if not isinstance(workload, Mapping) or COMMAND not in workload:
        return
    codes: list[tuple[_Place, Any]] = [(("workload", "code"), workload.get("code"))]
    if isinstance(variants, Mapping):
        codes += [(("variants", n, "code"), own.get("code")) for n, own in variants.items() if isinstance(own, Mapping)]
    base = codes[0][1] if _is_relative(codes[0][1]) else None
    for place, code in codes:
        if _is_relative(code):
            yield place, (code, None)
        elif base is not None and isinstance(code, Mapping) and set(code) == {"commit"} and _is_commit(code["commit"]):
            yield place, (base, code["commit"])


def _is_commit(value: object) -> bool:
    return isinstance(value, str) and COMMIT.fullmatch(value) is not None


def _is_relative(code: object) -> bool:
    return isinstance(code, str) and code != "" and not code.startswith("/")


def _packed(places: Mapping[_Place, _Source], folder: Path) -> dict[_Source, PackedCode]:
    packed: dict[_Source, PackedCode] = {}
    problems = []
    for place, source in places.items():
        name, commit = source
        try:
            if source not in packed:
                packed[source] = pack_commit(folder / name, commit) if commit else pack_code(folder / name)
        except (CodeArchiveError, OSError, ValueError) as error:
            hint = "the folder is relative to the spec; an absolute one is on the node"
            problems.append(SpecProblem(pointer=pointer(*place), detail=str(error), hint=hint))
    if problems:
        raise SpecError(problems)
    return packed


def _with_digests(
    content: bytes, content_type: str, values: dict[str, Any], digests: Mapping[_Place, str]
) -> tuple[bytes, str]:
    """Return the spec's text with archives: YAML keeps its comments, other formats become YAML."""
    wanted = deepcopy(values)
    for place, digest in digests.items():
        at = wanted
        for name in place[:-1]:
            at = at[name]
        at[place[-1]] = {ARCHIVE: digest}
    if "yaml" in content_type:
        text = _edited(content.decode(), digests)
        if _says(text, content_type, wanted):
            return text.encode(), content_type
    return spec_yaml(wanted), _YAML


def _says(text: str, content_type: str, wanted: Mapping[str, Any]) -> bool:
    try:
        return load_values(text.encode(), content_type) == wanted
    except SpecError:
        return False


def _edited(text: str, digests: Mapping[_Place, str]) -> str:
    """Replace the scalars at the places in a YAML text; a text that this parser does not read comes back unchanged."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return text
    edits = [(_node_at(root, place), digest) for place, digest in digests.items()]
    for node, digest in sorted(edits, key=lambda edit: -edit[0].start_mark.index):
        begin, end = node.start_mark.index, _end_of(node)
        new = f'{{{ARCHIVE}: "{digest}"}}' + ("\n" if text[begin:end].endswith("\n") else "")
        text = text[:begin] + new + text[end:]
    return text


def _end_of(node: Any) -> int:
    """Return where a node ends; a mapping without braces ends with its last value, before comments."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        node = node.value[-1][1]
    return int(node.end_mark.index)


def _node_at(node: Any, place: Sequence[str]) -> Any:
    for name in place:
        node = next(value for key, value in node.value if key.value == name)
    return node

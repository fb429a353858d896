"""Folders of code in a spec: pack them, and name their archives in the text instead."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.design.load import load_values
from experiments.design.problems import pointer
from experiments.design.workload import ARCHIVE, COMMAND
from experiments.errors import CodeArchiveError, SpecError, SpecProblem
from experiments.records.code_archive import PackedCode, pack_code

_YAML = "application/yaml"
_Place = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PackedSpec:
    """A spec whose folders of code are archives."""

    content: bytes
    content_type: str
    archives: tuple[PackedCode, ...]
    """Without repetitions."""


def pack_spec(content: bytes, content_type: str, folder: Path) -> PackedSpec:
    """Pack the folders of code that a spec names relative to `folder`. Raises SpecError with a pointer to each.

    A spec without such folders, or one that cannot be read, comes back unchanged: its reader says what is wrong.
    """
    try:
        values = load_values(content, content_type)
    except SpecError:
        return PackedSpec(content=content, content_type=content_type, archives=())
    places = dict(_folders(values))
    if not places:
        return PackedSpec(content=content, content_type=content_type, archives=())
    by_name = _packed(places, folder)
    digests = {place: by_name[name].digest for place, name in places.items()}
    archives = {packed.digest: packed for packed in by_name.values()}
    text, kind = _with_digests(content, content_type, values, digests)
    return PackedSpec(content=text, content_type=kind, archives=tuple(archives.values()))


def _folders(values: Mapping[str, Any]) -> Iterator[tuple[_Place, str]]:
    """Yield the place and name of each folder to pack; an absolute one is on the node."""
    workload, variants = values.get("workload"), values.get("variants")
    if not isinstance(workload, Mapping) or COMMAND not in workload:
        return
    codes: list[tuple[_Place, Any]] = [(("workload", "code"), workload.get("code"))]
    if isinstance(variants, Mapping):
        codes += [(("variants", n, "code"), own.get("code")) for n, own in variants.items() if isinstance(own, Mapping)]
    for place, code in codes:
        if isinstance(code, str) and code and not code.startswith("/"):
            yield place, code


def _packed(places: Mapping[_Place, str], folder: Path) -> dict[str, PackedCode]:
    packed: dict[str, PackedCode] = {}
    problems = []
    for place, name in places.items():
        try:
            packed[name] = packed.get(name) or pack_code(folder / name)
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
    return yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True, width=120).encode(), _YAML


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
        old = text[node.start_mark.index : node.end_mark.index]
        new = f'{{{ARCHIVE}: "{digest}"}}' + ("\n" if old.endswith("\n") else "")
        text = text[: node.start_mark.index] + new + text[node.end_mark.index :]
    return text


def _node_at(node: Any, place: Sequence[str]) -> Any:
    for name in place:
        node = next(value for key, value in node.value if key.value == name)
    return node

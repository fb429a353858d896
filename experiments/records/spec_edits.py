"""Change places of a YAML text, whose other lines and comments stay as they are."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml


def edited(text: str, scalars: Mapping[tuple[str, ...], str]) -> str:
    """Replace the values at the places in a YAML text; a text that this parser does not read comes back unchanged."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return text
    try:
        edits = [(_node_at(root, place), scalar) for place, scalar in scalars.items()]
    except LookupError:  # an arm had no code of its own
        return text
    for node, scalar in sorted(edits, key=lambda edit: -edit[0].start_mark.index):
        begin, end = node.start_mark.index, _end_of(node)
        new = scalar + ("\n" if text[begin:end].endswith("\n") else "")
        if _is_block_list(node):  # it may stand in the column of its key, where no other value may
            begin, new = len(text[:begin].rstrip()), f" {new}"
        text = text[:begin] + new + text[end:]
    return text


def labelled(text: str, wanted: object, added: Mapping[str, str]) -> str:
    """Return a YAML text with all its labels in one line if some are `added`."""
    if not added:
        return text
    line = json.dumps(wanted, ensure_ascii=False)
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)  # `edited` or the reader of the spec has read it
    node = next((value for key, value in root.value if key.value == "labels"), None)
    if node is None:
        return f"{text}{'' if text.endswith(chr(10)) else chr(10)}labels: {line}\n"
    begin, end = node.start_mark.index, _end_of(node)
    return text[:begin] + line + ("\n" if text[begin:end].endswith("\n") else "") + text[end:]


def _end_of(node: Any) -> int:
    """Return where a node ends; without braces or brackets it ends with its last value, before comments."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        node = node.value[-1][1]
    elif _is_block_list(node):
        return _end_of(node.value[-1])
    return int(node.end_mark.index)


def _is_block_list(node: Any) -> bool:
    return isinstance(node, yaml.SequenceNode) and not node.flow_style


def _node_at(node: Any, place: Sequence[str]) -> Any:
    for name in place:
        entries = node.value if isinstance(node, yaml.MappingNode) else ()
        node = {key.value: value for key, value in entries}[name]
    return node

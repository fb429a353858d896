"""Generate docs/spec.md from the JSON Schema of a spec and the tables of metrics and recipes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ablate.experiments.design.checks import is_resident
from ablate.experiments.design.metrics import METRICS, PRIMARY_METRICS, REQUIRED_METRICS
from ablate.experiments.design.recipes import OVERRIDES, RECIPES, SHARED, Override, Recipe
from ablate.experiments.design.spec import SIZE_PATTERN, ablation_json_schema
from ablate.experiments.design.spec_values import DURATION_PATTERN, NAME_PATTERN, PERCENT_PATTERN
from ablate.experiments.node_classes import GPU_PATTERN
from ablate.kernels.backends import NODE_CLASSES
from ablate.model.measurements import Metric

Schema = Mapping[str, Any]

_HEAD = """\
# The spec

This page lists the keys of a spec. `make docs` generates it from the code.

A spec is one file of YAML or JSON with the same keys in both. An unknown key is an error, and the
message suggests the nearest key. Percentages are text with a percent sign (`0.5%`), durations text with a unit (`90s`,
`20m`, `1h`).

- `ablate init FILE` writes a first spec ([first-spec.md](first-spec.md)).
- `ablate plan FILE` lists all problems of a file.
- `ablate catalog schema` prints the JSON Schema.
"""
_SHOWN_AS = {
    PERCENT_PATTERN: "percentage above `0%`, below `100%`",
    f"{PERCENT_PATTERN}|^0%$": "percentage from `0%` to below `100%`",
    DURATION_PATTERN: "duration up to `24h`",
    SIZE_PATTERN: "size such as `40GiB`",
    GPU_PATTERN: "the name of a GPU, such as `a100-80gb`",
    NAME_PATTERN: "name: up to 63 of `a-z 0-9 -`",
}
_MANY = 8
"""Longest list of values that a cell shows; longer ones have their own section."""


def spec_page() -> str:
    """Return the page."""
    schema = ablation_json_schema()
    parts = [_HEAD, *(_section(path, part, schema["$defs"]) for path, part in _parts(schema, schema["$defs"], ()))]
    return "".join([*parts, _metrics(), _overrides()])


def missing_remarks() -> list[str]:
    """Return the keys of a spec without a remark on the page."""
    schema = ablation_json_schema()
    return [
        ".".join((*path, name))
        for path, part in _parts(schema, schema["$defs"], ())
        for name, entry in part["properties"].items()
        if not _remark(entry, schema["$defs"])
    ]


def _parts(
    part: Schema, models: Mapping[str, Schema], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Yield all mappings that have keys, outside in, with their paths."""
    yield path, part
    for name, entry in part["properties"].items():
        if inner := _target(entry):
            yield from _parts(models[inner[0]], models, (*path, name + inner[1]))


def _target(entry: Schema) -> tuple[str, str] | None:
    """Return the model of a key and the path to it: ".NAME" in a mapping of the user, "[]" in a list."""
    places = [(entry, ""), (entry.get("items", {}), "[]")]
    places += [(option, "") for option in entry.get("anyOf", ())]
    places += [(inner, ".NAME") for inner in entry.get("patternProperties", {}).values()]
    return next(((at["$ref"].rpartition("/")[2], between) for at, between in places if "$ref" in at), None)


def _section(path: tuple[str, ...], part: Schema, models: Mapping[str, Schema]) -> str:
    rows = (
        (f"`{name}`", _type(entry), _default(name, entry, part), _remark(entry, models))
        for name, entry in part["properties"].items()
    )
    title = f"`{'.'.join(path)}`" if path else "The whole"
    return _table(f"## {title}\n\n{part['description']}", "key | value | default | remark", rows)


def _remark(entry: Schema, models: Mapping[str, Schema]) -> str:
    target = _target(entry)
    return str(entry.get("description") or (models[target[0]]["description"] if target else ""))


def _default(name: str, entry: Schema, part: Schema) -> str:
    if name in part.get("required", ()):
        return "**needed**"
    value = entry.get("default")
    return "" if value in (None, "", [], ()) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(entry: Schema) -> str:
    if "anyOf" in entry:
        return " or ".join(_type(option) for option in entry["anyOf"] if option.get("type") != "null")
    if "not" in entry or "const" in entry:
        return "a declared one" if "not" in entry else f"`{entry['const']}`"
    if "enum" in entry:
        values = entry["enum"]
        many = len(values) > _MANY and isinstance(values[0], str)
        return "a metric, below" if many else ", ".join(f"`{value}`" for value in values)
    if "$ref" in entry or entry.get("type") == "object":
        return "mapping"
    if entry.get("type") == "array":
        return f"list of {_type(entry['items'])}"
    return _SHOWN_AS.get(entry.get("pattern", "")) or _plain(entry)


def _plain(entry: Schema) -> str:
    word = {"string": "text", "integer": "integer", "number": "number", "boolean": "`true`, `false`"}[entry["type"]]
    if "exclusiveMinimum" in entry:
        return f"{word} above {_number(entry['exclusiveMinimum'])}, up to {_number(entry['maximum'])}"
    if "minimum" in entry:
        return f"{word} from {_number(entry['minimum'])} to {_number(entry['maximum'])}"
    return f"{word} up to {entry['maxLength']} characters" if "maxLength" in entry else word


def _number(value: float) -> str:
    if value == 2**53 - 1:
        return "2^53 - 1"
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _table(title: str, columns: str, rows: Iterable[Iterable[str]]) -> str:
    line = "|---" * (columns.count("|") + 1) + "|"
    return f"\n{title}\n\n| {columns} |\n{line}\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _metrics() -> str:
    title = (
        "## Metrics\n\nA metric that decides *by statistics* needs six blocks and calibrated devices "
        "([calibration.md](calibration.md)). A metric that decides *by its value* has no noise, which repeats prove. "
        "A metric that decides *over seeds* is read from validation curves "
        "([quality.md](quality.md#at-equal-tokens-at-equal-time-and-to-a-target))."
    )
    rows = (
        (f"`{name}`", f"{row.label}, {row.unit}", row.better or "", _uses(name, row)) for name, row in METRICS.items()
    )
    return _table(title, "metric | number | better | may", rows)


def _uses(name: str, row: Metric) -> str:
    how = "by its value" if row.decides == "exact" else "by statistics"
    how = f"over seeds, on {'calibrated' if row.clocked else 'any'} devices" if row.decides == "curve" else how
    uses = [f"decide {how}"] if name in PRIMARY_METRICS else []
    uses += ["be required"] if name in REQUIRED_METRICS else []
    where = ", on node classes that only compile" if row.source == "compilation" else ""
    resident = [f"`{entry}`" for entry in NODE_CLASSES.values() if is_resident(name, entry)]
    if resident:
        uses[0] += f" (not on {' and '.join(resident)}, where it is the resident set of the process)"
        uses[-1] += " (there without `max_delta`)"
    return ", ".join(uses) + where


def _overrides() -> str:
    kinds = {int: "integer", float: "number", str: "text"}
    rows = (
        (
            f"`{name}`",
            kinds[key.kind] + _limits(key),
            key.description,
            *(_own(recipe, key) for recipe in RECIPES.values()),
        )
        for name, key in OVERRIDES.items()
    )
    shared = " and ".join(f"`{name}`" for name in SHARED)
    title = (
        "## Overrides\n\nThe last columns show the value of each [recipe](recipes.md) without the override. A variant "
        f"may have its own value of each, except {shared}."
    )
    return _table(title, " | ".join(["key", "value", "meaning", *(f"`{name}`" for name in RECIPES)]), rows)


def _own(recipe: Recipe, key: Override) -> str:
    """Return a recipe's value without an override."""
    value: Any = asdict(recipe.config)
    for part in key.path.split("."):
        value = value[part]
    return f"`{value}`" if isinstance(value, str) else _number(value)


def _limits(key: Override) -> str:
    if key.minimum is None or key.maximum is None:
        return ""
    return f" from {_number(key.minimum)} to {_number(key.maximum)}"

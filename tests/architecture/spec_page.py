"""docs/spec.md, generated from the published JSON Schema of a spec and from the tables of metrics and recipes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from experiments.design.metrics import METRICS, PRIMARY_METRICS, REQUIRED_METRICS
from experiments.design.plan import is_resident
from experiments.design.recipes import OVERRIDES, RECIPES, Override, Recipe
from experiments.design.spec import ablation_json_schema
from experiments.design.spec_values import DURATION_PATTERN, NAME_PATTERN, PERCENT_PATTERN
from kernels.backends import NODE_CLASSES
from model.measurements import Metric

Schema = Mapping[str, Any]

_HEAD = """\
# The spec

Generated from the model by `make docs`. A spec is one page of YAML, JSON or TOML, the same keys in all three; a key
that is not listed here is refused with the nearest that is. A percentage is text with its sign (`0.5%`), a duration
text with its unit (`90s`, `20m`, `1h`). `ablate init FILE` writes one to start from ([first-spec.md](first-spec.md)),
`ablate schema` prints the JSON Schema, and `ablate plan FILE` says everything that is wrong with a file at once.
"""
_SHOWN_AS = {
    PERCENT_PATTERN: "percentage above `0%`, below `100%`",
    f"{PERCENT_PATTERN}|^0%$": "percentage from `0%` to below `100%`",
    DURATION_PATTERN: "duration up to `24h`",
    NAME_PATTERN: "name: up to 63 of `a-z 0-9 -`",
}
_MANY = 8
"""Longer lists of words have a section of their own."""


def spec_page() -> str:
    """Return the page."""
    schema = ablation_json_schema()
    parts = [_HEAD, *(_section(path, part, schema["$defs"]) for path, part in _parts(schema, schema["$defs"], ()))]
    return "".join([*parts, _metrics(), _overrides()])


def missing_remarks() -> list[str]:
    """Return the keys of a spec of which the page says nothing."""
    schema = ablation_json_schema()
    return [
        ".".join((*path, name))
        for path, part in _parts(schema, schema["$defs"], ())
        for name, given in part["properties"].items()
        if not _remark(given, schema["$defs"])
    ]


def _parts(
    part: Schema, known: Mapping[str, Schema], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Yield every mapping with keys of its own, outside in, with the path that leads to it."""
    yield path, part
    for name, given in part["properties"].items():
        if inner := _target(given):
            yield from _parts(known[inner[0]], known, (*path, name + inner[1]))


def _target(given: Schema) -> tuple[str, str] | None:
    """Return the model behind a key and what stands between: a name of the user's, or a place in a list."""
    places = [(given, ""), (given.get("items", {}), "[]")]
    places += [(option, "") for option in given.get("anyOf", ())]
    places += [(inner, ".NAME") for inner in given.get("patternProperties", {}).values()]
    return next(((at["$ref"].rpartition("/")[2], between) for at, between in places if "$ref" in at), None)


def _section(path: tuple[str, ...], part: Schema, known: Mapping[str, Schema]) -> str:
    rows = (
        (f"`{name}`", _type(given), _default(name, given, part), _remark(given, known))
        for name, given in part["properties"].items()
    )
    title = f"`{'.'.join(path)}`" if path else "The whole"
    return _table(f"## {title}\n\n{part['description']}", "key | value | default | remark", rows)


def _remark(given: Schema, known: Mapping[str, Schema]) -> str:
    target = _target(given)
    return str(given.get("description") or (known[target[0]]["description"] if target else ""))


def _default(name: str, given: Schema, part: Schema) -> str:
    if name in part.get("required", ()):
        return "**needed**"
    value = given.get("default")
    return "" if value in (None, [], ()) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(given: Schema) -> str:
    if "anyOf" in given:
        return " or ".join(_type(option) for option in given["anyOf"] if option.get("type") != "null")
    if "const" in given:
        return f"`{given['const']}`"
    if "enum" in given:
        shown = given["enum"]
        return "a metric, below" if len(shown) > _MANY else ", ".join(f"`{value}`" for value in shown)
    if "$ref" in given or given.get("type") == "object":
        return "mapping"
    if given.get("type") == "array":
        return f"list of {_type(given['items'])}"
    return _SHOWN_AS.get(given.get("pattern", "")) or _plain(given)


def _plain(given: Schema) -> str:
    word = {"string": "text", "integer": "integer", "number": "number", "boolean": "`true`, `false`"}[given["type"]]
    if "exclusiveMinimum" in given:
        return f"{word} above {_number(given['exclusiveMinimum'])}, up to {_number(given['maximum'])}"
    if "minimum" in given:
        return f"{word} from {_number(given['minimum'])} to {_number(given['maximum'])}"
    return f"{word} up to {given['maxLength']} characters" if "maxLength" in given else word


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
        "([calibration.md](calibration.md)); one that decides *by its value* has no noise, which repeats prove."
    )
    rows = (
        (f"`{name}`", f"{row.label}, {row.unit}", row.better or "", _uses(name, row)) for name, row in METRICS.items()
    )
    return _table(title, "metric | what it is | better | may", rows)


def _uses(name: str, row: Metric) -> str:
    how = "by its value" if row.decides == "exact" else "by statistics"
    found = [f"decide {how}"] if name in PRIMARY_METRICS else []
    found += ["be required"] if name in REQUIRED_METRICS else []
    where = ", on node classes that only compile" if row.source == "compilation" else ""
    resident = [f"`{entry}`" for entry in NODE_CLASSES.values() if is_resident(name, entry)]
    if resident:
        found[0] += f" (not on {' and '.join(resident)}: there it is the resident set of the process)"
        found[-1] += " (there without `max_delta`)"
    return ", ".join(found) + where


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
    title = "## Overrides\n\nThe last columns say what a [recipe](recipes.md) has without the override."
    return _table(title, " | ".join(["key", "value", "what it is", *(f"`{name}`" for name in RECIPES)]), rows)


def _own(recipe: Recipe, key: Override) -> str:
    """Return what a recipe has without an override."""
    value: Any = asdict(recipe.config)
    for part in key.path.split("."):
        value = value[part]
    return f"`{value}`" if isinstance(value, str) else _number(value)


def _limits(key: Override) -> str:
    if key.minimum is None or key.maximum is None:
        return ""
    return f" from {_number(key.minimum)} to {_number(key.maximum)}"

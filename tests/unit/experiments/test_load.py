import json
from typing import Any

import pytest
import yaml

from experiments.errors import SpecError, SpecProblem
from experiments.load import CONTENT_TYPES, MAX_SPEC_BYTES, parse_spec
from experiments.plan import make_plan
from tests.factories import SPEC, make_spec, spec_values

JSON, YAML, TOML = "application/json", "application/yaml", "application/toml"

TOML_SPEC = """
ablation = "factory"
question = "Does caching PsiV or a larger chunk raise throughput?"
[workload]
recipe = "hybrid-tiny"
steps = {warmup = 1, timed = 4, val_rows = 2}
[baseline.gates]
chunk_size = 16
[variants.psiv-on.gates]
psiv_cache = true
[variants.chunk-32.gates]
chunk_size = 32
[design]
seeds = [1, 2]
blocks = {count = 6}
order_seed = 7
[placement]
node_class = "cpu"
[verdict.primary]
metric = "tokens_per_s"
margin = "0.5%"
adopt_if = "1.5%"
"""


def submit(body: bytes, content_type: str = JSON) -> None:
    make_plan(parse_spec(body, content_type))


def problems(values: Any) -> tuple[SpecProblem, ...]:
    with pytest.raises(SpecError) as caught:
        submit(json.dumps(values).encode())
    return caught.value.problems


def text_problems(body: bytes, content_type: str) -> tuple[SpecProblem, ...]:
    with pytest.raises(SpecError) as caught:
        submit(body, content_type)
    return caught.value.problems


def test_parse_spec_gives_one_digest_for_json_yaml_and_toml() -> None:
    specs = [
        parse_spec(json.dumps(SPEC).encode(), "application/json; charset=utf-8"),
        parse_spec(yaml.safe_dump(SPEC).encode(), YAML),
        parse_spec(TOML_SPEC.encode(), TOML),
        make_spec(),
    ]
    assert len({spec.digest for spec in specs}) == 1


def test_parse_spec_reads_back_what_a_spec_dumps() -> None:
    spec = make_spec(limits={"trial": "90s", "device_minutes": 3, "priority": 1})
    again = parse_spec(spec.model_dump_json(exclude_none=True).encode(), JSON)
    assert again.digest == spec.digest
    assert (again.limits.trial, again.verdict.primary.margin) == (90, 0.5)


def test_parse_spec_equal_durations_have_equal_digests() -> None:
    assert make_spec(limits={"trial": "60m"}).digest == make_spec(limits={"trial": "1h"}).digest


LONG = "x" * 501
GATES = "variants__psiv-on__gates"
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("unknown key at the top", {"bloks": 1}, "#/bloks", "unknown key 'bloks'"),
    ("unknown key inside", {"design__seedz": [1]}, "#/design/seedz", "known: seeds, blocks, order_seed"),
    ("unknown key in a requirement", {"verdict__require": [{"metric": "loss_val", "max_delta": 1, "x": 1}]},
     "#/verdict/require/0/x", "known: metric, max_delta"),
    ("unknown key in a variant", {"variants__psiv-on__gate": {}}, "#/variants/psiv-on/gate", "known: gates"),
    ("unknown gate", {GATES: {"psiv_cach": True}}, "#/variants/psiv-on/gates/psiv_cach", "unknown gate"),
    ("illegal gate value", {GATES: {"chunk_size": 24}}, "#/variants/psiv-on/gates/chunk_size", "8, 16, 32"),
    ("one for true", {GATES: {"psiv_cache": 1}}, "#/variants/psiv-on/gates/psiv_cache", "false, true"),
    ("true for a chunk size", {GATES: {"chunk_size": True}}, "#/variants/psiv-on/gates/chunk_size", "is true"),
    ("float for a chunk size", {GATES: {"chunk_size": 32.0}}, "#/variants/psiv-on/gates/chunk_size", "32.0"),
    ("list as a gate value", {GATES: {"loss": ["dense"]}}, "#/variants/psiv-on/gates/loss", "a list"),
    ("gate of another lane", {GATES: {"layout_2d": True}}, "#/variants/psiv-on/gates/layout_2d", "needs lane cuda"),
    ("lane without code", {GATES: {"lane": "cuda"}}, "#/variants/psiv-on/gates/lane", "no implementation"),
    ("required gate missing", {GATES: {"warp_specialize": True}}, "#/variants/psiv-on/gates/warp_specialize",
     "requires tma = true"),
    ("contradiction", {GATES: {"schedule": "sequential", "chunk_size": 32}},
     "#/variants/psiv-on/gates/chunk_size", "no effect with schedule = sequential"),
    ("contradicts the baseline", {"baseline__gates": {"schedule": "sequential"}},
     "#/variants/chunk-32/gates/chunk_size", "no effect"),
    ("gate of the baseline", {"baseline__gates": {"tma": True, "layout_2d": True}}, "#/baseline/gates/tma", "cuda"),
    ("gate without its block", {"workload__overrides": {"pattern": "AF"}}, "#/variants/psiv-on/gates/psiv_cache",
     "needs a block of kind M"),
    ("variant without gates", {GATES: {}}, "#/variants/psiv-on/gates", "at least 1"),
    ("no variants", {"variants": {}}, "#/variants", "at least 1"),
    ("variants as a list", {"variants": [{"gates": {}}]}, "#/variants", "must be a mapping"),
    ("too many variants", {"variants": {f"v{i}": {"gates": {"loss": "chunked"}} for i in range(65)}},
     "#/variants", "at most 64"),
    ("variant named baseline", {"variants__baseline": {"gates": {"loss": "chunked"}}}, "#/variants/baseline",
     "cannot be named"),
    ("variant name with a slash", {"variants__a/b~c": {"gates": {"loss": "chunked"}}}, "#/variants/a~1b~0c",
     "name 'a/b~c'"),
    ("variant equal to the baseline", {GATES: {"psiv_cache": False}}, "#/variants/psiv-on", "same configuration"),
    ("two equal variants", {"variants__other": {"gates": {"chunk_size": 32, "loss": "dense"}}}, "#/variants/other",
     "as variant 'chunk-32'"),
    ("missing question", {"question": ...}, "#/question", "'question' is missing"),
    ("empty question", {"question": ""}, "#/question", "is empty"),
    ("long question", {"question": LONG}, "#/question", "500 characters"),
    ("NUL in the question", {"question": "a\0b"}, "#/question", "U+0000"),
    ("newline in the question", {"question": "a\nb"}, "#/question", "U+000A"),
    ("bidi override in the question", {"question": "a\u202eb"}, "#/question", "U+202E"),
    ("surrogate in the question", {"question": "a\ud800"}, "#/question", "unicode"),
    ("question is a number", {"question": 5}, "#/question", "must be a string, got 5"),
    ("capital name", {"ablation": "Demo"}, "#/ablation", "a-z, 0-9"),
    ("name with a newline", {"ablation": "demo\n"}, "#/ablation", "not allowed"),
    ("long name", {"ablation": "a" * 64}, "#/ablation", "1 to 63"),
    ("unknown recipe", {"workload__recipe": "hybrid-tinny"}, "#/workload/recipe", "known: hybrid-tiny"),
    ("recipe without a lane yet", {"workload__recipe": "hybrid-ref-h200", "placement__node_class": "h200"},
     "#/workload/recipe", "lane 'cuda' has no implementation on node class 'h200'"),
    ("recipe on another node", {"workload__recipe": "hybrid-ref-h200"}, "#/placement/node_class", "it runs on: h200"),
    ("unknown override", {"workload__overrides": {"seqlen": 128}}, "#/workload/overrides/seqlen", "unknown override"),
    ("gate as an override", {"workload__overrides": {"chunk_size": 8}}, "#/workload/overrides/chunk_size", "unknown"),
    ("float override", {"workload__overrides": {"seq_len": 128.0}}, "#/workload/overrides/seq_len", "an integer"),
    ("override out of range", {"workload__overrides": {"micro_batch": 0}}, "#/workload/overrides/micro_batch",
     "from 1"),
    ("override that does not fit", {"workload__overrides": {"headdim": 48}}, "#/workload/overrides/headdim",
     "must be a multiple"),
    ("override that breaks another", {"workload__overrides": {"d_model": 100}}, "#/workload/overrides",
     "do not fit together"),
    ("pattern with a strange letter", {"workload__overrides": {"pattern": "MX"}}, "#/workload/overrides/pattern", "MX"),
    ("relative corpus", {"workload__overrides": {"corpus": "../etc"}}, "#/workload/overrides/corpus", "absolute"),
    ("step count as text", {"workload__steps": {"timed": "4"}}, "#/workload/steps/timed", "an integer, got '4'"),
    ("no timed step", {"workload__steps": {"timed": 0}}, "#/workload/steps/timed", "at least 1"),
    ("too few blocks", {"design__blocks": {"count": 5}}, "#/design/blocks/count", "at least 6"),
    ("too many blocks", {"design__blocks": {"count": 2001}}, "#/design/blocks/count", "at most 2000"),
    ("adaptive looks", {"design__blocks": {"looks": [6, 10]}}, "#/design/blocks/looks", "not available yet"),
    ("count and looks", {"design__blocks": {"count": 6, "looks": [6]}}, "#/design/blocks", "exactly one"),
    ("neither count nor looks", {"design__blocks": {}}, "#/design/blocks", "exactly one"),
    ("blocks as a number", {"design__blocks": 6}, "#/design/blocks", "must be a mapping"),
    ("duplicate seed", {"design__seeds": [1, 2, 1]}, "#/design/seeds", "seed 1 is listed more than once"),
    ("no seed", {"design__seeds": []}, "#/design/seeds", "at least 1"),
    ("negative seed", {"design__seeds": [-1]}, "#/design/seeds/0", "at least 0"),
    ("seed is true", {"design__seeds": [True]}, "#/design/seeds/0", "an integer, got true"),
    ("unknown node class", {"placement__node_class": "gpu"}, "#/placement/node_class", "known: cpu"),
    ("node class without a lane", {"placement__node_class": "tpu-v6e"}, "#/placement/node_class", "runs on: cpu"),
    ("two devices", {"placement__devices": 2}, "#/placement/devices", "not available yet"),
    ("duration without a unit", {"limits": {"trial": 20}}, "#/limits/trial", "not a duration"),
    ("duration too long", {"limits": {"trial": "25h"}}, "#/limits/trial", "up to 24h"),
    ("priority out of range", {"limits": {"priority": 101}}, "#/limits/priority", "at most 100"),
    ("budget of nothing", {"limits": {"device_minutes": 0}}, "#/limits/device_minutes", "greater than 0"),
    ("margin without a sign", {"verdict__primary__margin": 0.5}, "#/verdict/primary/margin", "not a percentage"),
    ("margin of nothing", {"verdict__primary__margin": "0%"}, "#/verdict/primary/margin", "above 0%"),
    ("adoption below the margin", {"verdict__primary__adopt_if": "0.1%"}, "#/verdict/primary/adopt_if", "below the"),
    ("loss as primary", {"verdict__primary__metric": "loss_val"}, "#/verdict/primary/metric", "cannot be primary"),
    ("no primary", {"verdict": {}}, "#/verdict/primary", "is missing"),
    ("unknown required metric", {"verdict__require": [{"metric": "loss", "rule": "identical"}]},
     "#/verdict/require/0/metric", "cannot be required"),
    ("two conditions in one", {"verdict__require": [{"metric": "loss_val", "rule": "identical", "max_delta": 1}]},
     "#/verdict/require/0", "exactly one"),
    ("identical memory", {"verdict__require": [{"metric": "compile_s", "rule": "identical"}]},
     "#/verdict/require/0", "for losses"),
    ("envelope without repeats", {"verdict__require": [{"metric": "loss_final", "rule": "envelope"}],
     "design__seeds": [1, 2, 3, 4]}, "#/verdict/require/0", "6 blocks over 4 seeds"),
    ("validation loss that is never computed", {"verdict__require": [{"metric": "loss_val", "max_delta": 1}],
     "workload__steps": {"val_rows": 0}}, "#/verdict/require/0", "val_rows is 0"),
    ("label key", {"labels": {"A b": "x"}}, "#/labels/A%20b", "label 'A b'"),
    ("label value", {"labels": {"a": "x\ty"}}, "#/labels/a", "U+0009"),
    ("label value is a number", {"labels": {"a": 1}}, "#/labels/a", "must be a string"),
    ("too many labels", {"labels": {f"k{i}": "" for i in range(33)}}, "#/labels", "at most 32"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "where", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_submit_names_the_line_and_the_reason(changes: dict[str, Any], where: str, words: str) -> None:
    values = spec_values(**changes)
    values = {key: value for key, value in values.items() if value is not ...}
    found = problems(values)
    assert where in [problem.pointer for problem in found], found
    assert any(words in problem.detail for problem in found if problem.pointer == where), found


def test_submit_reports_every_problem_of_the_text_at_once() -> None:
    changes = {"bloks": 1, "question": "", "design__seeds": ["1"], GATES: {"psiv": True, "loss": "x"}}
    assert {problem.pointer for problem in problems(spec_values(**changes))} == {
        "#/bloks", "#/question", "#/design/seeds/0", "#/variants/psiv-on/gates/psiv", "#/variants/psiv-on/gates/loss",
    }  # fmt: skip


def test_submit_reports_every_illegal_override_at_once() -> None:
    found = problems(spec_values(workload__overrides={"headdim": 48, "d_state": 10, "seq_len": 64}))
    assert {problem.pointer for problem in found} == {"#/workload/overrides/headdim", "#/workload/overrides/d_state"}


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"bloks": 1, "desing": {}}, "did you mean 'design'?"),
        ({GATES: {"psiv_cach": True}}, "did you mean 'psiv_cache'?"),
        ({"workload__overrides": {"chunk_size": 8}}, "'chunk_size' is a gate: put it under gates"),
        ({"workload__overrides": {"d_model": 100}}, "override 'headdim' as well"),
        ({GATES: {"layout_2d": True}}, "values of 'layout_2d' that run on cpu: false"),
    ],
)
def test_submit_hints_at_what_was_meant(changes: dict[str, Any], hint: str) -> None:
    assert hint in [problem.hint for problem in problems(spec_values(**changes))]


BAD_TEXTS: list[tuple[str, bytes, str, str, str]] = [
    ("empty JSON", b"", JSON, "#", "not JSON"),
    ("empty YAML", b"# nothing\n", YAML, "#", "empty"),
    ("a list", b"[1]", JSON, "#", "a mapping of keys, got a list"),
    ("broken JSON", b'{"a": }', JSON, "#", "line 1, column 7"),
    ("broken YAML", b"a: [1\nb: 2", YAML, "#", "line"),
    ("broken TOML", b"a = ", TOML, "#", "not TOML"),
    ("duplicate JSON key", b'{"a": 1, "a": 2}', JSON, "#", "key 'a' is given more than once"),
    ("duplicate YAML key", b"variants:\n  x: 1\n  x: 2\n", YAML, "#/variants/x", "more than once"),
    ("duplicate TOML key", b"a = 1\na = 2\n", TOML, "#", "not TOML"),
    ("JSON NaN", b'{"a": NaN}', JSON, "#", "NaN"),
    ("JSON Infinity", b'{"a": -Infinity}', JSON, "#", "Infinity"),
    ("deep JSON", b'{"a":' * 20 + b"1" + b"}" * 20, JSON, "#", "16 levels"),
    ("very deep JSON", b"[" * 100_000, JSON, "#", "nested too deeply"),
    ("deep YAML", b"a: " + b"[" * 40 + b"]" * 40, YAML, "#/a", "nested too deeply"),
    ("deep TOML", b"a = " + b"[" * 5000 + b"]" * 5000, TOML, "#", "nested too deeply"),
    ("deep TOML key", b".".join([b"a"] * 40) + b" = 1", TOML, "#", "nested too deeply"),
    ("YAML alias bomb", b"a: &a [x, x]\nb: [*a, *a]\n", YAML, "#/a", "anchor &a"),
    ("YAML alias", b"a: *b\n", YAML, "#/a", "alias *b"),
    ("YAML tag", b"a: !!python/name:os.system x\n", YAML, "#/a", "tag"),
    ("YAML merge key", b"a:\n  <<: {b: 1}\n", YAML, "#/a", "merge key"),
    ("YAML number as a key", b"variants:\n  1: x\n", YAML, "#/variants/1", "not text"),
    ("YAML list as a key", b"? [a]\n: 1\n", YAML, "#", "key must be text"),
    ("two YAML documents", b"a: 1\n---\na: 2\n", YAML, "#", "more than one"),
    ("NUL in YAML", b"a: x\0y\n", YAML, "#", "U+0000"),
    ("huge JSON integer", b'{"a": ' + b"9" * 5000 + b"}", JSON, "#", "too many digits"),
    ("huge YAML integer", b"a: " + b"9" * 5000, YAML, "#/a", "5000 characters"),
    ("byte order mark", b"\xef\xbb\xbf{}", JSON, "#", "byte order mark"),
    ("UTF-16", '{"a": 1}'.encode("utf-16"), JSON, "#", "UTF-16"),
    ("not UTF-8", b'{"a": "\xff"}', JSON, "#", "byte 7"),
    ("too big", b" " * (MAX_SPEC_BYTES + 1), JSON, "#", "262145 bytes"),
    ("unknown content type", b"{}", "text/html", "#", "'text/html' is not supported"),
]


@pytest.mark.parametrize(
    ("body", "kind", "where", "words"), [row[1:] for row in BAD_TEXTS], ids=[r[0] for r in BAD_TEXTS]
)
def test_parse_spec_refuses_text_that_is_broken_or_dangerous(body: bytes, kind: str, where: str, words: str) -> None:
    (found,) = text_problems(body, kind)
    assert found.pointer == where
    assert words in found.detail


@pytest.mark.parametrize("given", ["on", "yes", "2026-11-20", "1:30", "0x10", "1_000", ".nan"])
def test_parse_spec_takes_only_plain_yaml_numbers_and_booleans(given: str) -> None:
    body = yaml.safe_dump(SPEC).replace("order_seed: 7", f"order_seed: {given}").encode()
    (found,) = text_problems(body, YAML)
    assert found.detail == f"'order_seed' must be an integer, got '{given}'"


def test_parse_spec_reads_yaml_exponents_as_numbers() -> None:
    body = yaml.safe_dump(SPEC).replace(
        "recipe: hybrid-tiny", "recipe: hybrid-tiny\n  overrides: {learning_rate: 1e-3}"
    )
    assert parse_spec(body.encode(), YAML).workload.overrides == {"learning_rate": 0.001}


def test_parse_spec_refuses_an_infinite_override() -> None:
    body = json.dumps(spec_values(workload__overrides={"learning_rate": 0.5})).replace("0.5}", "1e999}").encode()
    (found,) = text_problems(body, JSON)
    assert found.pointer == "#/workload/overrides/learning_rate"


def test_content_types_cover_the_three_formats() -> None:
    assert {JSON, YAML, TOML} <= set(CONTENT_TYPES)

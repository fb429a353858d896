import contextlib
import json
import random
import time
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from ablate.experiments.design.load import MAX_SPEC_BYTES, load_values, parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.problems import listed
from ablate.experiments.design.spec_values import Seconds
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.kernels.backends import NODE_CLASSES
from tests.bad_specs import BAD, BAD_TEXTS, GATES, JSON, YAML, bad_values
from tests.factories import SPEC, make_spec, spec_values

METRIC, MARGIN, REQUIRE = "verdict__primary__metric", "verdict__primary__margin", "verdict__require"


def submit(body: bytes, content_type: str = JSON) -> None:
    make_plan(parse_spec(body, content_type))


def problems(values: Any) -> tuple[SpecProblem, ...]:
    return text_problems(json.dumps(values).encode(), JSON)


def text_problems(body: bytes, content_type: str) -> tuple[SpecProblem, ...]:
    with pytest.raises(SpecError) as caught:
        submit(body, content_type)
    return caught.value.problems


def test_parse_spec_gives_one_digest_for_json_and_yaml() -> None:
    specs = [
        parse_spec(json.dumps(SPEC).encode(), "application/json; charset=utf-8"),
        parse_spec(yaml.safe_dump(SPEC).encode(), YAML),
        make_spec(),
    ]
    assert len({spec.digest for spec in specs}) == 1


def test_parse_spec_reads_back_what_a_spec_dumps() -> None:
    spec = make_spec(limits={"trial": "90s", "device_minutes": 3, "priority": 1})
    again = parse_spec(spec.model_dump_json(exclude_none=True).encode(), JSON)
    assert again.digest == spec.digest
    assert (again.limits.trial, again.verdict.primary.margin_pct) == (90, 0.5)


def test_every_duration_that_a_spec_may_have_is_read_back() -> None:
    durations = TypeAdapter(Seconds)
    texts = [f"{n}{unit}" for unit, most in (("s", 9999), ("m", 999), ("h", 24)) for n in range(1, most + 1)]
    seconds = [durations.validate_python(text) for text in texts]
    assert max(seconds) == 24 * 3600
    assert [durations.validate_python(durations.dump_python(number)) for number in seconds] == seconds


def test_parse_spec_equal_durations_have_equal_digests() -> None:
    assert make_spec(limits={"trial": "60m"}).digest == make_spec(limits={"trial": "1h"}).digest


@pytest.mark.parametrize(("changes", "where", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_submit_names_the_line_and_the_reason(changes: dict[str, Any], where: str, words: str) -> None:
    refused = problems(bad_values(changes))
    assert where in [problem.pointer for problem in refused], refused
    assert any(words in problem.detail for problem in refused if problem.pointer == where), refused


def test_submit_reports_every_problem_of_the_text_at_once() -> None:
    changes = {"bloks": 1, "question": "", "design__seeds": ["1"], GATES: {"psiv": True, "loss": "x"}}
    assert {problem.pointer for problem in problems(spec_values(**changes))} == {
        "#/bloks", "#/question", "#/design/seeds/0", "#/variants/psiv-on/gates/psiv", "#/variants/psiv-on/gates/loss",
    }  # fmt: skip


def test_submit_reports_every_illegal_override_at_once() -> None:
    refused = problems(spec_values(workload__overrides={"headdim": 48, "d_state": 10, "seq_len": 64}))
    assert {problem.pointer for problem in refused} == {"#/workload/overrides/headdim", "#/workload/overrides/d_state"}


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"bloks": 1, "desing": {}}, "did you mean 'design'?"),
        ({GATES: {"psiv_cach": True}}, "did you mean 'psiv_cache'?"),
        ({GATES: {"dtype": "bf16"}}, "did you mean 'bfloat16'?"),
        ({GATES: {"dtype": "fp32"}}, "did you mean 'float32'?"),
        ({GATES: {"psiv": True}}, "did you mean 'psiv_cache'?"),
        ({GATES: {"cache": True}}, "did you mean 'psiv_cache'?"),
        ({"placement__node_class": "CPU"}, "did you mean 'cpu'?"),
        ({METRIC: "throughput"}, "did you mean 'tokens_per_s'?"),
        ({METRIC: "peak_memory"}, "did you mean 'peak_reserved_gib' or 'peak_allocated_gib'?"),
        ({REQUIRE: [{"metric": "loss_fnal", "rule": "identical"}]}, "did you mean 'loss_final'?"),
        ({REQUIRE: [{"metric": "loss_final", "rule": "identicl"}]}, "did you mean 'identical'?"),
        ({"limits__trial": 120}, "write the unit: 120s"),
        ({"limits__trial": "90"}, "write the unit: 90s"),
        ({MARGIN: 1}, "write the unit: 1%"),
        ({MARGIN: 0.01}, "write the unit: 0.01%, or as a share of 1: 1%"),
        ({"placement__max_foreign_load": 90}, "write the unit: 90%"),
        ({"workload__overrides": {"chunk_size": 8}}, "'chunk_size' is a gate: put it under gates"),
        ({"workload__overrides": {"d_model": 100}}, "override 'headdim' as well"),
        ({GATES: {"lane": "cuda"}}, f"values of 'lane' that run on cpu: {listed(NODE_CLASSES['cpu'].lanes)}"),
    ],
)
def test_submit_hints_at_what_was_meant(changes: dict[str, Any], hint: str) -> None:
    assert hint in [problem.hint for problem in problems(spec_values(**changes))]


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({REQUIRE: [{"metric": "peak_allocated_gib", "max_value": "2GiB"}]}, "a number alone, in GiB"),
        ({REQUIRE: [{"metric": "loss_val", "max_delta": "1%"}]}, "a number alone, in nats"),
        ({"limits__device_minutes": "10m"}, "a number alone, in minutes"),
        ({MARGIN: 1}, "from 0% and below 100%"),
        ({"placement__max_foreign_load": 1}, "above 0% and below 100%"),
    ],
)
def test_submit_says_in_which_unit_and_range(changes: dict[str, Any], detail: str) -> None:
    (problem,) = problems(spec_values(**changes))
    assert problem.detail.endswith(detail)


@pytest.mark.parametrize(
    ("body", "kind", "where", "words"), [row[1:] for row in BAD_TEXTS], ids=[r[0] for r in BAD_TEXTS]
)
def test_parse_spec_refuses_text_that_is_broken_or_dangerous(body: bytes, kind: str, where: str, words: str) -> None:
    (problem,) = text_problems(body, kind)
    assert problem.pointer == where
    assert words in problem.detail


@pytest.mark.parametrize("given", ["on", "yes", "2026-11-20", "1:30", "0x10", "1_000", ".nan"])
def test_parse_spec_takes_only_plain_yaml_numbers_and_booleans(given: str) -> None:
    body = yaml.safe_dump(SPEC).replace("order_seed: 7", f"order_seed: {given}").encode()
    (problem,) = text_problems(body, YAML)
    assert problem.detail == f"'order_seed' must be an integer, got '{given}'"


def test_parse_spec_reads_yaml_exponents_as_numbers() -> None:
    body = yaml.safe_dump(SPEC).replace(
        "recipe: hybrid-tiny", "recipe: hybrid-tiny\n  overrides: {learning_rate: 1e-3}"
    )
    assert parse_spec(body.encode(), YAML).workload.overrides == {"learning_rate": 0.001}


def test_parse_spec_refuses_an_infinite_override() -> None:
    body = json.dumps(spec_values(workload__overrides={"learning_rate": 0.5})).replace("0.5}", "1e999}").encode()
    (problem,) = text_problems(body, JSON)
    assert problem.pointer == "#/workload/overrides/learning_rate"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"x: 1e400", "application/yaml"),
        (b'{"x": [1e400]}', "application/json"),
    ],
)
def test_no_format_can_carry_a_number_that_is_not_finite(body: bytes, kind: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_values(body, kind)
    assert "allowed: finite numbers" in caught.value.problems[0].detail


PIECES = {
    JSON: ('{"a":', "{", "[", '"a', "1,", "]", "}", '"k%d":1,', "9", "0.1e9", "\\u00e9", " ", "-", '"variants":{'),
    YAML: ("a: ", "- ", "? ", "{", "[", "k%d: 1\n", "&a ", "*a ", "!!x ", "|\n ", "'", '"', "#", "9", "\n", "<<: "),
}
"""Pieces of documents whose repetition may cost a parser much time."""


@pytest.mark.parametrize("kind", PIECES)
def test_parse_spec_answers_every_drawn_document_at_once(kind: str) -> None:
    draw = random.Random(kind)  # noqa: S311
    for _ in range(60):
        pieces = [(draw.choice(PIECES[kind]), draw.choice((1, 1, 3, 200_000))) for _ in range(draw.randint(1, 5))]
        texts = ("".join(piece.replace("%d", str(i)) for i in range(min(many, 60_000))) for piece, many in pieces)
        body = "".join(texts).encode()[:MAX_SPEC_BYTES]
        began = time.process_time()
        with contextlib.suppress(SpecError):
            parse_spec(body, kind)
        assert time.process_time() - began < 0.5, pieces


TEXTS = (
    *("1e-3", "2E5", "1e+3", "089", "0o14", "0x1F", "-.5", "5.", "+1", "1_0", "on", "no", "~", "null", "Null", ""),
    *("true", "1:30", "=", "<<", "- a", "a: b", "#x", "'q'", '"', "&a", "*a", "!!x", "%", "@", "`", "{a", "[b", "a #b"),
    *("2026-01-01", "a\nb", " x ", "tab\t", "\x85", "\u2028", "\x07", "\x7f", "\ufeff", "é", "\U0001f600"),
)


def drawn(rng: random.Random, depth: int = 3) -> Any:
    """Plain values of every kind: awkward texts, texts of random characters, numbers, lists and mappings."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 0:
        return rng.choice(TEXTS)
    if kind == 1:
        codes = (rng.choice((rng.randrange(1, 0x3000), rng.randrange(32, 127))) for _ in range(rng.randrange(30)))
        return "".join(map(chr, codes))
    if kind == 2:
        return "".join(rng.choice("0123456789eE+-._xo") for _ in range(rng.randint(1, 6)))
    if kind == 3:
        return rng.choice((True, False, None, rng.randrange(-(2**60), 2**60)))
    if kind < 6:
        return rng.choice((rng.random(), rng.uniform(-1, 1) * 10.0 ** rng.randint(-300, 300)))
    inner = [drawn(rng, depth - 1) for _ in range(rng.randrange(4))]
    return inner if kind == 6 else {rng.choice(TEXTS) + str(number): one for number, one in enumerate(inner)}


def test_a_written_spec_is_read_back() -> None:
    """YAML 1.1, which the library writes, has other texts that need quotes: 1e-3 came back as a number."""
    rng = random.Random(29)  # noqa: S311
    for text in TEXTS:
        assert load_values(spec_yaml({"a": text, "b": [text, text]}), YAML) == {"a": text, "b": [text, text]}
    shared = {"x": "1e-3"}
    for _ in range(500):
        values = {"args": drawn(rng), "env": shared, "same": shared}
        assert load_values(spec_yaml(values), YAML) == values

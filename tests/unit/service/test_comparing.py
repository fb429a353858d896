"""`ablate.compare` without a trial: the spec that it makes, its errors, and the forms of an answer."""

import base64
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import ablate
from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.load import load_values, parse_spec
from ablate.experiments.outcomes import Outcome
from ablate.experiments.reporting.pages.report import render
from ablate.experiments.reporting.pictures.forest import forest
from ablate.experiments.reporting.terminal.markdown import pull_request_markdown
from ablate.experiments.reporting.view import AblationView
from ablate.service.cli import comparing, verdict_tables
from ablate.service.cli.comparing import AblationAnswer, NotCompared
from ablate.service.cli.output import plain_text
from ablate.service.schemas.submissions import SpecBody
from tests import views

COMMAND = "python train.py --seed {seed}"
FASTER = {"faster": {"args": ["--lr", "2e-3"]}}
CHECK: dict[str, Any] = {
    "checks": [{"name": "runs", "passed": True, "needed": True, "detail": ""}],
    **{
        "node_class": "cpu",
        "seed": None,
        "marks": "tokens",
        "is_quiet": True,
        "can_take_turns": True,
        "own_steps": None,
        "cpu_step_s": 0.1,
    },
    **{"step_s": 0.1, "start_s": 1.0, "longest_s": 2.0},
}


class Ran(Exception):
    """The spec reached the service."""


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Mapping[str, Any]]:
    """Return `compare` with a check that passes, up to the spec that it would submit, as plain values."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(comparing, "_run", lambda *_words, **_options: (0, json.dumps(CHECK), ""))
    monkeypatch.setattr(comparing, "names_service", lambda: True)

    def keep(body: SpecBody, text: str) -> None:
        parse_spec(body.content, body.content_type)
        raise Ran(text)

    monkeypatch.setattr(comparing, "_by_service", keep)

    def values_of(command: Any = COMMAND, **arguments: Any) -> Mapping[str, Any]:
        with pytest.raises(Ran) as ran:
            ablate.compare(command, **arguments)
        return load_values(str(ran.value).encode(), "application/yaml")

    return values_of


def test_the_arms_and_the_rule_are_those_that_were_given(submitted: Callable[..., Mapping[str, Any]]) -> None:
    base = {"args": ["--lr", "1e-3"], "env": {"OMP_NUM_THREADS": "1"}}
    variants = {**FASTER, "two-threads": {"env": {"OMP_NUM_THREADS": "2"}}}
    spec = submitted(baseline=base, variants=variants, metric="val_loss", margin="0.5%")
    assert (spec["baseline"], spec["variants"]) == (base, variants)
    assert spec["workload"]["command"] == ["python", "train.py", "--seed", "{seed}"]
    assert spec["workload"]["metrics"] == {"val_loss": {"better": "lower"}}
    assert spec["verdict"]["primary"] == {"metric": "val_loss", "margin": "0.5%"}
    assert spec["design"] == {"seeds": 6, "blocks": {"count": 6}}
    assert submitted(COMMAND.split(), baseline=base, variants=variants, metric="val_loss", margin="0.5%") == spec


names = st.from_regex("[a-z][a-z0-9-]{0,20}", fullmatch=True).filter(lambda name: name not in ("baseline", "control"))
words = st.text(st.characters(codec="ascii", exclude_categories=("C",), exclude_characters="{}"), min_size=1)
rules = st.lists(st.integers(1, 99), min_size=1, max_size=2).map(lambda sizes: [f"{size}%" for size in sorted(sizes)])
"""A margin, and maybe the improvement from which a variant is adopted."""
counts = st.integers(6, 200).map(lambda number: {"count": number})
looks = st.lists(st.integers(6, 90), min_size=2, max_size=4, unique=True).map(
    lambda numbers: {"looks": sorted(numbers)}
)


@given(
    arms=st.dictionaries(names, st.lists(words, max_size=3), min_size=1, max_size=4),
    design=st.fixed_dictionaries({}, optional={"blocks": counts | looks, "seeds": st.integers(1, 6)}),
    timed=st.none() | st.integers(1, 400),
    rule=rules,
)
def test_a_key_that_is_given_is_in_the_spec_and_the_rest_fits_to_it(
    submitted_once: Callable[..., Mapping[str, Any]],
    arms: dict[str, list[str]],
    design: dict[str, Any],
    timed: int | None,
    rule: list[str],
) -> None:
    margin, primary = rule[0], dict(zip(["adopt_if"], rule[1:], strict=False))
    variants = {name: {"args": [*own, str(number)]} for number, (name, own) in enumerate(arms.items())}
    steps = {} if timed is None else {"steps": {"warmup": 2, "timed": timed}}
    sections: dict[str, Any] = {"design": design, "workload": steps, "verdict": {"primary": primary}}
    spec = submitted_once(variants=variants, margin=margin, **sections)
    blocks = design.get("blocks", {"count": 6})
    number = blocks.get("count") or blocks["looks"][-1]
    assert spec["variants"] == variants
    assert spec["design"] == {"blocks": blocks, "seeds": design.get("seeds", min(number, 64))}
    assert spec["workload"]["command"] == COMMAND.split()
    assert spec["verdict"]["primary"] == {"metric": "tokens_per_s", "margin": margin, **primary}
    if timed is not None:
        assert spec["workload"]["steps"] == steps["steps"]
    trial_s = CHECK["start_s"] + CHECK["step_s"] * spec["workload"]["steps"]["timed"]
    assert spec["limits"]["device_minutes"] >= 3 * number * trial_s / 60


@pytest.fixture(scope="module")
def submitted_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Mapping[str, Any]]]:
    """Return `submitted` for the drawn examples of one test."""
    with pytest.MonkeyPatch.context() as patch:
        yield submitted.__wrapped__(patch, tmp_path_factory.mktemp("drawn"))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sections", "placement"),
    [
        ({}, {"node_class": "cpu"}),
        ({"placement": {"gpu": "any", "memory": "40GiB"}}, {"gpu": "any", "memory": "40GiB"}),
        ({"placement": {"node_class": "h200"}}, {"node_class": "h200"}),
        ({"check": False}, {}),
        ({"check": False, "placement": {"node_class": "h100", "devices": 2}}, {"node_class": "h100", "devices": 2}),
    ],
    ids=["this machine", "any GPU", "a class", "the only class", "unchecked class"],
)
def test_it_runs_on_the_kind_of_the_check_unless_another_is_named(
    submitted: Callable[..., Mapping[str, Any]], sections: dict[str, Any], placement: dict[str, Any]
) -> None:
    assert submitted(variants=FASTER, **sections)["placement"] == placement


def test_a_program_that_ignores_the_seed_is_compared_at_its_own(
    submitted: Callable[..., Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Mapping[str, Any]] = []

    def check(*_words: str, stdin: bytes) -> tuple[int, str, str]:
        asked.append(load_values(stdin, "application/yaml"))
        return 0 if len(asked) > 1 else 6, json.dumps({**CHECK, "seed": 1337}), ""

    monkeypatch.setattr(comparing, "_run", check)
    assert submitted("python train.py", variants=FASTER)["design"]["seeds"] == [1337]
    assert [one["design"]["seeds"] for one in asked] == [6, [1337]]


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no command": ("", {}, "the command is ''; allowed: text, or a list of texts"),
    "None": (None, {}, 'hint: ablate.compare("python train.py --seed {seed}", ...)'),
    "a number in the command": (["python", 3], {}, "the command is ['python', 3]"),
    "bytes": (b"python", {}, "the command is b'python'"),
    "open quotes": ("python 'a", {}, "hint: close the quotes"),
    "arguments as text": (COMMAND, {"variants": {"a": {"args": "--lr 1"}}}, 'hint: write it as a list: ["--lr", "1"]'),
    "a number": (COMMAND, {"variants": {"a": {"args": ["--lr", 0.1]}}}, 'hint: write it in quotes: "0.1"'),
    "a path": (COMMAND, {"variants": {"a": {"args": [Path("x")]}}}, "is of type PosixPath; allowed: what YAML has"),
    "a variant as text": (COMMAND, {"variants": {"a": "--lr 1"}}, "#/variants/a  'a' must be a mapping"),
    "no variant": (COMMAND, {"variants": {}}, "#/variants  'variants' has 0 entries; allowed: at least 1"),
    "variants as a list": (COMMAND, {"variants": ["a"]}, "#/variants  'variants' must be a mapping"),
    "variants None": (COMMAND, {"variants": None}, "#/variants  'variants' must be a mapping"),
    "the baseline as text": (COMMAND, {"baseline": "--lr 1"}, "#/baseline  'baseline' must be a mapping"),
    "a variant like the baseline": (COMMAND, {"baseline": FASTER["faster"]}, "the same configuration as the baseline"),
    "a name": (COMMAND, {"variants": {"A b": {"args": ["x"]}}}, "allowed: 1 to 63 of a-z, 0-9 and '-'"),
    "a key": (COMMAND, {"variants": {"a": {"arg": ["x"]}}}, "hint: did you mean 'args'?"),
    "a section": (COMMAND, {"desgin": {"seeds": 3}}, "hint: did you mean 'design'?"),
    "a section as text": (COMMAND, {"design": "x"}, "#/design  'design' must be a mapping"),
    "a section None": (COMMAND, {"workload": None}, "#/workload  'workload' must be a mapping"),
    "a rule as text": (COMMAND, {"verdict": {"primary": "x"}}, "#/verdict/primary  'primary' must be a mapping"),
    "a placement as text": (COMMAND, {"placement": "cpu"}, "#/placement  'placement' must be a mapping"),
    "a margin without unit": (COMMAND, {"margin": 0.5}, "hint: write the unit: 0.5%"),
    "a direction": (COMMAND, {"metric": "val_loss", "better": "bigger"}, "hint: did you mean 'higher'?"),
    "too few blocks": (
        COMMAND,
        {"design": {"blocks": {"count": 3}}},
        "#/design/blocks/count  must be at least 6",
    ),
    "a recipe": (COMMAND, {"workload": {"recipe": "hybrid-tiny"}}, "give exactly one of 'recipe' and 'command'"),
    "a secret": (
        COMMAND,
        {"baseline": {"env": {"HF_TOKEN": f"hf_{34 * 'a'}"}}},
        "looks like a Hugging Face token",
    ),
    "no file": ("python none.py", {"workload": {"code": "none"}}, "#/workload/code"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_question_is_refused_before_anything_runs(
    case: str, submitted: Callable[..., Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, arguments, words = WRONG[case]
    monkeypatch.setattr(comparing, "_run", lambda *_words, **_options: pytest.fail("something ran"))
    with pytest.raises(NotCompared, match=re.escape(words)):
        ablate.compare(command, **{"variants": FASTER, **arguments})


def test_a_check_that_fails_names_every_arm_and_its_reason(
    submitted: Callable[..., Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"name": arm, "passed": arm == "a", "needed": arm != "loss", "detail": f"{arm} ended"} for arm in "abc"]
    answers = iter([(6, json.dumps({**CHECK, "checks": rows}), ""), (5, "", "code .: 1 file\nnot run: no device\n")])
    monkeypatch.setattr(comparing, "_run", lambda *_words, **_options: next(answers))
    for text in ("nothing was measured: the check failed\n  b: b ended\n  c: c ended", "not run: no device"):
        with pytest.raises(NotCompared) as refused:
            ablate.compare(COMMAND, variants=FASTER)
        assert str(refused.value).endswith(text)


def failed_baseline() -> AblationView:
    whole = views.cpu_view()
    ended = {("baseline", number): Outcome.FAILED for number in range(6)}
    return views.with_outcomes(whole, ended)


VIEWS: dict[str, Callable[[], AblationView]] = {
    "measured": views.view,
    "uncalibrated": views.cpu_view,
    "markup in every text": views.hostile,
    "exact": lambda: views.view(primary="peak_allocated_gib"),
    "many": lambda: views.view(arms=views.many(12)),
    "no baseline": failed_baseline,
}
BOUNDS = ("ci_low_pct", "delta_pct", "ci_high_pct")
COLUMNS = [
    *("variant", "metric", "decides", "effect_pct", "low_pct", "high_pct", "mde_pct", "blocks"),
    *("verdict", "decision", "reason"),
]


def answer_of(verdict: Verdict) -> AblationAnswer:
    return AblationAnswer(verdict, "", dict, str)


def judged(case: str) -> tuple[AblationView, Verdict]:
    whole = VIEWS[case]()
    assert whole.verdict is not None
    return whole, whole.verdict


@cache
def judged_once(case: str) -> Verdict:
    return judged(case)[1]


class Images(HTMLParser):
    """Collects the images of a document and its text; knows which tags are open."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.images.append(dict(attrs))
        else:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("case", VIEWS)
def test_a_notebook_shows_the_table_and_the_picture_of_the_report(case: str) -> None:
    whole, verdict = judged(case)
    shown, picture = Images(answer_of(verdict)._repr_html_()), forest(whole)
    assert shown.open == []
    for variant in verdict.variants:
        assert all(word in shown.text for word in variant.arm.split())
        assert str(variant.decision) in shown.text
    sources = [str(one["src"]).removeprefix("data:image/svg+xml;base64,") for one in shown.images]
    pictures = [] if picture is None else [picture]
    assert [base64.b64decode(one).decode() for one in sources] == [one.standalone() for one in pictures]
    assert [one["alt"] for one in shown.images] == [one.caption for one in pictures]
    assert (case == "no baseline") == (picture is None)


@pytest.mark.parametrize("case", VIEWS)
def test_a_terminal_shows_what_the_command_shows_and_the_picture_below(case: str) -> None:
    verdict = judged(case)[1]
    shown, table = repr(answer_of(verdict)), plain_text(verdict_tables.verdict(verdict))
    assert shown.startswith(table)
    assert "\x1b" not in shown
    names = [line.partition("  ")[0] for line in shown.removeprefix(table).splitlines() if "●" in line]
    assert len(names) == sum(one.primary is not None for one in verdict.variants)


@given(
    st.lists(st.tuples(*3 * [st.floats(-99, 1e6, allow_subnormal=False)]).map(sorted), min_size=1, max_size=12),
    st.sampled_from(["measured", "uncalibrated"]),
)
def test_the_picture_of_a_terminal_has_the_order_of_the_numbers(ends: list[list[float]], case: str) -> None:
    verdict = judged_once(case)
    primary = next(one.primary for one in verdict.variants if one.primary is not None)
    variants = [
        verdict.variants[0].model_copy(
            update={"arm": f"arm-{number}", "primary": primary.model_copy(update=dict(zip(BOUNDS, own, strict=True)))}
        )
        for number, own in enumerate(ends)
    ]
    arms = dict.fromkeys((verdict.baseline, *(one.arm for one in variants)), verdict.arms[verdict.baseline])
    lines = verdict_tables.picture(verdict.model_copy(update={"variants": tuple(variants), "arms": arms}))
    assert len(lines) == len(ends)
    start = len(f"arm-{len(ends) - 1}  ")
    low, high = min(0.0, *(own[0] for own in ends)), max(0.0, *(own[2] for own in ends))
    cell = (high - low or 1.0) / 59
    for line in lines:
        left, effect, right = ends[int(line.partition(" ")[0].removeprefix("arm-"))]
        row = line[start:]
        assert abs(low + row.index("●") * cell - effect) <= 0.51 * cell
        drawn = [place for place, mark in enumerate(row) if mark in "─●"]
        assert abs(low + drawn[0] * cell - left) <= 0.51 * cell
        assert abs(low + drawn[-1] * cell - right) <= 0.51 * cell
        assert drawn == list(range(drawn[0], drawn[-1] + 1))
        if "│" in row:
            assert abs(low + row.index("│") * cell) <= 0.51 * cell
        else:
            assert left - cell <= 0 <= right + cell, "the interval hides the bar at zero"


@pytest.mark.parametrize("case", VIEWS)
def test_a_frame_has_a_row_for_each_variant_and_metric(case: str) -> None:
    verdict = judged(case)[1]
    frame = answer_of(verdict).to_frame()
    assert list(frame.columns) == COLUMNS
    wanted = [(one.arm, verdict.rule["primary"]["metric"]) for one in verdict.variants]
    wanted += [(one.arm, other.metric) for one in verdict.variants for other in one.secondary]
    assert sorted(zip(frame.variant, frame.metric, strict=True)) == sorted(wanted)
    deciding = frame[frame.decides].set_index("variant")
    assert list(deciding.index) == [one.arm for one in verdict.variants]
    assert frame[~frame.decides][["verdict", "decision", "reason"]].isna().all().all()
    for one in verdict.variants:
        row = deciding.loc[one.arm]
        assert (row.verdict, row.decision, row.reason) == (str(one.verdict), str(one.decision), one.reason)
        if one.primary is not None:
            numbers = (one.primary.delta_pct, one.primary.ci_low_pct, one.primary.ci_high_pct, one.primary.blocks)
            assert (row.effect_pct, row.low_pct, row.high_pct, row.blocks) == numbers
        elif one.exact is not None and one.exact.seeds:
            changes = [100 * (pair.variant - pair.baseline) / pair.baseline for pair in one.exact.seeds]
            assert (row.low_pct, row.high_pct) == pytest.approx((min(changes), max(changes)))
            assert min(changes) <= row.effect_pct <= max(changes)
        else:
            assert pd.isna([row.effect_pct, row.low_pct, row.high_pct, row.mde_pct]).all()


@pytest.mark.parametrize(("installed", "made_by"), [({"pandas", "polars"}, "pandas"), ({"polars"}, "polars")])
def test_a_frame_is_of_pandas_or_else_of_polars(
    installed: set[str], made_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pandas", "polars"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(DataFrame=lambda rows, name=name: (name, rows)))
    monkeypatch.setattr(comparing, "find_spec", lambda name: name if name in installed else None)
    one = answer_of(judged("measured")[1])
    assert one.to_frame() == (made_by, one.rows)


def test_tensorboard_and_wandb_store_the_answer_as_the_documentation_writes_it(tmp_path: Path) -> None:
    view, verdict = judged("measured")
    one = replace(answer_of(verdict), _report=lambda: render(view))
    with SummaryWriter(tmp_path / "runs") as writer:
        writer.add_text("ablate", one.markdown)
    stored = EventAccumulator(str(tmp_path / "runs")).Reload().Tensors("ablate/text_summary")
    assert [one.tensor_proto.string_val[0].decode() for one in stored] == [pull_request_markdown(verdict)]
    assert verdict.variants[0].arm in one.markdown
    source = "import sys, wandb; wandb.init().log({'ablate': wandb.Html(sys.stdin.read(), inject=False)})"
    quiet = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", source], input=one.report, text=True, check=True, env=quiet, cwd=tmp_path)
    (page,) = tmp_path.rglob("media/html/*.html")
    assert page.read_text() == one.report


def test_what_is_not_installed_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "find_spec", lambda name: None)
    one = answer_of(judged("measured")[1])
    with pytest.raises(NotCompared, match="pip install pandas; `rows` has the same"):
        one.to_frame()
    assert "pip install matplotlib" in one._repr_html_()
    assert "<img" not in one._repr_html_()


def test_importing_the_module_imports_none_of_the_client() -> None:
    code = "import sys, ablate; print(*sorted({name.partition('.')[0] for name in sys.modules})); print(dir(ablate))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, names = done.stdout.splitlines()
    assert {"rich", "httpx", "pydantic", "numpy", "typer", "scipy", "yaml"} & set(loaded.split()) == set()
    assert all(importlib.util.find_spec(name) for name in ("rich", "httpx"))
    assert {"compare", "answer", "trial", "steps"} <= set(re.findall(r"\w+", names))
    with pytest.raises(AttributeError, match="module 'ablate' has no attribute 'compere'"):
        ablate.compere  # noqa: B018

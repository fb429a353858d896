"""`ablate sessions` and `ablate try` against a real service: texts, JSON, exit codes, code of the current folder."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.power import session_level
from ablate.experiments.outcomes import Decision
from ablate.service.store.ablations import sessions
from tests import views
from tests.answering import EXACT, LESS_MEMORY, answering
from tests.api_stack import Api, api_fixture, served_api
from tests.cli import Done, ablate, speaking_to
from tests.factories import command_values, spec_values
from tests.waiting import until

api = api_fixture(served_api, kinds=["sqlite"], scope="module")


@pytest.fixture(autouse=True)
def _spoken_to(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with speaking_to(api, monkeypatch):
        yield


EXACT_COMMAND: dict[str, Any] = {
    "verdict__primary": {"metric": "peak_reserved_gib", "margin": "0%", "adopt_if": "1%"},
    "placement__node_class": "h100",
    "design__seeds": [1],
}


def written(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def test_a_session_is_opened_used_and_closed(api: Api, tmp_path: Path) -> None:
    path = written(tmp_path / "start.yaml", spec_values(ablation="start", **EXACT))
    opened = ablate("sessions", "open", "night", path)
    assert (opened.code, "the baseline that opened it" in opened.out) == (0, True), opened.err
    with answering(api):
        same = ablate("try", "--session", "night", "--", path)
    assert same.code == 1, same.err
    lines = " ".join(same.out.split())
    assert "proposal 1 of night against the session's first baseline, tested at 1.3 %" in lines
    assert "discard: the incumbent stays; the next proposal is tested at 0.52 %" in lines

    nothing = ablate("sessions", "spec", "night", "--whole")
    assert (nothing.code, "session 'night' has kept no proposal" in nothing.err) == (5, True), nothing.err

    with answering(api, LESS_MEMORY):
        kept = ablate("try", "--session", "night", "--note", "cache PsiV: less [memory]", "--json", "--", path)
    answer = json.loads(kept.out)
    assert (kept.code, answer["outcome"], answer["proposal"]["number"]) == (0, "keep", 2)
    assert answer["proposal"]["note"] == "cache PsiV: less [memory]"
    assert answer["session"]["next_level"] == session_level(3, [2])
    assert answer["verdict"]["variants"][0]["decision"] == "adopt"

    refused = ablate("try", "--session", "night", "--json", "--", path)
    assert (refused.code, refused.out) == (5, "")
    assert "#/baseline/gates/psiv_cache" in refused.err
    assert "ablate sessions spec night" in refused.err
    following = ablate("sessions", "spec", "night").out
    assert parse_spec(following.encode(), "application/yaml").baseline.gates["psiv_cache"] is True

    whole = parse_spec(ablate("sessions", "spec", "night", "--whole").out.encode(), "application/yaml")
    assert (whole.baseline.gates, whole.variants["incumbent"].gates["psiv_cache"]) == ({"chunk_size": 16}, True)

    shown = " ".join(ablate("sessions", "show", "night").out.split())
    texts = ("kept 1 of 2 proposals", "incumbent proposal 2", "discard", "keep", "cache PsiV: less [memory]")
    assert "psiv_cache true" in shown, "the change of the proposal without a note"
    assert all(text in shown for text in texts)
    assert "noise" not in shown, "an exact metric needs no A/A blocks"
    assert "night" in ablate("sessions", "list").out
    assert ablate("sessions", "close", "night", "--json").code == 0
    assert "session 'night' is closed" in ablate("try", "--session", "night", "--", path).err


def cancelling(api: Api) -> threading.Thread:
    """Cancel the next ablation that waits, from another thread."""

    def cancel() -> None:
        (row,) = until(lambda: api.get("/v1/ablations?state=queued").json()["items"])
        api.cancel(row["id"])

    thread = threading.Thread(target=cancel)
    thread.start()
    return thread


def proposed(api: Api, *words: object) -> Done:
    thread = cancelling(api)
    done = ablate("try", "--session", "lab", "--json", "--", *words)
    thread.join()
    return done


def test_a_command_is_proposed_with_the_code_of_the_current_folder(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n", encoding="utf-8")
    values = command_values(workload__code=".", baseline={"args": ["--lr", "1", "--fused"]}, **EXACT_COMMAND)
    path = written(tmp_path / "start.yaml", values)
    assert ablate("sessions", "open", "lab", path).code == 0
    base = yaml.safe_load(ablate("sessions", "spec", "lab").out)

    (tmp_path / "train.py").write_text("print(2)\n", encoding="utf-8")
    done = proposed(api, "python", "train.py", "--seed", "{seed}", "--lr=2", "--wd", "0.1")
    answer = json.loads(done.out)
    assert (done.code, answer["outcome"], answer["verdict"]) == (3, "undecided", None)
    text = api.get(f"/v1/ablations/{answer['proposal']['ablation_id']}/spec").json()["text"]
    sent = yaml.safe_load(text)
    assert (sent["ablation"], sent["baseline"]) == ("lab-1", base["baseline"])
    assert sent["variants"]["proposal"]["args"] == ["--lr=2", "--fused", "--wd", "0.1"]
    assert "arguments of the proposal: --lr=2 --fused --wd 0.1" in done.err
    assert sent["workload"]["code"] == base["workload"]["code"] != sent["variants"]["proposal"]["code"]
    assert sent["verdict"]["session"]["level"] == session_level(1)

    same = ("python", "train.py", "--seed", "{seed}")
    code_only = proposed(api, *same)
    assert answer["proposal"]["change"].startswith("--lr 1 \N{RIGHTWARDS ARROW} 2, + --wd 0.1, code ")
    assert json.loads(code_only.out)["proposal"]["change"].startswith("code ")
    own = api.get(f"/v1/ablations/{json.loads(code_only.out)['proposal']['ablation_id']}/spec").json()["text"]
    assert yaml.safe_load(own)["variants"]["proposal"]["args"] == base["baseline"]["args"], "only its code is another"

    other = ablate("try", "--session", "lab", "--", "python", "eval.py")
    assert (other.code, "must begin with that of session 'lab': python train.py --seed '{seed}'" in other.err) == (
        5,
        True,
    )
    assert "baseline.args" in other.err


def keep(api: Api, ablation: str) -> None:
    """Keep a proposal as the judge does for a variant that the rule adopts."""
    verdict = views.view().verdict
    assert verdict is not None
    adopted = verdict.variants[0].model_copy(update={"decision": Decision.ADOPT})
    with api.store.write() as connection:
        sessions.settle(connection, ablation, verdict.model_copy(update={"variants": (adopted,)}))


def test_a_session_gives_the_code_of_its_incumbent_back(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    (program / "nets").mkdir(parents=True)
    (program / "train.py").write_text("print(1)\n", encoding="utf-8")
    (program / "nets" / "mlp.py").write_text("WIDTH = 1\n", encoding="utf-8")
    monkeypatch.chdir(program)
    values = command_values(workload__code=".", baseline={"args": ["--lr", "1"]}, **EXACT_COMMAND)
    assert ablate("sessions", "open", "give", written(program / "give.yaml", values)).code == 0

    def given_back(name: str) -> tuple[str, str]:
        done = ablate("sessions", "code", "give", "--out", tmp_path / "out" / name)
        assert (done.code, done.out) == (0, f"{tmp_path / 'out' / name}\n"), done.err
        assert sorted(path.name for path in (tmp_path / "out" / name).rglob("*.py")) == ["mlp.py", "train.py"]
        return (tmp_path / "out" / name / "train.py").read_text(encoding="utf-8"), done.err

    def kept(*arguments: str) -> None:
        thread = cancelling(api)
        command = ("python", "train.py", "--seed", "{seed}", *arguments)
        done = ablate("try", "--session", "give", "--json", "--", *command)
        thread.join()
        keep(api, json.loads(done.out)["proposal"]["ablation_id"])

    text, words = given_back("first")
    assert (text, "the baseline that opened it, which runs: python train.py --seed '{seed}' --lr 1" in words) == (
        "print(1)\n",
        True,
    )
    kept("--lr", "2")
    text, words = given_back("by-arguments")
    assert (text, "proposal 1, which runs: python train.py --seed '{seed}' --lr 2" in words) == ("print(1)\n", True)
    (program / "train.py").write_text("print(2)\n", encoding="utf-8")
    kept()
    (tmp_path / "out" / "empty").mkdir()
    text, words = given_back("empty")
    assert (text, "proposal 2, which runs: python train.py --seed '{seed}' --lr 2" in words) == ("print(2)\n", True)

    for place in ("empty", "empty/train.py"):
        full = ablate("sessions", "code", "give", "--out", tmp_path / "out" / place)
        assert (full.code, "exists, and is no empty folder" in " ".join(full.err.split())) == (5, True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["by-arguments", "empty", "first"]


def test_code_that_was_not_sent_or_is_dropped_is_not_given_back(api: Api, tmp_path: Path) -> None:
    dropped = {"archive": f"sha256:{64 * '0'}"}
    for name, values, words in (
        ("of-recipe", spec_values(**EXACT), "is none: it trains a recipe of the node"),
        (
            "of-node",
            command_values(workload__code="/srv/lab", **EXACT_COMMAND),
            "is on the node, and was not sent: '/srv/lab'",
        ),
        (
            "of-archive",
            command_values(workload__code=dropped, **EXACT_COMMAND),
            f"no archive {dropped['archive']} of yours",
        ),
    ):
        assert ablate("sessions", "open", name, written(tmp_path / f"{name}.yaml", values)).code == 0
        done = ablate("sessions", "code", name, "--out", tmp_path / "out")
        assert (done.code, words in " ".join(done.err.split())) == (5, True), done.err
        assert not (tmp_path / "out").exists()


def test_what_cannot_be_proposed_is_an_error_and_spends_nothing(api: Api, tmp_path: Path) -> None:
    path = written(tmp_path / "start.yaml", spec_values(ablation="start", **EXACT))
    unknown = ablate("try", "--session", "nowhere", "--", path)
    assert (unknown.code, "there is no session 'nowhere'" in unknown.err) == (5, True)
    assert ablate("sessions", "open", "day", path).code == 0
    recipe = ablate("try", "--session", "day", "--", "python", "train.py")
    assert (recipe.code, "session 'day' trains a recipe, so a proposal is a spec" in recipe.err) == (5, True)
    assert ablate("try", "--session", "day").code == 64
    assert json.loads(ablate("sessions", "show", "day", "--json").out)["next_level"] == session_level(1)

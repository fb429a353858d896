"""Ablations, trials and nodes by what people call them, against a real service; every command of the program."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ablate.service.client.settings import get_client_settings
from tests.answering import EXACT, LESS_MEMORY, answering
from tests.api_stack import Api, nobody_url, served_api
from tests.cli import ablate, speaking_to, start
from tests.waiting import LIMIT_S


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with served_api("sqlite", tmp_path_factory.mktemp("names")) as running:
        for name in ("gpu-7", "gpu-8", "cpu-1"):
            running.register(name)
        yield running


@pytest.fixture(autouse=True)
def _spoken_to(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with speaking_to(api, monkeypatch):
        yield


@pytest.fixture(scope="module")
def made(api: Api) -> dict[str, str]:
    """Ids by name; `twice` was submitted twice, and its newest counts."""
    names = ["cache-small", "cache-large", "twice", "twice", "alone"]
    return {name: api.submit(ablation=name)["id"] for name in names}


def shown(*words: object) -> str:
    done = ablate("show", *words, "--json")
    assert done.code == 0, done.err
    return str(json.loads(done.out)["ablation"]["id"])


def test_an_ablation_is_found_by_name_id_beginning_and_latest(made: dict[str, str]) -> None:
    for name, ablation_id in made.items():
        assert shown(name) == shown(ablation_id) == ablation_id
    assert shown(made["alone"][:-1]) == made["alone"], "ids of one moment differ in their last characters only"
    assert shown("al") == shown("latest") == made["alone"]
    assert shown("cache-l") == made["cache-large"]
    assert f"al is alone, {made['alone']}" in " ".join(ablate("show", "al").err.split())


def test_what_fits_several_or_none_is_refused_with_what_there_is(made: dict[str, str]) -> None:
    for command in ("show", "watch", "cancel", "verdict", "report", "log"):
        done = ablate(command, "cache-")
        assert (done.code, "cache-large, cache-small" in " ".join(done.err.split())) == (5, True), command
        done = ablate(command, "unheard-of")
        assert (done.code, "no ablation whose name or id begins with 'unheard-of'" in " ".join(done.err.split())) == (
            5,
            True,
        ), command
    assert ablate("admin", "priority", "cache-", "3").code == 5
    assert ablate("show", "a name with spaces").code == 5


def test_what_is_misspelt_is_answered_with_what_was_meant(made: dict[str, str]) -> None:
    for words, code, message in (
        (("show", "alnoe"), 5, "begins with 'alnoe'; did you mean 'alone'?"),
        (("show", "zzzzzz"), 5, "begins with 'zzzzzz'"),
        (("list", "--state", "runing"), 64, "did you mean 'running'?"),
        (("nodes", "drain", "CPU-1"), 5, "there is no node 'CPU-1'; did you mean 'cpu-1'?"),
    ):
        done = ablate(*words)
        error = " ".join(done.err.replace("│", " ").split())
        assert (done.code, message in error, "did you mean" in error) == (code, True, "zzzzzz" not in words), error
    assert ablate("list", "--state", "queued").code == 0


def test_priority_and_cancel_take_names(api: Api, made: dict[str, str]) -> None:
    assert ablate("admin", "priority", "twice", "77").code == 0
    assert api.get(f"/v1/ablations/{made['twice']}").json()["priority"] == 77
    assert ablate("admin", "priority", "twice", "101").code == 64
    fresh = api.submit(ablation="short-lived")["id"]
    done = ablate("cancel", "short")
    assert (done.code, fresh in done.out, "cancelled" in done.out) == (0, True, True)
    again = ablate("cancel", "short")
    assert (again.code, "cancelled" in again.err) == (5, True)


def test_a_trial_is_its_place_in_an_ablation(api: Api, made: dict[str, str]) -> None:
    trials = api.get(f"/v1/ablations/{made['alone']}/trials?limit=100").json()["items"]
    second = {trial["arm"]: trial["id"] for trial in trials if trial["block_index"] == 1}
    for words, message in (
        (("log", "alone/2/nothing"), "there is no arm 'nothing'; arms: "),
        (("log", "alone/9/psiv-on"), "has no block '9'; blocks: 1-6"),
        (("log", "alone/0"), "has no block '0'; blocks: 1-6"),
        (("log", "alone/²"), "has no block '²'; blocks: 1-6"),
        (("offline", "receipts", "alone/2/psiv-on"), "queued"),
        (("show", "alone/2/nothing"), "there is no arm 'nothing'; arms: "),
        (("show", "alone/9"), "has no block '9'; blocks: 1-6"),
        (("cancel", "latest/2"), "'latest/2' is a place in an ablation, and this command takes the ablation: latest"),
    ):
        done = ablate(*words)
        assert (done.code, message in " ".join(done.err.split())) == (5, True), done.err
    assert second
    for word in ("alone/2/psiv-on", "alone/2/psi", "latest/2/ch", "alone", second["baseline"]):
        assert ablate("log", word).code == 0, word
    for word, arms in (("alone/2/psiv-on", ["psiv-on"]), ("latest/2/psi", ["psiv-on"]), ("alone/2", list(second))):
        trials = json.loads(ablate("show", word, "--json").out)["trials"]
        assert sorted((trial["block_index"], trial["arm"]) for trial in trials) == [(1, arm) for arm in sorted(arms)]
    assert second["psiv-on"] in ablate("show", "alone/2/psiv-on").out
    assert ablate("show", "alone/2", "--from-block", "3").code == 64


def test_a_log_ends_with_why_its_trial_is_over(api: Api) -> None:
    reason = "the trial took longer than 40 s"
    late = {"outcome": "timeout", "failure_class": "timeout", "message": reason, "steps": ()}
    with answering(api, {"psiv-on": late}):
        api.submit(ablation="slow", **EXACT)
        assert ablate("watch", "slow").code == 0
    done = ablate("log", "slow/1/psiv-on")
    assert (done.code, done.out, done.err) == (0, "", f"timeout: {reason}\n")
    assert ablate("log", "slow/1/baseline").err == ""


def test_nodes_are_drained_resumed_and_quarantined_by_name_or_beginning(api: Api) -> None:
    def state(name: str) -> str:
        return next(str(row["state"]) for row in api.get("/v1/nodes").json()["items"] if row["name"] == name)

    assert ablate("nodes", "drain", "cpu").code == 0
    assert state("cpu-1") == "drained"
    shown = ablate("nodes", "resume", "cpu-1", "--json")
    assert {row["name"]: row["state"] for row in json.loads(shown.out)}["cpu-1"] == "works"
    refused = ablate("nodes", "drain", "gpu-")
    assert (refused.code, "several nodes: gpu-7, gpu-8" in " ".join(refused.err.split())) == (5, True)
    assert state("gpu-7") == state("gpu-8") == "works"
    assert ablate("nodes", "quarantine", "gpu-8").code == 64, "a reason is needed"
    assert ablate("nodes", "quarantine", "gpu-8", "--reason", "its fan is loud").code == 0
    listed = ablate("nodes").out
    assert (state("gpu-8"), "its fan is loud" in " ".join(listed.split())) == ("quarantined", True)
    unknown = ablate("nodes", "resume", "tpu-1")
    assert (unknown.code, "tpu-1" in unknown.err) == (5, True)
    assert ablate("nodes", "resume", "gpu-8").code == 0


def offered(api: Api, monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    """What bash would offer at the end of a command line."""
    words = line.split(" ")
    monkeypatch.setenv("_ABLATE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    done = ablate()
    monkeypatch.delenv("_ABLATE_COMPLETE")
    assert done.err == ""
    return done.out.split()


def test_the_shell_completes_what_people_name(api: Api, made: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def at(line: str) -> list[str]:
        return offered(api, monkeypatch, line)

    assert at("ablate show la") == ["latest"]
    assert at("ablate verdict cache-") == ["cache-large", "cache-small"]
    assert made["alone"] in at("ablate watch abl_")
    assert at("ablate log alone/") == [f"alone/{number}/" for number in range(1, 7)]
    assert sorted(at("ablate log alone/2/")) == ["alone/2/baseline", "alone/2/chunk-32", "alone/2/psiv-on"]
    assert at("ablate catalog gates psiv") == ["psiv_cache"]
    assert "demo" in at("ablate run d")
    assert at("ablate history hybrid-t") == ["hybrid-tiny"]
    assert at("ablate aa h2") == ["h200"]
    assert at("ablate nodes drain gpu-") == ["gpu-7", "gpu-8"]
    assert at("ablate ver") == ["verdict"]
    assert at("ablate admin tokens revoke adm") == ["admin"]


def test_the_shell_is_left_alone_where_nobody_answers(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ABLATE_TOKEN", "a-token-that-nobody-gave")
    get_client_settings.cache_clear()
    assert offered(api, monkeypatch, "ablate show la") == []


def test_gates_can_be_asked_for_by_name() -> None:
    gates = ablate("catalog", "gates", "psiv_cache", "compile", "--json")
    assert [row["name"] for row in json.loads(gates.out)] == ["psiv_cache", "compile"]
    done = ablate("catalog", "gates", "psiv_cach", "compil")
    assert (done.code, done.err.count("did you mean")) == (5, 2)


def test_a_reader_that_leaves_ends_a_command_quietly(api: Api, made: dict[str, str]) -> None:
    for words in (["catalog", "schema"], ["list", "--json"], ["--help"], ["show", "alone"]):
        process = start(api, *words)
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
        process.stderr.close()
        assert (process.wait(timeout=LIMIT_S), errors) == (141, ""), words


def test_json_is_one_document_or_a_line_for_everything_that_happens(api: Api, made: dict[str, str]) -> None:
    for words in (
        ["list"],
        ["show", "alone"],
        ["nodes"],
        ["catalog", "gates"],
        ["admin", "tokens", "list"],
        ["nodes", "calibration"],
    ):
        json.loads(ablate(*words, "--json").out)
    api.submit(ablation="to-watch", **EXACT)
    for name in made:
        api.cancel(made[name])
    for row in api.get("/v1/ablations?state=queued").json()["items"]:
        if row["name"] != "to-watch":
            api.cancel(row["id"])
    with answering(api, LESS_MEMORY):
        done = ablate("watch", "to-watch", "--json")
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.out.splitlines()]
    assert done.code == 0, done.err
    assert {len(line) for line in lines[:-1]} == {1}
    assert {kind for line in lines[:-1] for kind in line} == {"event"}
    assert lines[-1]["ablation"]["name"] == "to-watch"
    assert lines[-1]["verdict"]["variants"][0]["decision"] == "adopt"


def test_a_folder_without_a_token_says_where_it_looked_and_what_to_do(
    api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ABLATE_HOME", str(tmp_path / ".ablate"))
    monkeypatch.delenv("ABLATE_TOKEN")
    get_client_settings.cache_clear()
    words = ablate("list")
    url = str(api.client.base_url).rstrip("/")
    error = " ".join(words.err.split())
    assert words.code == 5
    assert f"nothing runs in {tmp_path / '.ablate'}; a service answers at {url}, but this folder has no token" in error
    assert "where `ablate up` was run, or set ABLATE_HOME or ABLATE_TOKEN" in error
    monkeypatch.setenv("ABLATE_TOKEN", "a-token-that-nobody-gave")
    get_client_settings.cache_clear()
    assert "this folder has no token" not in " ".join(ablate("list").err.split())
    monkeypatch.delenv("ABLATE_TOKEN")
    monkeypatch.setenv("ABLATE_URL", nobody_url())
    get_client_settings.cache_clear()
    gone = " ".join(ablate("list").err.split())
    assert "nothing listens there; check ABLATE_URL, or unset it and start a stack here with `ablate up`" in gone


def test_show_prints_the_trials_from_a_block_up_to_a_limit_and_says_where_the_rest_begins(made: dict[str, str]) -> None:
    whole = json.loads(ablate("show", "alone", "--json").out)
    assert list(whole) == ["ablation", "trials"]
    arms = len({trial["arm"] for trial in whole["trials"]})
    assert len(whole["trials"]) == arms * whole["ablation"]["blocks"]["planned"]
    later = json.loads(ablate("show", "alone", "--json", "--from-block", "2", "--limit", "3").out)["trials"]
    assert later == whole["trials"][arms : arms + 3]
    assert ablate("show", "alone", "--json", "--from-block", "99").out.endswith('"trials": []\n}\n')
    shown_text = " ".join(ablate("show", "alone", "--limit", str(arms)).out.split())
    assert "more trials: ablate show alone --from-block 2 (all of them: --json)" in shown_text
    assert whole["trials"][0]["id"] in shown_text
    assert whole["trials"][arms]["id"] not in shown_text
    assert "more trials" not in ablate("show", "alone").out
    for number in ("0", "99", "x"):
        error = " ".join(ablate("log", f"alone/{number}/baseline").err.split())
        assert f"has no block '{number}'; blocks: 1-{whole['ablation']['blocks']['planned']}" in error


def test_json_that_is_written_item_by_item_is_the_usual_document(made: dict[str, str]) -> None:
    text = ablate("show", "alone", "--json").out
    assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"

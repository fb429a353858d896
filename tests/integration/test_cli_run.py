"""`ablate run` and `ablate watch` from start to end, against a real service: exit codes, streams, detaching."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ablate.service.client.api import Client, Refused, StillRunning
from tests.answering import EXACT, LESS_MEMORY, answering
from tests.api_stack import ADMIN, Api, api_fixture, served_api
from tests.cli import ablate, speaking_to, start
from tests.factories import spec_values
from tests.waiting import LIMIT_S

ASKING = (("plan",), ("run", "--detach"), ("run",))
"""Commands that say what is doubtful about a spec."""

api = api_fixture(served_api, kinds=["sqlite"], scope="module")


@pytest.fixture(autouse=True)
def _spoken_to(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with speaking_to(api, monkeypatch):
        yield


@pytest.fixture
def client(api: Api) -> Iterator[Client]:
    with Client(str(api.client.base_url), ADMIN) as made:
        yield made


def written(folder: Path, name: str, **changes: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec_values(ablation=name, **{**EXACT, **changes})), encoding="utf-8")
    return path


def test_run_requires_a_decision_and_writes_the_comment(api: Api, tmp_path: Path) -> None:
    comment = tmp_path / "verdict.md"
    with answering(api, LESS_MEMORY):
        done = ablate("run", written(tmp_path, "good"), "--require", "adopt", "--markdown", comment)
        assert (done.code, "on answerer" in done.out) == (0, True), done.err
        assert ablate("verdict", "good", "--require", "same").code == 6, "adopt is none of what was required"
        assert ablate("verdict", "good").code == 0
    assert comment.read_text(encoding="utf-8").startswith("**Required of every variant: adopt. Met.**")
    with answering(api):
        path = written(tmp_path, "useless")
        assert ablate("run", path, "--require", "adopt").code == 2
        assert ablate("run", path, "--idempotency-key", "k-1").code == 0, "a verdict, and no decision was required"
        again = ablate("run", path, "--idempotency-key", "k-1", "--json")
    lines = [json.loads(line) for line in again.out.splitlines()]
    assert [list(line) for line in (lines[0], lines[1], lines[-1])] == [
        ["accepted"],
        ["event"],
        ["ablation", "verdict"],
    ]
    assert (
        lines[0]["accepted"]["id"]
        == lines[-1]["ablation"]["id"]
        == api.get("/v1/ablations:find?name=useless").json()["id"]
    )


def test_a_budget_that_is_too_small_is_told_by_plan_submit_and_run(api: Api, tmp_path: Path) -> None:
    path = written(tmp_path, "dear", limits={"device_minutes": 0.001})
    with answering(api):
        ablate("run", path)
        again = [ablate(*words, path) for words in ASKING]
        as_json = [ablate(*words, path, "--json").out.splitlines() for words in ASKING]
    documents = [json.loads("\n".join(as_json[0])), json.loads("\n".join(as_json[1]))]
    documents.append(json.loads(as_json[2][0])["accepted"])
    ((warning,), *others) = (document["warnings"] for document in documents)
    assert "limits.device_minutes allows 0.001: blocks that still wait" in warning
    assert others == [[warning], [warning]]
    assert [f"warning: {warning}" in " ".join(done.out.split()) for done in again] == [True] * 3


def test_submit_warns_that_no_node_can_take_it_in_the_words_of_what_waits(api: Api, tmp_path: Path) -> None:
    path = written(tmp_path, "nowhere", placement={"node_class": "tpu-v6e"}, baseline={"gates": {"lane": "xla"}})
    words = "it waits for a live node of class 'tpu-v6e'; none has registered yet"
    first, then = ablate("run", path, "--detach"), json.loads(ablate("run", path, "--json", "--detach").out)
    assert f"warning: {words}" in " ".join(first.out.split())
    assert then["warnings"] == [words]
    shown = json.loads(ablate("show", then["id"], "--json").out)["ablation"]
    assert f"it waits for {shown['waiting_for']}" == words
    ablate("cancel", then["id"])


def test_an_ablation_that_was_cancelled_is_an_error(api: Api, tmp_path: Path, client: Client) -> None:
    made = client.ablations.submit(written(tmp_path, "in-vain"))
    assert ablate("cancel", made.id).code == 0
    done = ablate("watch", "in-vain")
    assert (done.code, "was cancelled" in done.out) == (5, True)
    assert client.ablations.wait("in-vain").state == "cancelled"


def test_leaving_is_told_by_its_own_code_and_cancels_nothing(api: Api, tmp_path: Path, client: Client) -> None:
    process = start(api, "run", written(tmp_path, "long"))
    assert process.stdout is not None
    while "waits for" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, "Come back: ablate watch" in err) == (130, True), err
    assert client.ablations.find("long").state == "queued"
    with pytest.raises(StillRunning, match=r"not over after 0\.1 s; it goes on"):
        client.ablations.wait("long", timeout_s=0.1)
    client.ablations.cancel(client.ablations.id_of("long"))


def test_the_client_takes_a_path_waits_and_names_every_problem(api: Api, tmp_path: Path, client: Client) -> None:
    path = written(tmp_path, "from-a-file")
    assert client.ablations.plan(str(path)).ablation == "from-a-file"
    with answering(api, LESS_MEMORY):
        row = client.ablations.wait(client.ablations.submit(path).id, timeout_s=240)
    assert (row.state, client.ablations.verdict(row.id).variants[0].decision) == ("completed", "adopt")
    wrong = written(tmp_path, "wrong", seed=1, variants={"a": {"gates": {"chunk_siz": 16, "psiv_cach": True}}})
    with pytest.raises(Refused) as refusal:
        client.ablations.submit(wrong)
    message = str(refusal.value)
    assert len(refusal.value.problem.errors) == 3
    for entry in refusal.value.problem.errors:
        assert f"{entry.pointer}: {entry.detail}" in message
    with pytest.raises(FileNotFoundError):
        client.ablations.submit(tmp_path / "nowhere.yaml")

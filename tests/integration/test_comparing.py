"""`ablate.compare` and `ablate.answer` in this process: against a real API, and with real trials without a service."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ablate
from ablate.experiments.records.receipt_check import verify_signed
from ablate.experiments.system.processes import descendants_of
from ablate.service.cli import comparing
from ablate.service.client.settings import get_client_settings
from tests.answering import answering
from tests.api_stack import SIGNER, Api, api_fixture, nobody_url, served_api
from tests.bundles import make_bundle, make_file, write_folder
from tests.cli import ablate as command
from tests.cli import speaking_to
from tests.programs import write_program
from tests.waiting import until

api = api_fixture(served_api, kinds=["sqlite"], scope="module")
PROGRAM = """
import sys, time
if "--fails" in sys.argv: sys.exit("no such option")
time.sleep(float(sys.argv[2]))
print(f"METRIC val_loss={2.0 + int(sys.argv[1]) % 97 / 1000 - 0.5 * ('--lr' in sys.argv)}")
"""
"""A program of a seed and of seconds, which prints a loss that --lr makes smaller."""
COMMAND = "python train.py {seed} 0"
ASKED: dict[str, Any] = {"variants": {"faster": {"args": ["--lr", "2e-3"]}}, "check": False}


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the program, in which no service is named."""
    monkeypatch.chdir(write_program(tmp_path / "lab", PROGRAM))
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    get_client_settings.cache_clear()
    yield
    get_client_settings.cache_clear()


@pytest.fixture
def served(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """The API, to which this process speaks."""
    with speaking_to(api, monkeypatch):
        yield api


def waiting(api: Api) -> list[str]:
    """The ids of the ablations that are not over, of any earlier test none."""
    return [row["id"] for row in api.get("/v1/ablations?state=queued").json()["items"]]


def test_a_service_answers_and_what_it_ran_can_be_repeated(served: Api) -> None:
    with answering(served, {"faster": {"step_s": 0.01}}, reports=True):
        answer = ablate.compare(COMMAND, metric="tokens_per_s", placement={"node_class": "cpu"}, **ASKED)
        page = answer.report
        (row,) = [one for one in served.get("/v1/ablations").json()["items"] if one["name"] == "compare-faster"]
        again = ablate.answer("compare-faster")
        spec = Path("again.yaml")
        spec.write_text(answer.spec)
        repeated = command("run", str(spec), "--json")
    assert answer.verdict.model_dump(mode="json") == served.get(f"/v1/ablations/{row['id']}/verdict").json()
    (frame,) = [one for one in answer.rows if one["decides"]]
    assert (frame["metric"], round(frame["effect_pct"])) == ("tokens_per_s", 100)
    assert repr(answer).startswith(command("verdict", row["id"]).out.rstrip())
    assert set(answer.receipts) == {f"{block}/{arm}" for block in range(1, 7) for arm in ("baseline", "faster")}
    assert [verify_signed(one)[0] for one in answer.receipts.values()] == [[]] * len(answer.receipts)
    assert page.startswith("<!doctype html>")
    assert (again.verdict, list(again.receipts)) == (answer.verdict, list(answer.receipts))
    assert "archive" in again.spec, "the stored spec names the code that was sent"
    assert repeated.code == 0, repeated.err
    asked = json.loads(repeated.out.splitlines()[0])["accepted"]
    assert asked["rule_digest"] == answer.verdict.rule_digest


def test_an_interrupt_cancels_the_ablation(served: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    threading.Timer(1.0, lambda: until(lambda: waiting(served)) and os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ablate.compare(COMMAND, placement={"node_class": "cpu"}, **ASKED)
    assert waiting(served) == []
    assert served.get("/v1/ablations:find?name=latest").json()["state"] == "cancelled"
    with pytest.raises(ablate.NotCompared, match="was cancelled; its measurements are kept: ablate show abl_"):
        ablate.answer("latest")


def test_a_service_that_is_lost_leaves_the_ablation_and_the_way_back(
    served: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_client: Any, _ablation: str, _console: Any) -> None:
        with comparing.Client(nobody_url()) as nobody:
            nobody.nodes()

    monkeypatch.setattr(comparing, "follow", lost)
    with pytest.raises(ablate.NotCompared, match=r"no answer from (?s:.*)goes on; come back: ablate\.answer\('abl_"):
        ablate.compare(COMMAND, placement={"node_class": "cpu"}, **ASKED)
    (left,) = waiting(served)
    assert served.cancel(left).is_success


@pytest.mark.parametrize("call", ["compare", "answer"])
def test_a_service_that_does_not_answer_is_named(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ABLATE_URL", nobody_url())
    get_client_settings.cache_clear()
    asks: Callable[[], Any] = {
        "compare": lambda: ablate.compare(COMMAND, **ASKED),
        "answer": lambda: ablate.answer("latest"),
    }[call]
    with pytest.raises(ablate.NotCompared, match=r"no answer from http://127.*; check ABLATE_URL, or unset it"):
        asks()


def test_a_token_that_may_not_run_code_is_refused_and_nothing_is_sent(
    served: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ABLATE_TOKEN", served.token("reader", "submit")["Authorization"].removeprefix("Bearer "))
    get_client_settings.cache_clear()
    with pytest.raises(ablate.NotCompared, match="scope"):
        ablate.compare(COMMAND, **ASKED)
    assert waiting(served) == []


def test_a_name_that_nothing_has_is_refused(served: Api) -> None:
    with pytest.raises(ablate.NotCompared, match="no-such-ablation"):
        ablate.answer("no-such-ablation")


def test_a_bundle_is_judged_here(tmp_path: Path) -> None:
    bundle = write_folder(make_bundle(make_file(), signer=SIGNER), tmp_path / "bundle")
    answer = ablate.answer(bundle)
    assert repr(answer).startswith(command("verdict", bundle).out.rstrip())
    assert answer.report == command("report", bundle, "-o", "-").out.rstrip("\n")
    assert answer.spec == make_file().spec_text
    receipts = {f"{int(path.parts[-3])}/{path.parts[-2][2:]}": path for path in bundle.glob("blocks/*/*/receipt.json")}
    assert answer.receipts == {name: json.loads(path.read_text()) for name, path in receipts.items()}


def test_without_a_service_the_trials_run_here_and_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before, others = sorted(Path().iterdir()), descendants_of([os.getpid()])
    answer = ablate.compare(
        COMMAND,
        variants=ASKED["variants"],
        metric="val_loss",
        margin="0.5%",
        check=False,
        placement={"node_class": "cpu"},
    )
    (row,) = [one for one in answer.rows if one["decides"]]
    assert (row["verdict"], row["decision"], row["blocks"]) == ("better", "adopt", 6)
    losses = {name: one["program"]["reported"]["val_loss"] for name, one in answer.receipts.items()}
    effects = [100 * (losses[f"{block}/faster"] / losses[f"{block}/baseline"] - 1) for block in range(1, 7)]
    assert min(effects) <= row["effect_pct"] <= max(effects)
    assert [verify_signed(one)[0] for one in answer.receipts.values()] == [[]] * len(answer.receipts)
    assert "nobody counts the question" in capsys.readouterr().err
    assert sorted(Path().iterdir()) == before
    assert set(descendants_of([os.getpid()])) <= set(others), "of servers for other tests"


def test_a_baseline_that_fails_is_named_and_an_interrupt_ends_every_trial() -> None:
    others = descendants_of([os.getpid()])
    with pytest.raises(ablate.NotCompared, match=r"the baseline does not train.*no such option"):
        ablate.compare(COMMAND, baseline={"args": ["--fails"]}, placement={"node_class": "cpu"}, **ASKED)
    asked = threading.Thread(target=lambda: until(sleeps) and os.kill(os.getpid(), signal.SIGINT))
    asked.start()
    with pytest.raises(KeyboardInterrupt):
        ablate.compare("python train.py {seed} 600", placement={"node_class": "cpu"}, **ASKED)
    asked.join()
    assert set(descendants_of([os.getpid()])) <= set(others), "of servers for other tests"


def sleeps() -> bool:
    """Return whether a trial of this process runs the program."""
    commands = (Path(f"/proc/{pid}/cmdline") for pid in descendants_of([os.getpid()]))
    return any(path.exists() and b"\x00600\x00" in path.read_bytes() for path in commands)

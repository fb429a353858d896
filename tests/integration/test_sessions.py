"""Sessions through the real API on both databases: levels, incumbents, simultaneous proposals and refusals."""

import html
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update

from ablate.experiments.analysis.proposals import with_kept
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import seeds_of
from ablate.experiments.design.power import session_level
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.code_archive import pack_code
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.lifecycle import OutboxKind
from ablate.service.routes import sessions
from ablate.service.store.ablations import sessions as store
from ablate.service.store.blocks.block_wire import plan_of
from ablate.service.store.tables import ablations, proposals
from ablate.service.submitting import accepted
from tests.answering import report
from tests.api_stack import BOTH, Api, api_fixture, running_api
from tests.calibrations import aa_text
from tests.factories import GIB, command_values, spec_values
from tests.waiting import LIMIT_S
from tests.web_pages import Person

MEMORY = {"metric": "peak_allocated_gib", "margin": "0%", "adopt_if": "1%"}
"""An exact metric: its proposals need no A/A blocks."""
GATES = {"psiv-on": {"gates": {"psiv_cache": True}}}
VARIANT = {"variants": GATES}

api = api_fixture()


def values_of(**changes: Any) -> dict[str, Any]:
    return spec_values(**{**VARIANT, "verdict__primary": MEMORY, "design__seeds": [1], **changes})


def post(api: Api, path: str, values: Any, *, key: str = "", headers: dict[str, str] | None = None) -> httpx.Response:
    headers = {**(headers or api.admin), "Idempotency-Key": key or f"key-{path}-{threading.get_ident()}-{id(values)}"}
    if isinstance(values, str):
        kind = {"Content-Type": "application/yaml"}
        return api.client.post(f"/v1/sessions/{path}", content=values, headers={**headers, **kind})
    return api.client.post(f"/v1/sessions/{path}", json=values, headers=headers)


def opened(api: Api, name: str = "night", **changes: Any) -> dict[str, Any]:
    answer = post(api, f"{name}:open", values_of(**changes))
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def shown(api: Api, name: str = "night") -> dict[str, Any]:
    answer = api.get(f"/v1/sessions/{name}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def proposal_of(spec: str, **variant: Any) -> dict[str, Any]:
    """The incumbent's spec with another variant."""
    values = parse_spec(spec.encode(), "application/yaml").model_dump(mode="json")
    return {**values, "variants": variant}


_keys = iter(range(10**9))


def tried(api: Api, values: Any, name: str = "night") -> dict[str, Any]:
    answer = post(api, f"{name}:try", values, key=f"try-{next(_keys)}")
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def finish(api: Api, **arms: dict[str, Any]) -> None:
    """Report every block that waits, its arms changed as in make_receipt, and judge."""
    node = api.register()
    while block := api.claim(node):
        report(api, block, node, arms)
    judge(api)


def judge(api: Api) -> None:
    while OutboxHandlers(api.store).run_due(OutboxKind.JUDGE):
        pass


def problems(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 422, answer.text
    return {entry["pointer"]: f"{entry['detail']} ({entry['hint']})" for entry in answer.json()["errors"]}


def test_a_session_goes_from_proposal_to_proposal(api: Api) -> None:
    begun = opened(api)
    assert (begun["state"], begun["incumbent"], begun["proposals"]) == ("open", 0, 0)
    assert begun["next_level"] == session_level(1)

    worse = tried(api, begun["spec"])
    assert (worse["number"], worse["level"], worse["incumbent"]) == (1, session_level(1), 0)
    finish(api, **{"psiv-on": {"peak_bytes": 2 * GIB}})
    assert (shown(api)["path"][0]["outcome"], shown(api)["next_level"]) == ("discard", session_level(2))

    better = tried(api, proposal_of(begun["spec"], less={"gates": {"chunk_size": 32}}))
    assert better["level"] == session_level(2)
    assert shown(api)["running"] == better["accepted"]["id"]
    finish(api, less={"peak_bytes": GIB // 2})
    after = shown(api)
    assert (after["incumbent"], after["kept"], after["running"]) == (2, 1, None)
    assert after["next_level"] == session_level(3, [2]) > session_level(3)
    assert parse_spec(after["spec"].encode(), "application/yaml").baseline.gates == {"chunk_size": 32}
    whole = parse_spec(after["whole"].encode(), "application/yaml")
    assert (whole.baseline.gates, whole.variants["incumbent"].gates) == ({"chunk_size": 16}, {"chunk_size": 32})
    assert (begun["whole"], whole.verdict.session) == (None, None)

    third = tried(api, proposal_of(after["spec"], both=GATES["psiv-on"]))
    assert (third["incumbent"], third["level"]) == (2, session_level(3, [2]))
    baseline = api.get(f"/v1/ablations/{third['accepted']['id']}/spec").json()["text"]
    assert parse_spec(baseline.encode(), "application/yaml").baseline.gates == {"chunk_size": 32}
    api.cancel(third["accepted"]["id"])
    path = shown(api)["path"]
    assert [(one["outcome"], one["level"]) for one in path] == [
        ("discard", session_level(1)),
        ("keep", session_level(2)),
        ("undecided", session_level(3, [2])),
    ]
    assert shown(api)["next_level"] == session_level(4, [2]), "a cancelled proposal has spent its level"


def test_a_proposal_that_breaks_spends_its_level(api: Api) -> None:
    spec = opened(api)["spec"]
    made = tried(api, spec)
    node = api.register()
    while block := api.claim(node):
        api.attempt(block, "report", failure_class=FailureClass.USER_ERROR, message="x")
    judge(api)
    (one,) = shown(api)["path"]
    assert (one["state"], one["outcome"]) == ("failed", "undecided")
    verdict = api.get(made["accepted"]["links"]["verdict"]).json()
    assert any(note.startswith("proposal 1 of session 'night'") for note in verdict["variants"][0]["notes"])
    assert tried(api, spec)["level"] == session_level(2)


def test_simultaneous_proposals_take_one_level_only(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them have read the session's turn before the first of them stores anything."""
    spec, answers, barrier = opened(api)["spec"], [], threading.Barrier(4)

    def together(*arguments: Any) -> Any:
        barrier.wait(timeout=LIMIT_S)
        return accepted(*arguments)

    monkeypatch.setattr(sessions, "accepted", together)
    api.client.app.state.services.long_threads.total_tokens = 4  # type: ignore[attr-defined]  # as in four processes

    def propose(number: int) -> None:
        answers.append(post(api, "night:try", spec, key=f"at-once-{number}"))

    threads = [threading.Thread(target=propose, args=(number,)) for number in range(barrier.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status_code for answer in answers) == [202, 409, 409, 409]
    refused = {answer.json()["detail"] for answer in answers if answer.status_code == 409}
    assert all("came first; send this one again" in one or "is queued" in one for one in refused), refused
    assert [one["number"] for one in shown(api)["path"]] == [1]
    with api.store.read() as connection:
        counts = [connection.scalar(select(func.count()).select_from(table)) for table in (ablations, proposals)]
    assert counts == [1, 1], "a refused proposal leaves no ablation"


def test_the_same_key_gives_the_same_proposal_and_no_other_request(api: Api) -> None:
    spec = opened(api)["spec"]
    first, again = (post(api, "night:try", spec, key="mine") for _ in range(2))
    assert (first.status_code, again.json()) == (202, first.json())
    opened(api, "day")
    assert post(api, "day:try", spec, key="mine").status_code == 422
    headers = {**api.admin, "Idempotency-Key": "mine", "Content-Type": "application/yaml"}
    assert api.client.post("/v1/ablations", content=spec, headers=headers).status_code == 422
    assert [one["proposals"] for one in api.get("/v1/sessions").json()["items"]] == [0, 1]


def test_what_must_stay_in_a_session_is_named_with_its_place(api: Api) -> None:
    opened(api)
    step_s = {"metric": "step_s", "margin": "1%", "adopt_if": "2%"}
    wrong = values_of(verdict__primary=step_s, placement__node_class="h100", baseline={"gates": {"chunk_size": 32}})
    problem_of = problems(post(api, "night:try", wrong))
    assert set(problem_of) == {
        *(f"#/verdict/primary/{name}" for name in ("metric", "margin", "adopt_if")),
        "#/placement/node_class",
        "#/baseline/gates/chunk_size",
    }
    assert "session 'night' has 'peak_allocated_gib' here; given: 'step_s'" in problem_of["#/verdict/primary/metric"]
    assert "session 'night' has 'cpu' here; given: 'h100'" in problem_of["#/placement/node_class"]
    assert "ablate sessions spec night" in problem_of["#/baseline/gates/chunk_size"]
    two = values_of(variants={**GATES, "less": {"gates": {"chunk_size": 32}}})
    assert "given: 2 (psiv-on, less)" in problems(post(api, "night:try", two))["#/variants"]
    same = values_of(variants={"same": {"gates": {"chunk_size": 16}}})
    assert "same configuration as the baseline" in problems(post(api, "night:try", same))["#/variants/same"]
    chosen = values_of(verdict__session={"name": "night", "proposal": 1, "kept": [], "level": 0.1})
    assert "#/verdict/session" in problems(post(api, "night:try", chosen))
    assert "#/verdict/session" in problems(post(api, "other:open", chosen))
    assert shown(api)["path"] == []


def test_unknown_closed_taken_and_foreign_sessions_are_refused(api: Api) -> None:
    spec = opened(api)["spec"]
    unknown = post(api, "nigth:try", spec)
    assert (unknown.status_code, unknown.json()["detail"]) == (
        404,
        "there is no session 'nigth'; did you mean 'night'?",
    )
    assert "ablate sessions open x SPEC" in api.get("/v1/sessions/x").json()["detail"]
    assert post(api, "night:open", values_of()).status_code == 201, "the same again changes nothing"
    assert post(api, "night:open", values_of(ablation="other")).status_code == 409
    other = api.token("other", "submit")
    assert post(api, "night:try", spec, headers=other).json()["type"].endswith(":not-owner")
    assert post(api, "night:close", {}, headers=other).status_code == 403
    for _ in range(2):
        assert post(api, "night:close", {}).json()["state"] == "closed"
    closed = post(api, "night:try", spec)
    assert (closed.status_code, closed.json()["detail"]) == (409, "session 'night' is closed; it takes no proposals")


def test_a_session_keeps_a_limited_number(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = opened(api)["spec"]
    monkeypatch.setattr(store, "MAX_KEPT", 0)
    refused = post(api, "night:try", spec)
    assert (refused.status_code, "open another" in refused.json()["detail"]) == (409, True)


def measure_noise(api: Api, like: str, *, blocks: int) -> None:
    """Run an A/A ablation whose repeats are faster and slower in turn."""
    text = aa_text(parse_spec(like.encode(), "application/yaml"), blocks=blocks)
    headers = {**api.admin, "Content-Type": "application/yaml", "Idempotency-Key": f"aa-{next(_keys)}"}
    assert api.client.post("/v1/ablations", content=text, headers=headers).status_code == 202
    node = api.register()
    while block := api.claim(node):
        report(api, block, node, {"repeat": {"tokens_per_s": 5000 + 10 * (-1) ** block["block_index"]}})
    judge(api)


def test_a_proposal_whose_noise_nobody_will_measure_is_refused_before_it_spends(tmp_path: Path) -> None:
    rule = spec_values()["verdict"]["primary"]
    with running_api("sqlite", tmp_path, control_every=0) as api:
        advice = opened(api, verdict__primary=rule)["advice"]
        assert "0 of 20 A/A blocks are measured for tokens_per_s on cpu" in advice
        assert "Until then a proposal is refused below 6." in advice
        problem_of = problems(post(api, "night:try", values_of(verdict__primary=rule)))
        assert list(problem_of) == ["#/placement/node_class"]
        assert "there are none on node class cpu" in problem_of["#/placement/node_class"]
        assert "ablate sessions spec night > next.yaml; ablate aa cpu --like next.yaml: at least 6" in str(problem_of)
        assert shown(api)["next_level"] == session_level(1)

        measure_noise(api, shown(api)["spec"], blocks=6)
        advice = shown(api)["advice"]
        assert "6 of 20 A/A blocks" in advice
        assert "a proposal has wider intervals. To measure them now (about 2 device minutes)" in advice
        assert tried(api, values_of(verdict__primary=rule))["number"] == 1, "as many admit any ablation"


def test_a_session_whose_margin_is_small_beside_the_noise_says_so(tmp_path: Path) -> None:
    rule = spec_values()["verdict"]["primary"]
    with running_api("sqlite", tmp_path, control_every=0) as api:
        measure_noise(api, opened(api, verdict__primary=rule)["spec"], blocks=20)
        assert shown(api)["advice"] is None, "0.5 % is twice the noise of 0.2 %"
        advice = opened(api, "bold", verdict__primary={**rule, "margin": "0.1%"})["advice"]
        assert "The margin of 0.1 % is 0.49 standard deviations of a block's noise (0.21 %)" in advice
        assert "a margin from 0.15 % on protects" in advice


def test_a_proposal_measures_the_noise_that_nobody_measured(tmp_path: Path) -> None:
    rule = spec_values()["verdict"]["primary"]
    with running_api("sqlite", tmp_path, control_every=10) as api:
        advice = opened(api, verdict__primary=rule)["advice"]
        assert "a third arm that measures the noise, and wider intervals. To measure" in advice
        assert "now (40 trials): ablate sessions spec night > next.yaml; ablate aa cpu --like" in advice
        made = tried(api, values_of(verdict__primary=rule))
        assert made["accepted"]["plan"]["control"] == "control"
        api.cancel(made["accepted"]["id"])
        refused = problems(post(api, "night:try", values_of(verdict__primary=rule, design__blocks="auto")))
        assert "ablate aa cpu --like SPEC" in refused["#/design/blocks"]
        assert opened(api, "exact")["advice"] is None


def test_a_loss_needs_no_calibration_and_other_seeds_each_time(api: Api) -> None:
    loss = {"metric": "loss_val", "margin": "0.01 nats", "adopt_if": "0.02 nats"}
    spec = opened(api, verdict__primary=loss, design__seeds=6)["spec"]
    made = tried(api, spec)
    api.cancel(made["accepted"]["id"])
    again = tried(api, spec)
    first, second = ({*seeds_of(plan_of(api.store, one["accepted"]["id"]))} for one in (made, again))
    assert (len(first), len(second), first & second) == (6, 6, set())
    api.cancel(again["accepted"]["id"])
    listed = tried(api, values_of(verdict__primary=loss, design__seeds=[1, 2, 3, 4, 5, 6]))["accepted"]
    assert any("the seeds of its spec are not used" in one for one in listed["warnings"])
    assert {*range(1, 7)}.isdisjoint(seeds_of(plan_of(api.store, listed["id"])))


LOSS = {"metric": "loss_val", "margin": "0%"}


@pytest.mark.parametrize("changes", [{"purpose": "calibration"}, {"verdict__primary": LOSS}])
def test_what_cannot_open_a_session_is_refused(api: Api, changes: dict[str, Any]) -> None:
    assert problems(post(api, "night:open", values_of(**changes)))
    assert api.get("/v1/sessions").json() == {"items": []}
    assert post(api, "No_Name:open", values_of()).status_code == 422


def test_a_session_of_json_is_shown_as_yaml(api: Api) -> None:
    values = values_of()
    spec = opened(api)["spec"]
    assert not spec.startswith("{")
    assert parse_spec(spec.encode(), "application/yaml") == parse_spec(json.dumps(values).encode(), "application/json")


def test_the_pages_show_the_path_of_a_session(api: Api) -> None:
    person = Person.signed_in(api)
    assert "Nobody has opened a session" in person.get("/sessions").text
    begun = opened(api)
    assert "Nothing has been proposed yet" in person.get("/sessions/night").text
    kept = tried(api, begun["spec"])
    finish(api, **{"psiv-on": {"peak_bytes": GIB // 2}})
    running = tried(api, proposal_of(shown(api)["spec"], less={"gates": {"chunk_size": 32}}))
    page = " ".join(re.sub("<[^>]*>", " ", html.unescape(person.get("/sessions/night").text)).split())
    assert "1 of 2 proposals kept. The incumbent is proposal 1. The next proposal is tested at" in page
    assert "ablate sessions spec night --whole measures all of them again" in page
    newest, first = page.index("2 chunk_size 16 → 32 queued"), page.index("1 psiv_cache true ✓ keep better")
    assert "first baseline 1.3 %" in page
    assert newest < first
    assert "chunk_size: 16" in page, "the incumbent's spec"
    assert '<a href="/sessions/night">night</a>' in person.get("/sessions").text
    for one in (kept, running):
        assert '<a href="/sessions/night">Session night</a>' in person.get(f"/a/{one['accepted']['id']}").text
    assert person.get("/sessions/nihgt").status_code == 404


def sent(api: Api, folder: Path, **files: str) -> dict[str, str]:
    """Send a folder with these files; return it as a spec has it."""
    folder.mkdir()
    for name, content in files.items():
        folder.joinpath(f"{name}.py").write_text(content)
    packed = pack_code(folder)
    headers = {**api.admin, "Content-Type": "application/gzip"}
    content = b"".join(packed.pieces())
    answer = api.client.post("/v1/code:upload", params={"digest": packed.digest}, content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    return {"archive": packed.digest}


def judged(code: Any, judging: Any, proposal: Any) -> dict[str, Any]:
    evaluate = ["python", "judge.py"] if judging is None else {"command": ["python", "judge.py"], "code": judging}
    return command_values(
        workload__code=code,
        workload__evaluate=evaluate,
        workload__metrics={"val_loss": {"better": "lower"}},
        variants={"x": {"code": proposal} if proposal else {"args": ["1"]}},
        design__seeds=6,
        verdict__primary={"metric": "val_loss", "margin": "0.5%", "adopt_if": "1%"},
    )


@pytest.fixture(params=BOTH)
def uncalibrated(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Api]:
    """Yield a service that adds a control arm to a proposal without A/A blocks."""
    with running_api(request.param, tmp_path / "service", control_every=10) as own:
        yield own


def test_a_proposal_has_no_file_of_the_evaluation_that_its_session_hides(uncalibrated: Api, tmp_path: Path) -> None:
    api = uncalibrated
    judging = sent(api, tmp_path / "judging", judge="judge", answers="answers", shared="shared", __init__="")
    first = sent(api, tmp_path / "first", train="1", shared="shared")
    session = post(api, "night:open", judged(first, judging, None))
    assert session.status_code == 201, session.text
    for number, files in enumerate(({"copy": "answers"}, {"judge": "judge"}, {"a": "answers", "train": "2"})):
        own = sent(api, tmp_path / f"leak-{number}", **files)
        refused = post(api, "night:try", judged(first, judging, own), key=f"leak-{number}")
        assert refused.status_code == 422, refused.text
        (problem,) = refused.json()["errors"]
        assert problem["pointer"] == "#/variants/x/code"
        assert f"files of the protected evaluation ({next(iter(files))}.py)" in problem["detail"]
        assert "take them out of the folder" in problem["hint"]
    on_node = post(api, "night:try", judged(first, judging, str(tmp_path)), key="node")
    assert (on_node.status_code, "is on the node" in on_node.text) == (422, True)
    assert shown(api)["proposals"] == 0, "nothing is spent"
    fine = sent(api, tmp_path / "fine", train="2", shared="shared", __init__="", new="3")
    accepted_ = post(api, "night:try", judged(first, judging, fine), key="fine")
    assert accepted_.status_code == 202, accepted_.text


def test_a_session_that_hides_nothing_takes_a_proposal_that_goes_back(uncalibrated: Api, tmp_path: Path) -> None:
    """Once a proposal was kept, the evaluation's code is an older one of the program."""
    api = uncalibrated
    first = sent(api, tmp_path / "first", train="1", judge="judge")
    second = sent(api, tmp_path / "second", train="2", judge="judge")
    assert post(api, "night:open", judged(first, None, None)).status_code == 201
    assert post(api, "night:try", judged(first, None, second), key="one").status_code == 202
    with api.store.write() as connection:  # as `settle` leaves it
        kept = with_kept(shown(api)["spec"].encode(), spec_yaml(judged(first, None, second))).decode()
        connection.execute(update(proposals).values(outcome="keep"))
        connection.execute(update(store.sessions).values(spec_text=kept))
    assert post(api, "night:try", judged(second, first, first), key="two").status_code == 202

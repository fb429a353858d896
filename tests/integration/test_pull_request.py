"""`ablate pull-request` beside fakes of GitHub and GitLab, a real git server and a real service."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.reporting.terminal.markdown import MAX_CHARS
from ablate.service.cli.commands import pull_request as command
from ablate.service.cli.commits.forges import MARK
from tests.answering import answering, report
from tests.api_stack import Api, api_fixture, served_api
from tests.cli import speaking_to, start
from tests.forges.fakes import FakeGitHub, Trouble
from tests.forges.world import FORGES, NOISY, SPEC, VALUES, World, labels_of, world
from tests.repositories import git
from tests.waiting import until

api = api_fixture(served_api, kinds=["sqlite"], scope="module")
WORSE = {"pull-request": {"more_loss": 0.01}}
FINAL = {
    "github": {"success": "success", "failure": "failure", "neutral": "neutral", "cancelled": "cancelled"},
    "gitlab": {"success": "success", "failure": "failed", "neutral": "skipped", "cancelled": "canceled"},
}


@pytest.fixture(params=FORGES)
def lab(request: pytest.FixtureRequest, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(command, "_PATIENCE_S", 30.0)
    with speaking_to(api, monkeypatch), world(request.param, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def github(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(command, "_PATIENCE_S", 30.0)
    with speaking_to(api, monkeypatch), world("github", tmp_path, monkeypatch) as made:
        yield made


def final(lab: World, state: str) -> str:
    return FINAL["github" if isinstance(lab.forge, FakeGitHub) else "gitlab"][state]


@pytest.mark.parametrize(
    ("values", "changed", "state", "word"),
    [
        (VALUES, {}, "success", "not-worse. Met."),
        (VALUES, WORSE, "failure", "Not met: `pull-request` is worse"),
        (NOISY, {}, "neutral", "Not met: `pull-request` is inconclusive"),
    ],
    ids=["same", "worse", "inconclusive"],
)
def test_the_head_is_measured_beside_the_merge_base_and_the_verdict_is_reported(
    lab: World, api: Api, values: dict[str, Any], changed: dict[str, Any], state: str, word: str
) -> None:
    lab.set_spec(values)
    head = lab.forge.head
    (lab.job / "training" / "train.py").write_text("print('left in the checkout')\n")
    with answering(api, changed):
        done = lab.run()
    assert done.code == 0, done.err
    assert labels_of(api)[0] == {
        **{"commit.baseline": lab.merge_base, "commit.pull-request": head},
        "pull-request": "lab/trainer#7" if isinstance(lab.forge, FakeGitHub) else "lab/trainer!7",
    }
    assert lab.ends == [final(lab, state)]
    assert {commit for commit, _state, _title in lab.forge.states} == {head}
    assert lab.comment.startswith(f"{MARK}\n**Required of every variant: ")
    assert word in lab.comment
    assert f"`baseline` is commit {lab.merge_base[:12]}, `pull-request` is commit {head[:12]}" in lab.comment
    assert re.search(r"\[page\]\(http://127.0.0.1:\d+/a/abl_", lab.comment)


def test_the_spec_is_the_target_branchs_whatever_the_head_says(lab: World, api: Api) -> None:
    other = {**VALUES, "question": "Is this spec of the head?", "verdict": {"primary": {"metric": "loss_final"}}}
    lab.forge.head = lab.hosted.commit("Loosen", {SPEC: str(other)})
    lab.hosted.push(lab.forge.head, lab.reference, "refs/heads/faster")
    git(lab.job, "fetch", "-q", "origin", "faster")
    git(lab.job, "checkout", "-qf", lab.forge.head)
    with answering(api):
        assert lab.run().code == 0
    assert VALUES["question"] in lab.comment
    assert "Is this spec of the head?" not in lab.comment


def test_the_same_job_again_asks_nothing_twice_and_ablate_asks_anew(lab: World, api: Api) -> None:
    before = len(labels_of(api))
    with answering(api):
        variables = lab.pushed()
        assert [lab.run(variables).code, lab.run(variables).code] == [0, 0]
        assert len(labels_of(api)) == before + 1
        for words in ("", "", "--seeds 3,14 --blocks 4"):
            asked = lab.asked(words)
            assert [lab.run(asked).code, lab.run(asked).code] == [0, 0]
    rows = api.get("/v1/ablations?limit=500").json()["items"]
    assert len(rows) == before + 4
    assert rows[0]["blocks"]["planned"] == 4
    assert sum(text.startswith(MARK) for text in lab.forge.own) == 1


def test_the_place_in_the_queue_and_the_blocks_are_shown(lab: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_UPDATE_S", 0.0)
    shown: list[str] = []

    def has(text: str) -> bool:
        shown[:] = [title for _commit, _state, title in lab.forge.states] + lab.forge.own
        return any(text in one for one in shown)

    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(lab.run().code))
    thread.start()
    until(lambda: has("waits for "))
    node = api.register("slow", lanes={"command": None})
    block = api.claimed(node)
    until(lambda: has("0/2 blocks"))
    report(api, block, node, {})
    with answering(api):
        thread.join()
    assert ended == [0]


def test_our_comment_is_found_among_many_and_nobody_elses_is_touched(lab: World, api: Api) -> None:
    for number in range(130):
        lab.forge.say("ada", f"comment {number}")
    lab.forge.say("mallory", f"{MARK}\nfaked")
    lab.forge.say("ghost" if isinstance(lab.forge, FakeGitHub) else "gone", f"{MARK}\nof a deleted account")
    own = lab.forge.say(lab.forge.me, f"{MARK}\nan old verdict")
    for number in range(130):
        lab.forge.say("ada", f"later {number}")
    others = [dict(one) for one in lab.forge.comments if one["id"] != own]
    with answering(api):
        assert lab.run().code == 0
    assert [one for one in lab.forge.comments if one["id"] != own] == others
    assert "not-worse. Met." in lab.comment


@pytest.mark.parametrize("what", ["deleted", "edited", "mark removed"])
def test_a_comment_that_people_change_is_written_again(lab: World, api: Api, what: str) -> None:
    own = lab.forge.say(lab.forge.me, f"{MARK}\nold")
    if what == "deleted":  # between our look and our change
        update = "PATCH" if isinstance(lab.forge, FakeGitHub) else "PUT"
        lab.forge.troubles.append(Trouble(update, "(comments|notes)/", 404))
    else:
        lab.forge.comments[-1]["body"] = f"{MARK}\r\nmine now" if what == "edited" else "mine now"
    with answering(api):
        assert lab.run().code == 0
    texts = {one["id"]: one["body"] for one in lab.forge.comments}
    assert "not-worse. Met." in "".join(texts.values())
    assert sum("Met." in text for text in texts.values()) == 1
    assert len(texts) == (1 if what == "edited" else 2)
    assert what != "mark removed" or texts[own] == "mine now"


ROUTES = {"github": ("check-runs", "comments", "pulls/7"), "gitlab": ("statuses", "notes", "merge_requests/7$", "user")}


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (429, {"Retry-After": "1"}),
        (403, {"Retry-After": "1"}),
        (403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1"}),
        (409, {}),
        (500, {}),
        (503, {"Retry-After": "0"}),
    ],
    ids=["429", "403-retry", "403-limit", "409", "500", "503"],
)
def test_a_busy_forge_is_asked_again_at_every_request(
    lab: World, api: Api, status: int, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ablate.service.cli.commits.forges._PAUSE_S", 0.01)
    routes = ROUTES["github" if isinstance(lab.forge, FakeGitHub) else "gitlab"]
    lab.forge.troubles += [Trouble("GET", route, status, 2, dict(headers)) for route in routes]
    lab.forge.troubles += [Trouble("POST", route, status, 2, dict(headers)) for route in routes]
    with answering(api):
        done = lab.run()
    assert done.code == 0, done.err
    assert lab.ends == [final(lab, "success")]
    assert "Met." in lab.comment


def test_an_answer_that_is_lost_leaves_one_comment(lab: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ablate.service.cli.commits.forges._PAUSE_S", 0.01)
    lab.forge.troubles.append(Trouble("POST", "(comments|notes)$", 502, after_work=True))
    lab.forge.slow_s = 0.2
    with answering(api):
        assert lab.run().code == 0
    assert "Met." in lab.comment


@pytest.mark.parametrize(("status", "hint"), [(401, True), (403, True), (404, True), (422, False), (429, False)])
def test_a_forge_that_refuses_is_named_before_anything_is_submitted(
    lab: World, api: Api, status: int, hint: bool
) -> None:
    before = len(labels_of(api))
    headers = {"Retry-After": "3600"} if status == 429 else {}
    lab.forge.troubles.append(Trouble("POST", "check-runs|statuses", status, 9, headers))
    done = lab.run()
    assert done.code == 5
    assert f"answered {status}: trouble {status}" in done.err
    assert ("The token needs" in done.err) is hint
    assert len(labels_of(api)) == before


def test_a_progress_report_that_fails_ends_nothing(github: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_UPDATE_S", 0.0)
    github.forge.troubles.append(Trouble("PATCH", "check-runs", 500))
    api.register("none", node_class="h100", lanes={"command": None})
    thread = threading.Thread(target=github.run)
    thread.start()
    until(lambda: not github.forge.troubles)
    with answering(api):
        thread.join()
    assert github.ends == ["success"]


def test_a_status_that_a_killed_job_left_pending_goes_on(api: Api, tmp_path: Path, monkeypatch: Any) -> None:
    with speaking_to(api, monkeypatch), world("gitlab", tmp_path, monkeypatch) as lab, answering(api):
        variables = lab.pushed()
        lab.forge.current[lab.forge.head, variables["CI_PIPELINE_ID"]] = "pending"  # type: ignore[attr-defined]
        assert lab.run(variables).code == 0
        assert lab.ends == ["success"]


def test_a_newer_head_cancels_the_older_and_keeps_the_comment(lab: World, api: Api) -> None:
    old = lab.forge.head
    first = lab.pushed()
    older = start(api, "pull-request", SPEC, cwd=lab.job, **first)
    until(lambda: lab.forge.own)
    new = lab.push(f"print('newer', {lab.folder.name!r})\n")
    newer = start(api, "pull-request", SPEC, cwd=lab.job, **lab.pushed())
    older.communicate()
    assert older.returncode == 5
    with answering(api):
        newer.communicate()
    assert newer.returncode == 0
    assert (old, final(lab, "cancelled"), "cancelled") in lab.forge.states
    assert f"commit {new[:12]}" in lab.comment


def test_a_late_verdict_on_an_old_head_stays_out_of_the_comment(lab: World, api: Api) -> None:
    old, variables = lab.forge.head, lab.pushed()
    lab.push(f"print('newer', {lab.folder.name!r})\n")
    git(lab.job, "fetch", "-q", "origin", old)
    with answering(api):
        assert lab.run(variables).code == 0
    assert lab.ends == [final(lab, "success")]
    assert {commit for commit, _state, _title in lab.forge.states} == {old}
    assert "Met." not in lab.comment


def test_a_job_that_is_ended_says_so(lab: World, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_measure", end)
    assert lab.run().code == 130
    assert lab.ends == [final(lab, "cancelled")]
    assert "run again" in lab.forge.states[-1][2]


def test_a_cancelled_ablation_has_no_verdict(lab: World, api: Api) -> None:
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(lab.run().code))
    thread.start()
    until(lambda: lab.forge.own)
    api.cancel(api.get("/v1/ablations?limit=1").json()["items"][0]["id"])
    thread.join()
    assert ended == [5]
    assert lab.ends == [final(lab, "cancelled")]


PLANTED = "it's no mapping: ["
WRONG_SPECS: dict[str, Any] = {
    "no file": None,
    "no variant's code": {**VALUES, "workload": {**VALUES["workload"], "code": "/srv/code"}},
    "variants": {**VALUES, "variants": ["a"]},
    "workload": {**VALUES, "workload": "train.py"},
    "refused": {**VALUES, "seed": 1},
}


@pytest.mark.parametrize("what", WRONG_SPECS)
def test_a_wrong_spec_is_told_in_check_and_comment(github: World, api: Api, what: str) -> None:
    before = len(labels_of(api))
    if WRONG_SPECS[what] is None:
        git(github.hosted.person, "checkout", "-q", "main")
        git(github.hosted.person, "rm", "-q", SPEC)
        github.forge.base = github.hosted.commit("Remove it", {"other": ""})
        github.hosted.push(github.forge.base, "refs/heads/main")
    else:
        github.set_spec(WRONG_SPECS[what])
    done = github.run()
    assert done.code == 5
    assert github.ends == ["failure"]
    assert "**No verdict on " in github.comment
    assert {"no file": "merge the spec first", "variants": "no mapping", "refused": "seed"}.get(what, "workload") in (
        github.comment
    )
    assert len(labels_of(api)) == before


def test_a_shallow_checkout_says_what_to_type(lab: World, tmp_path: Path) -> None:
    lab.job = lab.hosted.checkout(tmp_path / "shallow", "main", "--depth", "1")
    done = lab.run()
    assert done.code == 5
    for word in ("shallow", "`fetch-depth: 0`", "GIT_DEPTH to 0"):
        assert word in done.err
        assert word in lab.comment


def test_histories_without_a_start_are_refused(lab: World) -> None:
    lab.forge.head = lab.forge.base
    assert "in the target branch already" in lab.run().err
    git(lab.hosted.person, "checkout", "-q", "--orphan", "alone")
    lab.forge.head = lab.hosted.commit("Another root", {"training/train.py": "print()"})
    lab.hosted.push(lab.forge.head, lab.reference)
    assert "no commit in common" in lab.run().err
    lab.forge.head = "1" * 40
    assert "cannot be fetched from origin" in lab.run().err


def test_a_head_that_changes_no_code_is_not_measured(lab: World, api: Api) -> None:
    before = len(labels_of(api))
    git(lab.hosted.person, "checkout", "-q", "-b", "words", lab.merge_base)
    lab.forge.head = lab.hosted.commit("Write about it", {"notes.md": "It trains.\n"})
    lab.hosted.push(lab.forge.head, lab.reference)
    done = lab.run()
    assert done.code == 0, done.err
    assert lab.ends == [final(lab, "neutral")]
    assert f"Commit {lab.forge.head} has the files of its merge base" in lab.comment
    assert len(labels_of(api)) == before


def test_a_comment_fits_the_forge(github: World) -> None:
    """The mark comes on top of the longest text, and the check has a limit of its own."""
    assert MAX_CHARS + len(MARK) + 1 <= 65_536
    assert MAX_CHARS <= 65_535


def test_elsewhere_the_command_says_what_to_type(monkeypatch: pytest.MonkeyPatch, github: World) -> None:
    done = github.run({"GITHUB_ACTIONS": "", "GITLAB_CI": ""})
    assert done.code == 5
    assert "no job of GitHub Actions or GitLab CI" in done.err
    for name in ("GITHUB_TOKEN", "GITHUB_EVENT_PATH", "GITHUB_API_URL"):
        assert f"{name} is not set" in github.run({**github.pushed(), name: ""}).err

"""Claims, leases, reports and cancellation, on SQLite and on PostgreSQL."""

import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.bundle import breaks, used_up_by
from ablate.experiments.retries import final_failures
from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.background.reconciler import Reconciler
from ablate.service.lifecycle import OutboxKind
from ablate.service.store.ablations.results import ablation_view
from ablate.service.store.blocks.attempts import broken_attempts
from ablate.service.store.nodes.nodes import heartbeats
from ablate.service.store.questions.circumstances import circumstances_of
from ablate.service.store.tables import attempts, blocks, db_now, events, outbox, receipts
from ablate.workers.errors import ApiUnreachable, StaleLease
from ablate.workers.leases.service_api import ServiceApi
from ablate.workers.leases.supervisor import ServiceNode
from tests.api_stack import Api, receipts_of, running_api
from tests.bundles import broken_attempt, make_file
from tests.factories import command_values, spec_values


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with running_api(request.param, tmp_path_factory.mktemp("claim")) as api:
        yield api


@pytest.fixture
def api(running: Api) -> Iterator[Api]:
    yield running
    for item in running.get("/v1/ablations?limit=500&state=queued&state=running").json()["items"]:
        running.cancel(item["id"])
    expire(running)


def expire(api: Api) -> int:
    """Let every lease run out and the reconciler see it."""
    with api.store.write() as connection:
        connection.execute(update(blocks).where(blocks.c.state == "running").values(lease_until=db_now() - 1))
    return Reconciler(api.store).expire_leases()


def ready(api: Api) -> None:
    """Let the pause before every retry be over."""
    with api.store.write() as connection:
        connection.execute(update(blocks).values(not_before=0.0, avoid_until=0.0))


def state_of(api: Api, ablation_id: str) -> dict[str, Any]:
    return dict(api.get(f"/v1/ablations/{ablation_id}").json())


def test_claim_gives_the_block_that_a_plan_file_gives(api: Api) -> None:
    file = make_file(limits={"trial": "90s"})
    made = api.submit(limits={"trial": "90s"})
    node = api.register()
    for index in range(6):
        block = api.claimed(node)
        theirs = file.claimed(index, attempt_id=block["attempt_id"], attempt_no=1).model_dump(mode="json")
        places = range(len(block["trials"]))
        for place, here, there in zip(places, block["trials"], theirs["trials"], strict=True):
            assert here["trial_id"] != there["trial_id"] == file.blocks[index].trial_ids[place]
            assert {**here, "trial_id": ""} == {**there, "trial_id": ""}
        for field in ("block_index", "seed", "ablation_name", "spec_digest", "rule_digest"):
            assert block[field] == theirs[field]
    assert state_of(api, made["id"])["state"] == "running"


def test_claim_nothing_for_another_node_class_or_an_empty_queue(api: Api) -> None:
    assert api.claim(api.register()) is None
    api.submit()
    assert api.claim(api.register("gpu", "h200")) is None
    answer = api.client.post("/v1/blocks:claim", headers=api.worker, json={"node_id": "nod_nobody"})
    assert answer.status_code == 404


CLAIM = "A" * 22


def test_a_claim_whose_answer_was_lost_returns_the_same_attempt_again(api: Api) -> None:
    made = api.submit()
    node = api.register("once", devices=1)
    lost = api.claimed(node, claim_id=CLAIM)
    with api.store.write() as connection:
        connection.execute(update(blocks).where(blocks.c.id == lost["block_id"]).values(lease_until=db_now() + 1))
    assert api.claim(node, claim_id=CLAIM) == lost
    with api.store.read() as connection:
        left = select(blocks.c.lease_until - db_now()).where(blocks.c.id == lost["block_id"])
        assert connection.scalar(left) > 20, "the worker counts the lease from its last claim"
        assert connection.scalar(select(func.count()).where(attempts.c.ablation_id == made["id"])) == 1
    for other in ({}, {"claim_id": "B" * 22}):
        busy = api.client.post("/v1/blocks:claim", headers=api.worker_of("once"), json={"node_id": node, **other})
        assert busy.status_code == 409
    assert api.attempt(lost, "report", receipts=receipts_of(lost, node)).status_code == 200
    after = api.claimed(node, claim_id=CLAIM)
    assert (after["block_id"], after["token"]) != (lost["block_id"], lost["token"]), "an ended attempt is not returned"
    wide = api.register("wide", devices=2)
    one, two = (api.claim(wide, claim_id=letter * 22) for letter in "CD")
    assert one is not None
    assert two is not None
    assert one["block_id"] != two["block_id"]
    stop = {"device_state": "quarantined", "device_reason": "its fan is loud"}
    assert api.claim(wide, claim_id="C" * 22, **stop) == one, "its worker gives it back"
    assert api.claim(wide, claim_id="E" * 22, **stop) is None
    stolen = api.claimed(api.register("thief"), claim_id="C" * 22)
    assert stolen["block_id"] != one["block_id"], "another node's attempt is never returned"


def test_a_worker_repeats_the_claim_whose_answer_it_did_not_get(api: Api) -> None:
    api.submit()
    node = api.register("cut-off", devices=1)
    loses = [True]

    def forward(request: httpx.Request) -> httpx.Response:
        answer = api.client.request(request.method, request.url.path, content=request.content, headers=request.headers)
        if loses and loses.pop():
            raise httpx.ReadError("connection reset", request=request)
        return httpx.Response(answer.status_code, content=answer.content, headers=answer.headers)

    service = ServiceApi("http://127.0.0.1:1", "key")
    headers = api.worker_of("cut-off")
    service._http = httpx.Client(transport=httpx.MockTransport(forward), base_url="http://testserver", headers=headers)
    health: Any = SimpleNamespace(problem=lambda: None)
    machine: Any = SimpleNamespace(name="cut-off")
    worker = ServiceNode(service, machine, health, public_key=None, test_lanes=lambda: None)
    worker.id = node
    with pytest.raises(ApiUnreachable):
        worker.claim()
    block = worker.claim()
    assert block is not None
    assert block.attempt_no == 1
    with pytest.raises(StaleLease):
        worker.claim()


def test_many_claimers_never_get_the_same_block(api: Api) -> None:
    api.submit()
    nodes = [api.register(f"racer-{number}") for number in range(4)]
    got: list[str] = []

    def race(node: str) -> None:
        while block := api.claim(node):
            got.append(block["block_id"])

    threads = [threading.Thread(target=race, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == len(set(got)) == 6


def test_heartbeat_renews_and_shows_progress_and_log(api: Api) -> None:
    made = api.submit()
    block = api.claimed(api.register())
    trial = block["trials"][0]["trial_id"]
    progress = [{"trial_id": trial, "steps_done": 2, "steps_total": 5, "tokens_per_s": 10.5, "loss": 8.1}]
    first = {"trial_id": trial, "offset": 0, "text": "grüße\n"}
    assert api.attempt(block, "heartbeat", progress=progress, logs=[first]).json() == {"lease_s": 30.0, "cancel": False}
    progress[0]["steps_done"] = 3
    again = {"trial_id": trial, "offset": 0, "text": "grüße\nmore"}
    assert api.attempt(block, "heartbeat", progress=progress, logs=[again, first]).status_code == 200
    log = api.get(f"/v1/trials/{trial}/log?offset=8")
    assert (log.text, log.headers["x-log-end-offset"]) == ("more", "12")
    shown = api.get(f"/v1/ablations/{made['id']}/trials?limit=1").json()["items"][0]
    assert shown["state"] == "running"
    assert shown["progress"] == {"steps_done": 3, "steps_total": 5, "tokens_per_s": 10.5, "loss": 8.1}


def test_the_log_of_a_broken_attempt_is_read_until_the_next_attempt_begins(api: Api) -> None:
    api.submit()
    node = api.register("full-disk")  # others of this module broke on the usual one
    block = api.claimed(node)
    trial = block["trials"][0]["trial_id"]
    step = {"trial_id": trial, "steps_done": 1, "steps_total": 9}
    log = {"trial_id": trial, "offset": 0, "text": "it broke\n"}
    assert api.attempt(block, "heartbeat", progress=[step], logs=[log]).status_code == 200
    api.attempt(block, "report", failure_class="infra_node", message="the disk is full")
    assert api.get(f"/v1/trials/{trial}/log").text == "it broke\n"
    with api.store.write() as connection:
        connection.execute(update(blocks).values(not_before=0.0, avoid_node_id=None))
    again = api.claimed(node)
    assert again["block_id"] == block["block_id"]
    assert api.get(f"/v1/trials/{trial}/log").text == ""


def test_log_with_a_gap_is_refused_and_changes_nothing(api: Api) -> None:
    api.submit()
    block = api.claimed(api.register())
    trial = block["trials"][0]["trial_id"]
    answer = api.attempt(block, "heartbeat", logs=[{"trial_id": trial, "offset": 7, "text": "late"}])
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["hint"] == "send the log from byte 0"
    assert api.get(f"/v1/trials/{trial}/log").text == ""


def test_whole_ablation_completes_and_asks_for_its_verdict(api: Api) -> None:
    made = api.submit()
    node = api.register()
    assert api.finish(node) == 6
    shown = state_of(api, made["id"])
    assert shown["state"] == "completed"
    assert (shown["blocks"]["done"], shown["trials"]["done"]) == (6, 18)
    assert shown["finished_at"] >= shown["started_at"] >= shown["created_at"]
    with api.store.read() as connection:
        asked = select(outbox.c.kind).where(outbox.c.key == made["id"]).order_by(outbox.c.id)
        kinds = connection.execute(asked).scalars().all()
        view = ablation_view(connection, made["id"])
    assert kinds == ["announce", "announce", "judge"], "submitted, running, over"
    assert [trial.receipt is not None for trial in view.trials] == [True] * 18
    assert view.verdict is None or isinstance(view.verdict, Verdict)
    trial = api.get(f"/v1/ablations/{made['id']}/trials?limit=1").json()["items"][0]
    receipt = api.get(f"/v1/trials/{trial['id']}/receipt")
    assert receipt.json()["digest"] == trial["receipt_digest"] == receipt.headers["etag"].strip('"')


def test_report_that_does_not_fit_is_422_and_changes_nothing(api: Api) -> None:
    made = api.submit()
    node = api.register()
    block = api.claimed(node)
    good = receipts_of(block, node)
    tampered = [{**good[0], "wall_s": 99.0}, *good[1:]]
    swapped = receipts_of({**block, "attempt_id": "att_other"}, node)
    for body, words in ((good[:2], "no receipt"), (tampered, "digest"), (swapped, "att_other"), ([], "no receipt")):
        answer = api.attempt(block, "report", receipts=body)
        assert answer.status_code == 422, answer.text
        assert words in answer.text
    with api.store.read() as connection:
        stored = select(func.count()).select_from(receipts).where(receipts.c.ablation_id == made["id"])
        assert connection.execute(stored).scalar_one() == 0
    assert api.attempt(block, "report", receipts=good).status_code == 200


def test_expired_lease_requeues_and_fences_the_old_attempt(api: Api) -> None:
    made = api.submit()
    node = api.register()
    old = api.claimed(node)
    assert api.attempt(old, "heartbeat", progress=[_step(old, 1)]).status_code == 200
    assert expire(api) == 1
    stored = state_of(api, made["id"])
    broke = {"failure_class": "timeout", "message": "slow"}
    for verb, body in (("heartbeat", {}), ("report", broke)):
        answer = api.attempt(old, verb, **body)
        assert answer.status_code == 409
        assert answer.json()["type"].endswith("stale-token")
    assert state_of(api, made["id"]) == stored
    ready(api)
    new = api.claimed(node)
    assert new["block_id"] == old["block_id"]
    assert (new["attempt_no"], new["token"] != old["token"]) == (2, True)
    trials = api.get(f"/v1/ablations/{made['id']}/trials?limit=3").json()["items"]
    assert {trial["state"] for trial in trials} == {"queued"}
    assert api.attempt(new, "report", receipts=receipts_of(new, node)).status_code == 200


def _step(block: dict[str, Any], steps_done: int, place: int = 0) -> dict[str, Any]:
    return {"trial_id": block["trials"][place]["trial_id"], "steps_done": steps_done, "steps_total": 9}


def test_late_report_counts_while_the_block_was_not_requeued(api: Api) -> None:
    api.submit()
    node = api.register()
    block = api.claimed(node)
    with api.store.write() as connection:
        connection.execute(update(blocks).where(blocks.c.id == block["block_id"]).values(lease_until=db_now() - 60))
    assert api.attempt(block, "report", receipts=receipts_of(block, node)).json()["block_state"] == "done"


def test_attempts_that_are_used_up_fail_block_and_ablation(api: Api) -> None:
    made = api.submit()
    node = api.register()
    limit = FailureClass.TIMEOUT.rule.attempts
    for _ in range(6 * limit):
        block = api.claimed(node)
        answer = api.attempt(block, "report", failure_class="timeout", message="trial took\x00 too long")
        assert answer.status_code == 200
        ready(api)
    assert api.claim(node) is None
    shown = state_of(api, made["id"])
    assert (shown["state"], shown["blocks"]["failed"]) == ("failed", 6)
    rows = api.get(f"/v1/ablations/{made['id']}/blocks").json()["items"]
    assert {(block["state"], block["attempt_no"]) for block in rows} == {("failed", limit)}
    assert "timeout 2 of 2" in rows[0]["message"]
    reason = f"no block counted, 6 failed; the first: {rows[0]['message']}"
    assert reason in reasons_of(api, made["id"])
    while OutboxHandlers(api.store).run_due(OutboxKind.JUDGE):
        pass
    assert state_of(api, made["id"])["answer"] == reason


def test_block_is_over_after_the_same_failures_as_in_an_air_gapped_run(api: Api) -> None:
    rng = random.Random(8)  # noqa: S311 - draws that repeat
    node = api.register()
    for _ in range(8):
        made, broken, index = api.submit(), [], 0
        while index == 0:
            block = api.claimed(node)
            for trial in block["trials"]:
                assert trial["final_failures"] == [*final_failures(breaks(broken), index, trial["arm"])]
            failure = rng.choice(list(FailureClass))
            arm: str | None = rng.choice([None, *(trial["arm"] for trial in block["trials"])])
            broken.append(broken_attempt(index, block["attempt_no"], failure, arm=arm))
            state = api.attempt(block, "report", failure_class=failure, arm=arm, message="x").json()["block_state"]
            assert state == ("queued" if used_up_by(broken, index) is None else "failed")
            index += state == "failed"
            ready(api)
            assert api.client.post("/v1/nodes/node-a:resume", headers=api.admin, json={}).is_success  # it broke a lot
        with api.store.read() as connection:
            stored = broken_attempts(connection, made["id"])
        assert [(one.number, one.failure_class, one.arm) for one in stored] == [
            (one.attempt_no, one.failure_class, one.arm) for one in broken
        ]
        assert {(one.block_index, one.message, one.node) for one in stored} == {(0, "x", "node-a")}
        api.cancel(made["id"])


def test_arm_that_was_late_before_has_it_as_its_result_in_every_later_block(api: Api) -> None:
    made = api.submit()
    node = api.register()
    api.attempt(api.claimed(node), "report", failure_class="timeout", arm="psiv-on", message="slow")
    for _ in range(6):
        block = api.claimed(node)
        late = {trial["arm"] for trial in block["trials"] if "timeout" in trial["final_failures"]}
        assert late == {"psiv-on"}
        broke = {"outcome": "timeout", "failure_class": "timeout", "message": "slow"}
        body = receipts_of(block, node, changed={"psiv-on": broke})
        assert api.attempt(block, "report", receipts=body).json()["block_state"] == "done"
    assert state_of(api, made["id"])["state"] == "completed"


def test_break_by_an_arm_that_the_block_does_not_hold_is_refused(api: Api) -> None:
    api.submit()
    block = api.claimed(api.register())
    answer = api.attempt(block, "report", failure_class="timeout", arm="stranger", message="slow")
    assert answer.status_code == 422
    assert "its arms: baseline, chunk-32, psiv-on" in answer.text
    assert api.attempt(block, "heartbeat").status_code == 200


def test_silent_node_is_told_with_the_arm_that_ran_last(api: Api) -> None:
    """The last heartbeat names the arm; in slices it is not the last of the block. Between trials nobody knows it."""
    made = api.submit()
    node = api.register("one")
    beats: list[tuple[list[tuple[int, dict[str, Any]]], int | None]] = [
        ([], None),
        ([(0, {})], 0),
        ([(0, {}), (1, {})], 1),
        ([(1, {}), (0, {})], 0),
        ([(0, {"over": True})], None),
    ]
    for number, (progress, running) in enumerate(beats, start=1):
        ready(api)
        block = api.claimed(node)
        for place, more in progress:
            api.attempt(block, "heartbeat", progress=[{**_step(block, 1, place), **more}])
        expire(api)
        with api.store.read() as connection:
            record = broken_attempts(connection, made["id"])[-1]
        arm = None if running is None else block["trials"][running]["arm"]
        assert (record.number, record.failure_class, record.arm, record.vanished) == (number, "infra_node", arm, True)
        while_ran = "" if arm is None else f" while arm '{arm}' ran"
        assert record.message == f"node 'one' was silent for longer than its lease{while_ran}"


def test_a_trial_names_its_node_and_while_it_runs_again_what_broke_before(api: Api) -> None:
    made = api.submit()
    node = api.register("first")

    def nodes_and_failures() -> set[tuple[str | None, str | None]]:
        rows = api.get(f"/v1/ablations/{made['id']}/trials").json()["items"]
        return {(row["node"], row["broke"]) for row in rows if row["block_index"] == 0}

    assert nodes_and_failures() == {(None, None)}
    block = api.claimed(node)
    assert nodes_and_failures() == {("first", None)}
    api.attempt(block, "report", failure_class="timeout", message="memory went")
    ((_, broke),) = nodes_and_failures()
    assert broke == "memory went"
    ready(api)
    again = api.claimed(api.register("second"))
    assert again["block_id"] == block["block_id"]
    assert nodes_and_failures() == {("second", "memory went")}
    ended = receipts_of(again, api.register("second"))
    assert api.attempt(again, "report", receipts=ended).status_code == 200
    assert nodes_and_failures() == {("second", None)}


def test_one_failed_block_leaves_the_rest_to_count(api: Api) -> None:
    made = api.submit()
    node = api.register()
    for state in ("queued", "failed"):
        block = api.claimed(node)
        assert api.attempt(block, "report", failure_class="timeout", message="x").json()["block_state"] == state
    assert api.finish(node) == 5
    shown = state_of(api, made["id"])
    assert (shown["state"], shown["blocks"]["done"], shown["blocks"]["failed"]) == ("completed", 5, 1)


def test_cancel_running_waits_for_the_worker(api: Api) -> None:
    made = api.submit()
    node = api.register()
    block = api.claimed(node)
    assert api.cancel(made["id"]).json()["state"] == "cancelling"
    assert api.cancel(made["id"]).json()["state"] == "cancelling"
    assert api.claim(node) is None
    assert api.attempt(block, "heartbeat").json()["cancel"] is True
    asked = {"failure_class": "cancelled", "message": "cancel was asked for"}
    assert api.attempt(block, "report", **asked).json()["block_state"] == "cancelled"
    assert state_of(api, made["id"])["state"] == "cancelled"
    assert api.events(made["id"])[-1][0] == "end"


def test_cancel_running_without_a_worker_ends_when_the_lease_does(api: Api) -> None:
    made = api.submit()
    api.claimed(api.register())
    api.cancel(made["id"])
    assert expire(api) == 1
    assert state_of(api, made["id"])["state"] == "cancelled"


def progress_of(api: Api, block: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the stored heartbeats of a block's first trial."""
    with api.store.read() as connection:
        return heartbeats(connection, block["trials"][0]["trial_id"])


def test_every_move_is_an_event_in_order_with_actor_and_reason(api: Api) -> None:
    made = api.submit()
    node = api.register()
    block = api.claimed(node)
    api.attempt(block, "heartbeat", progress=[_step(block, 1)])
    api.attempt(block, "heartbeat", progress=[_step(block, 2)])
    assert [data["steps_done"] for data in progress_of(api, block)] == [2]
    api.attempt(block, "report", failure_class="infra_node", message="device lost")
    assert progress_of(api, block) == [], "the next attempt begins a new curve"
    api.cancel(made["id"])
    all_events = api.events(made["id"])
    assert [event["seq"] for _, event in all_events] == sorted(event["seq"] for _, event in all_events)
    assert all(event["actor"] and event["reason"] for _, event in all_events)
    moves = [(name, event["from"], event["to"]) for name, event in all_events if event["subject"] == block["block_id"]]
    assert moves == [
        ("block.state", "queued", "running"),
        ("block.state", "running", "queued"),
        ("block.state", "queued", "cancelled"),
    ]
    states = [event["to"] for name, event in all_events if name == "ablation.state"]
    assert states == ["queued", "running", "cancelling", "cancelled"]
    assert ("attempt.state", "broken") in [(name, event["to"]) for name, event in all_events]
    assert all_events[-1][0] == "end"


def test_a_block_that_waits_on_its_node_says_for_what_until_it_runs(api: Api) -> None:
    made = api.submit()
    block = api.claimed(api.register())
    assert state_of(api, made["id"])["waiting_for"] is None
    for left in (60, 59):
        api.attempt(block, "heartbeat", waits_for=f"quiet: others take 70% of the cores' time\0; {left} s more")
    waits = state_of(api, made["id"])["waiting_for"]
    assert waits == "quiet: others take 70% of the cores' time\\0; 59 s more (block 1 on node 'node-a')"
    api.attempt(block, "heartbeat", progress=[_step(block, 1)])
    assert state_of(api, made["id"])["waiting_for"] is None
    api.cancel(made["id"])
    api.attempt(block, "report", failure_class="cancelled", message="cancel was asked for")
    reasons = [event["reason"] for name, event in api.events(made["id"]) if name == "block.waits"]
    assert [reason[:15] for reason in reasons] == ["waits for quiet", "waits no more"]
    too_long = api.attempt(block, "heartbeat", waits_for="x" * 501)
    assert (too_long.status_code, too_long.json()["errors"][0]["pointer"]) == (422, "#/waits_for")


def test_progress_events_are_dropped_with_the_block_that_they_describe(api: Api) -> None:
    made = api.submit()
    node = api.register()
    block = api.claimed(node)
    for step in range(1, 4):
        api.attempt(block, "heartbeat", progress=[_step(block, step)])
    api.attempt(block, "report", receipts=receipts_of(block, node))
    with api.store.read() as connection:
        query = select(events.c.kind).where(events.c.ablation_id == made["id"], events.c.kind == "trial.progress")
        assert connection.execute(query).all() == []


def reasons_of(api: Api, ablation_id: str) -> list[str]:
    with api.store.read() as connection:
        query = select(events.c.reason).where(events.c.ablation_id == ablation_id).order_by(events.c.seq)
        return list(connection.execute(query).scalars())


def test_spent_device_minutes_cancel_what_waits(api: Api) -> None:
    limits = {"trial": "5m", "device_minutes": 1e-7, "priority": 99}
    made = api.submit(limits=limits)
    node_id = api.register()
    block = api.claimed(node_id)
    assert block["ablation_id"] == made["id"]
    assert api.attempt(block, "report", receipts=receipts_of(block, node_id, limits=limits)).status_code == 200
    shown = state_of(api, made["id"])
    assert (shown["state"], shown["blocks"]["done"], shown["trials"]["done"]) == ("completed", 1, len(block["trials"]))
    states = [item["state"] for item in api.get(f"/v1/ablations/{made['id']}/blocks").json()["items"]]
    assert sorted(states) == ["cancelled"] * 5 + ["done"]
    reasons = reasons_of(api, made["id"])
    assert sum("of 1e-07 device minutes is used up" in reason for reason in reasons) == 5 + 5 * len(block["trials"])
    assert reasons[-1] == "1 block done, 0 failed, 5 not run"
    with api.store.read() as connection:
        assert "of 1e-07 device minutes is used up" in str(circumstances_of(connection, made["id"]).not_run)
    spoiled = api.submit(limits=limits, ablation="spoiled")
    block = api.claimed(node_id)
    api.attempt(block, "report", failure_class="disturbed", arm="baseline", message="others took 70%")
    assert state_of(api, spoiled["id"])["state"] == "failed"
    last = reasons_of(api, spoiled["id"])[-1]
    assert last.startswith("no block counted, 0 failed; 6 not run: the budget of 1e-07 device minutes is used up")


def test_an_ablation_that_ends_says_how_many_blocks_count_and_why_others_do_not(api: Api) -> None:
    node, limits = api.register(), {"priority": 100}
    made = api.submit(limits=limits)
    lost = {0: ("psiv-on", "oom", "oom"), 1: ("baseline", "invalid", "invalid_measurement")}
    while block := api.claim(node):
        arm, outcome, failure = lost.get(block["block_index"], ("psiv-on", "measured", None))
        why = {"outcome": outcome, "failure_class": failure, "steps": (), "message": f"why {arm}"}
        body = receipts_of(block, node, changed={arm: why} if failure else None, limits=limits)
        assert api.attempt(block, "report", receipts=body).status_code == 200
    reason = reasons_of(api, made["id"])[-1]
    assert reason.startswith("6 blocks done, 5 of them comparable, 0 failed: baseline invalid in 1")
    assert reason.endswith("psiv-on oom in 1; the first: why psiv-on")


@pytest.mark.parametrize(("node_class", "busy"), [("tpu-v6e", 4), ("xla-cpu", 1)])
def test_a_step_over_four_devices_uses_four_device_minutes_in_a_minute(api: Api, node_class: str, busy: int) -> None:
    """Virtual devices are the processors of one machine."""
    owner = api.token(f"four-{node_class}-{api.store.writer.dialect.name}", "submit", device_minutes=1000)
    values = spec_values(
        workload__overrides={"micro_batch": 4},
        baseline={"gates": {"lane": "xla"}},
        variants={"whole": {"gates": {"sharding": "replicated"}}},
        placement={"node_class": node_class, "devices": 4},
        limits={"trial": "5m", "device_minutes": 100},
    )
    made = api.client.post("/v1/ablations", json=values, headers={**owner, "Idempotency-Key": node_class}).json()
    block = api.claimed(api.register(f"of-{node_class}", node_class, devices=4))
    with api.store.write() as connection:
        change = update(attempts).where(attempts.c.id == block["attempt_id"])
        connection.execute(change.values(started_at=db_now() - 30 * 60))
    used = api.client.get("/v1/identity", headers=owner).json()["device_minutes_used"]
    assert used == pytest.approx(30 * busy, abs=1)
    assert api.attempt(block, "report", failure_class="preempted", message="the worker was asked to stop").is_success
    assert state_of(api, made["id"])["state"] == ("failed" if busy == 4 else "running")


def test_two_nodes_use_twice_the_device_minutes_of_one(api: Api) -> None:
    owner = api.token(f"two-{api.store.writer.dialect.name}", "code", device_minutes=1000)
    values = command_values(
        workload__code=None, placement={"node_class": "cpu", "nodes": 2}, limits={"trial": "5m", "device_minutes": 50}
    )
    made = api.client.post("/v1/ablations", json=values, headers={**owner, "Idempotency-Key": "two"}).json()
    node = api.register("of-two", devices=1, lanes={"command*2": None})
    block = api.claimed(node)
    (shown,) = [one for one in api.get("/v1/nodes").json()["items"] if one["id"] == node]
    assert [(one["devices"], shown["devices_free"]) for one in shown["runs"]] == [(1, 0)], "those of the node"
    with api.store.write() as connection:
        change = update(attempts).where(attempts.c.id == block["attempt_id"])
        connection.execute(change.values(started_at=db_now() - 30 * 60))
    used = api.client.get("/v1/identity", headers=owner).json()["device_minutes_used"]
    assert used == pytest.approx(60, abs=1)
    assert api.attempt(block, "report", failure_class="preempted", message="the worker was asked to stop").is_success
    assert state_of(api, made["id"])["state"] == "failed", "60 of 50 are used"


def test_device_minutes_of_broken_attempts_count(api: Api) -> None:
    made = api.submit(limits={"trial": "5m", "device_minutes": 1e-7, "priority": 99})
    block = api.claimed(api.register())
    assert api.attempt(block, "report", failure_class="timeout", message="too slow").status_code == 200
    assert state_of(api, made["id"])["state"] == "failed"

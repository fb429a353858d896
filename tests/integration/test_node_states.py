"""Nodes that are drained, quarantined and resumed, and which node gets what; on SQLite and on PostgreSQL."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from ablate.experiments.design.gates import BACK_ENDS
from ablate.service.background.reconciler import Reconciler
from ablate.service.store.blocks import queue
from ablate.service.store.nodes.placement import HEARD_S, Needs, fits, lacks
from ablate.service.store.tables import blocks, db_now, nodes
from tests.api_stack import SIGNER, Api, api_fixture, receipts_of, running_api
from tests.factories import make_spec
from tests.web_pages import Person

api = api_fixture()


def act(api: Api, name: str, verb: str, **body: Any) -> dict[str, Any]:
    """Let an operator stop or resume a node; return the node."""
    answer = api.client.post(f"/v1/nodes/{name}:{verb}", headers=api.admin, **({"json": body} if body else {}))
    assert answer.status_code == 200, answer.text
    return next(node for node in answer.json()["items"] if node["name"] == name)


def node(api: Api, name: str) -> dict[str, Any]:
    return next(dict(one) for one in api.get("/v1/nodes").json()["items"] if one["name"] == name)


def pass_time(api: Api) -> None:
    """Let every pause and every preference for another node be over."""
    with api.store.write() as connection:
        connection.execute(update(blocks).values(not_before=0.0, avoid_until=0.0))


def break_one(api: Api, node_id: str, failure: str = "infra_node", *, place: int | None = None) -> dict[str, Any]:
    """Claim a block and break it, by the arm at `place` of its order or by no arm that is known."""
    pass_time(api)
    block = api.claimed(node_id)
    arm = None if place is None else block["trials"][place]["arm"]
    answer = api.attempt(block, "report", failure_class=failure, arm=arm, message="the disk is full")
    assert answer.status_code == 200, answer.text
    return block


def test_drained_node_finishes_its_block_and_gets_no_other_until_it_is_resumed(api: Api) -> None:
    api.submit()
    one = api.register("one")
    block = api.claimed(one)
    assert act(api, "one", "drain")["state"] == "draining"
    assert api.claim(one) is None
    assert api.attempt(block, "heartbeat").status_code == 200
    assert api.attempt(block, "report", receipts=receipts_of(block, one)).json()["block_state"] == "done"
    assert node(api, "one")["state"] == "drained"
    assert api.register("one") == one
    assert (node(api, "one")["state"], api.claim(one)) == ("drained", None)
    assert act(api, "one", "resume")["state"] == "works"
    assert api.claimed(one)["block_index"] == 1


def test_a_node_says_which_block_and_arm_it_runs(api: Api) -> None:
    made = api.submit(ablation="told")
    one = api.register("one")
    assert node(api, "one")["runs"] == []
    block = api.claimed(one)
    run = {"ablation": made["id"], "name": "told", "block_index": block["block_index"], "devices": 1, "arms": []}
    assert node(api, "one")["runs"] == [run]
    trial = block["trials"][0]
    progress = {"trial_id": trial["trial_id"], "steps_done": 1, "steps_total": 9, "tokens_per_s": 5.0, "loss": 8.0}
    assert api.attempt(block, "heartbeat", progress=[progress]).status_code == 200
    assert node(api, "one")["runs"] == [{**run, "arms": [trial["arm"]]}]
    assert Person.signed_in(api).get("/").text.count(f"told, block 1, {trial['arm']}</a>") == 1
    second = block["trials"][1]
    # in slices they take turns, and a slice may end before its first step is told, or its second heartbeat
    turns = (trial, 2), (second, 0), (trial, 2), (second, 1), (trial, 3), (second, 1), (second, 2), (trial, 3)
    for runs, steps in turns:
        turn = {**progress, "trial_id": runs["trial_id"], "steps_done": steps}
        assert api.attempt(block, "heartbeat", progress=[turn]).status_code == 200
        assert node(api, "one")["runs"] == [{**run, "arms": [runs["arm"]]}]
        rows = api.client.get(f"/v1/ablations/{made['id']}/trials", headers=api.admin).json()["items"]
        assert [row["arm"] for row in rows if row["runs_now"]] == [runs["arm"]]
    ends = [{**progress, "steps_done": 8}, {**progress, "trial_id": second["trial_id"], "steps_done": 3}]
    assert api.attempt(block, "heartbeat", progress=ends).status_code == 200
    assert node(api, "one")["runs"] == [{**run, "arms": [second["arm"]]}], "the first has run; its block hands it in"
    page = Person.signed_in(api).get(f"/a/{made['id']}").text
    assert page.count('<span class="quiet">ran</span>') == 1
    assert page.count('<span class="quiet">running</span>') == 1
    assert page.count(f'<strong class="arm">{trial["arm"]}</strong>') == 0
    assert api.attempt(block, "report", receipts=receipts_of(block, one, ablation="told")).status_code == 200
    assert node(api, "one")["runs"] == []


def test_quarantined_node_says_who_stopped_it_and_why(api: Api) -> None:
    api.submit()
    one, two = api.register("one"), api.register("two")
    shown = act(api, "one", "quarantine", reason="its fan is loud")
    assert (shown["state"], shown["quarantined_reason"]) == ("quarantined", "its fan is loud")
    assert shown["stopped_by"]
    assert shown["stopped_at"]
    assert api.claim(one) is None
    assert api.claimed(two)["block_index"] == 0
    resumed = act(api, "one", "resume")
    assert [resumed[name] for name in ("state", "quarantined_reason", "stopped_by", "stopped_at")] == [
        "works", None, None, None,
    ]  # fmt: skip


def test_only_operators_stop_nodes_and_only_those_that_exist(api: Api) -> None:
    api.register("one")
    for verb in ("drain", "resume"):
        assert api.client.post(f"/v1/nodes/one:{verb}", headers=api.worker).status_code == 403
        assert api.client.post(f"/v1/nodes/nobody:{verb}", headers=api.admin).status_code == 404
    nothing = api.client.post("/v1/nodes/one:quarantine", headers=api.admin, json={"reason": ""})
    assert nothing.status_code == 422


def test_worker_that_distrusts_its_device_is_quarantined_until_an_operator_resumes_it(api: Api) -> None:
    api.submit()
    one = api.register("one")
    block = api.claimed(one)
    bad = {"device_state": "quarantined", "device_reason": "2 GiB were not released"}
    assert api.attempt(block, "heartbeat", **bad).status_code == 200
    assert "2 GiB were not released" in node(api, "one")["quarantined_reason"]
    assert api.attempt(block, "report", receipts=receipts_of(block, one)).status_code == 200
    assert api.claim(one) is None
    act(api, "one", "resume")
    claim = {"node_id": one, **bad}
    assert api.client.post("/v1/blocks:claim", headers=api.worker_of("one"), json=claim).status_code == 204
    assert node(api, "one")["state"] == "quarantined"
    act(api, "one", "resume")
    assert api.claimed(one)["block_index"] == 1


def other_work(api: Api) -> dict[str, Any]:
    """Submit an ablation whose blocks are claimed before those of all others."""
    return api.submit(ablation="other", limits__priority=90)


def test_sick_node_is_quarantined_after_three_breaks_and_the_work_goes_elsewhere(api: Api) -> None:
    made = api.submit()
    sick = api.register("sick")
    for place in (0, 1):
        break_one(api, sick, place=place)
    assert node(api, "sick")["state"] == "works"
    other = other_work(api)
    break_one(api, sick, place=2)
    shown = node(api, "sick")
    api.cancel(other["id"])
    assert shown["state"] == "quarantined"
    assert "3 attempts in a row broke here, the last by infra_node: the disk is full" in shown["quarantined_reason"]
    pass_time(api)
    assert api.claim(sick) is None
    assert api.finish(api.register("sound")) == 6
    assert api.get(made["links"]["self"]).json()["blocks"] == {"planned": 6, "done": 6, "failed": 0}


def test_finished_block_or_a_resume_ends_the_row(api: Api) -> None:
    api.submit()
    one = api.register("one")
    for place in (0, 1):
        break_one(api, one, place=place)
    pass_time(api)
    block = api.claimed(one)
    assert api.attempt(block, "report", receipts=receipts_of(block, one)).status_code == 200
    for place in (0, 1):
        break_one(api, one, place=place)
    assert node(api, "one")["state"] == "works"
    act(api, "one", "resume")
    break_one(api, one, place=2)
    assert node(api, "one")["state"] == "works"


@pytest.mark.parametrize("failure", ["infra_node", "no_receipt"])
@pytest.mark.parametrize("places", [(0,), (0, 1, 2), (None,), (None, 0, 1)])
def test_one_ablation_never_quarantines_a_node(api: Api, failure: str, places: tuple[int | None, ...]) -> None:
    api.submit()
    one = api.register("one")
    for turn in range(5):
        break_one(api, one, failure, place=places[turn % len(places)])
        assert node(api, "one")["state"] == "works"


def test_one_arm_never_quarantines_a_node_in_however_many_ablations(api: Api) -> None:
    one = api.register("one")
    for _ in range(4):
        made = api.submit()
        pass_time(api)
        block = api.claimed(one)
        answer = api.attempt(block, "report", failure_class="infra_node", arm="psiv-on", message="xid 31")
        assert answer.json()["block_state"] == "queued"
        api.cancel(made["id"])
    assert node(api, "one")["state"] == "works"


def test_drawn_breaks_quarantine_by_different_arms_of_different_ablations_alone(api: Api) -> None:
    """Compare with a plain reading of the rule: since the last finished block, three breaks, two of different work."""
    rng = random.Random(45)  # noqa: S311 - draws that repeat
    outcomes = set()
    for number in range(25):
        one, made = api.register(f"n{number}"), [api.submit()["id"] for _ in range(2)]
        broken: list[tuple[str, str | None]] = []
        state = "works"
        for _ in range(rng.randint(3, 6)):
            for ablation_id, priority in zip(rng.sample(made, 2), (90, 10), strict=True):
                api.client.patch(f"/v1/ablations/{ablation_id}", headers=api.admin, json={"priority": priority})
            pass_time(api)
            block = api.claimed(one)
            if rng.random() < 0.15:
                assert api.attempt(block, "report", receipts=receipts_of(block, one)).status_code == 200
                broken = []
                continue
            failure = rng.choice(["infra_node", "no_receipt", "user_error"])
            trial = rng.choice([*([] if failure == "user_error" else [None]), *block["trials"]])
            arm = None if trial is None else trial["arm"]
            body = {"failure_class": failure, "arm": arm, "message": "it broke"}
            assert api.attempt(block, "report", **body).status_code == 200
            if failure != "user_error":
                broken.append((block["ablation_id"], None if trial is None else trial["arm_digest"]))
            different = any(
                first != second and (None in (digest, other) or digest != other)
                for first, digest in broken
                for second, other in broken
            )
            state = "quarantined" if len(broken) >= 3 and different else "works"
            assert node(api, f"n{number}")["state"] == state, broken
            if state == "quarantined":
                break
        outcomes.add(state)
        for ablation_id in made:
            api.cancel(ablation_id)
    assert outcomes == {"works", "quarantined"}


def test_ablation_that_breaks_everywhere_is_no_evidence_against_a_node(api: Api) -> None:
    api.submit()
    names = ("one", "two")
    ids = [api.register(name) for name in names]
    for turn in range(4):
        break_one(api, ids[turn % 2], place=turn % 3)
    assert [node(api, name)["state"] for name in names] == ["works", "works"]


def test_trials_that_die_speak_against_a_node_over_two_ablations_only(api: Api) -> None:
    first = api.submit()
    one = api.register("one")
    for place in (0, 1, 2, 0):
        break_one(api, one, "no_receipt", place=place)
    assert node(api, "one")["state"] == "works"
    api.cancel(first["id"])
    api.submit()
    break_one(api, one, "no_receipt", place=0)
    assert node(api, "one")["state"] == "quarantined"


def test_node_that_falls_silent_again_and_again_is_quarantined(api: Api) -> None:
    api.submit()
    one = api.register("one")
    for turn in range(3):
        assert node(api, "one")["state"] == "works"
        if turn == 2:
            other_work(api)
        pass_time(api)
        api.claimed(one)
        with api.store.write() as connection:
            connection.execute(update(blocks).where(blocks.c.state == "running").values(lease_until=db_now() - 1))
        assert Reconciler(api.store, node_breaks=3).expire_leases() == 1
    assert "silent for longer than its lease" in node(api, "one")["quarantined_reason"]


def test_limit_of_zero_quarantines_nobody(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path, node_breaks=0) as api:
        api.submit()
        one = api.register("one")
        for place in (0, 1, 2, 0):
            break_one(api, one, place=place)
        other_work(api)
        break_one(api, one, place=1)
        assert node(api, "one")["state"] == "works"


def test_block_that_broke_for_a_nodes_sake_waits_for_another_one(api: Api) -> None:
    api.submit()
    one, two = api.register("one"), api.register("two")
    broken = break_one(api, one, place=0)
    assert api.claimed(one)["block_id"] != broken["block_id"]
    assert api.claimed(two)["block_id"] == broken["block_id"]


@pytest.mark.parametrize("gone", ["silent", "drain"])
def test_block_waits_no_longer_for_a_node_that_takes_no_work_any_more(api: Api, gone: str) -> None:
    api.submit()
    one = api.register("one")
    api.register("two")
    broken = break_one(api, one, place=0)
    if gone == "silent":
        with api.store.write() as connection:
            connection.execute(update(nodes).where(nodes.c.name == "two").values(seen_at=db_now() - HEARD_S - 1))
    else:
        act(api, "two", "drain")
    assert api.claimed(one)["block_id"] == broken["block_id"]


def test_block_that_broke_on_the_only_node_goes_back_to_it(api: Api) -> None:
    api.submit()
    one = api.register("one")
    api.register("other", "h200")
    act(api, "other", "drain")
    broken = break_one(api, one, place=0)
    assert api.claimed(one)["block_id"] == broken["block_id"]


def test_block_goes_only_where_its_lanes_ran(api: Api) -> None:
    api.submit()
    registration = {
        "node_class": "cpu",
        "devices": [],
        "versions": {},
        "code_digest": "sha256:c",
        "public_key": SIGNER.key,
    }

    def registered(lanes: dict[str, str | None] | None) -> str:
        body = {**registration, "lanes": lanes}
        answer = api.client.put("/v1/nodes/one", headers=api.worker_of("one"), json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["node_id"])

    one = api.register("one")
    assert registered({"reference": "the answer was wrong", "cuda": None}) == one
    assert api.claim(one) is None
    assert node(api, "one")["lanes"] == {"reference": "the answer was wrong", "cuda": None}
    assert api.claim(registered({"reference": None, "cuda": "no device"})) is not None
    assert registered(None) == one
    assert api.claim(api.register("two")) is not None


def test_block_goes_only_where_its_back_ends_work(api: Api) -> None:
    spec = {
        "placement": {"node_class": "h100"},
        "baseline": {"gates": {"attention": "sdpa", "dtype": "bfloat16"}},
        "variants": {"fa4": {"gates": {"attention": "fa4"}}, "fp8": {"gates": {"projections": "fp8"}}},
    }
    refused = "refused: attention 'fa4' needs the package flash-attn-4"
    results = {"reference": None, "cuda": None, "attention=flash": "wrong: relative error 1", "projections=fp8": None}
    one = api.register("one", "h100", lanes={**results, "attention=fa4": refused})
    made = api.submit(**spec)
    reason = f"a live node of class 'h100': 'one' does not work with attention fa4 ({refused})"
    assert f"it waits for {reason}" in made["warnings"]
    assert api.get(f"/v1/ablations/{made['id']}").json()["waiting_for"] == reason
    assert api.claim(one) is None
    values = make_spec(**spec).model_dump(mode="json", exclude_unset=True)
    plan = api.client.post("/v1/ablations:plan", headers=api.admin, json=values).json()
    (answer,) = [row for row in plan["node_classes"] if row["node_class"] == "h100"]
    assert (answer["live_nodes"], answer["reason"]) == (0, f"it waits for {reason}")
    assert api.claim(api.register("untried", "h100")) is not None
    assert api.register("one", "h100", lanes={**results, "attention=fa4": None}) == one
    assert api.claim(one) is not None
    broken = {"attention=fa4": refused, "projections=fp8": "crashed: no answer within " + "x" * 400}
    api.register("one", "h100", lanes={**results, **broken})
    api.register("untried", "h100", lanes={"reference": "the answer was wrong"})
    stored = needs_of(api, made["id"])
    with api.store.read() as connection:
        first, second = queue.nodes_of(connection, ["h100"])
    words = lacks(first, stored)
    assert words is not None
    assert words.startswith(f"does not work with attention fa4 ({refused}) and projections fp8 (crashed: no answer")
    assert len(words) < 300
    assert lacks(second, stored) == "does not work with lane reference (the answer was wrong)"
    api.register("untried", "h100", lanes={"cuda": None})
    with api.store.read() as connection:
        (untried,) = (row for row in queue.nodes_of(connection, ["h100"]) if row.name == "untried")
    assert lacks(untried, stored) == "did not run lane reference in its check"
    with_peer = replace(stored, lanes="cuda,peer")
    assert lacks(untried, with_peer) == "did not run lane peer in its check"
    api.register("untried", "h100", lanes={"cuda": None, "peer": "refused: no package"})
    with api.store.read() as connection:
        (untried,) = (row for row in queue.nodes_of(connection, ["h100"]) if row.name == "untried")
    assert lacks(untried, with_peer) == "does not work with lane peer (refused: no package)"


def needs_of(api: Api, ablation_id: str) -> Needs:
    with api.store.read() as connection:
        return queue.places(connection, [ablation_id])[ablation_id].needs


def test_drawn_blocks_go_to_the_nodes_whose_back_ends_work(api: Api) -> None:
    """Compare the condition in SQL and the words about it with sets."""
    rng = random.Random(31)  # noqa: S311 - draws that repeat
    api.submit()
    with api.store.read() as connection:
        ids = list(connection.scalars(select(blocks.c.id)))
    outcomes = set()
    for number in range(40):
        needed = {block_id: frozenset(rng.sample(BACK_ENDS, rng.randrange(4))) for block_id in ids}
        results = {name: rng.choice([None, None, "wrong: 100% _ of it"]) for name in BACK_ENDS if rng.random() < 0.7}
        node_id = api.register(f"n{number}", lanes={"reference": None, **results})
        stored = {block_id: f",{','.join(sorted(names))}," if names else "" for block_id, names in needed.items()}
        with api.store.write() as connection:
            for block_id, text in stored.items():
                connection.execute(update(blocks).where(blocks.c.id == block_id).values(back_ends=text))
        with api.store.read() as connection:
            row = connection.execute(select(nodes).where(nodes.c.id == node_id)).one()
            given = set(connection.scalars(select(blocks.c.id).where(fits(row, room=None))))
        for block_id, names in needed.items():
            failed = {name for name in names if results.get(name) is not None}
            words = lacks(row, Needs(lanes="reference", back_ends=stored[block_id], devices=1))
            assert (block_id in given, words is None) == (not failed, not failed), (names, results)
            assert all(f"{name.replace('=', ' ')} (wrong: 100% _ of it)" in str(words) for name in failed)
            outcomes.add(len(failed))
    assert {0, 1, 2} <= outcomes


def test_block_goes_only_where_all_devices_of_its_step_are(api: Api) -> None:
    """Chips that are not there would break the block; virtual devices are as many as are asked for."""
    wide = {
        "workload__overrides": {"micro_batch": 4},
        "baseline": {"gates": {"lane": "xla"}},
        "variants": {"whole": {"gates": {"sharding": "replicated"}}},
    }
    made = api.submit(placement={"node_class": "tpu-v6e", "devices": 4}, **wide)
    for name, chips in (("one", 1), ("eight", 8)):
        assert api.claim(api.register(name, "tpu-v6e", devices=chips)) is None
    assert api.get(f"/v1/ablations/{made['id']}").json()["waiting_for"] == (
        "a live node of class 'tpu-v6e': 'eight' has 8 devices, and one step is spread over 4; "
        "'one' has 1 device, and a block needs 4"
    )
    assert api.claim(api.register("four", "tpu-v6e", devices=4)) is not None
    api.submit(placement={"node_class": "xla-cpu", "devices": 4}, **wide)
    assert api.claim(api.register("virtual", "xla-cpu", devices=1)) is not None


def test_a_step_over_all_devices_fills_its_node_and_waits_until_all_are_free(api: Api) -> None:
    steps = {
        "workload__overrides": {"micro_batch": 4},
        "baseline": {"gates": {"lane": "xla"}},
        "variants": {"other": {"gates": {"psiv_cache": True}}},
    }
    wide = api.submit(placement={"node_class": "tpu-v6e", "devices": 4}, limits__priority=90, **steps)
    node = api.register("four", "tpu-v6e", devices=4)
    taken = api.claimed(node)
    assert _claim_status(api, "four", node) == 409
    narrow = api.submit(placement={"node_class": "tpu-v6e", "devices": 1}, **steps)
    assert _claim_status(api, "four", node) == 409
    api.attempt(taken, "report", failure_class="preempted", message="the worker was asked to stop")
    api.client.patch(f"/v1/ablations/{wide['id']}", headers=api.admin, json={"priority": 10})
    blocks = [api.claim(node) for _ in range(4)]
    assert [block and block["ablation_id"] for block in blocks] == [narrow["id"]] * 4
    assert _claim_status(api, "four", node) == 409
    api.attempt(blocks[0] or {}, "report", failure_class="preempted", message="the worker was asked to stop")
    api.client.patch(f"/v1/ablations/{wide['id']}", headers=api.admin, json={"priority": 90})
    again = api.claimed(node)
    assert again["ablation_id"] == narrow["id"], "three devices are in use: the step over four waits"


def _claim_status(api: Api, name: str, node: str) -> int:
    ask = {"node_id": node}
    return api.client.post("/v1/blocks:claim", headers=api.worker_of(name), json=ask).status_code

"""What a submission is told of costs and nodes: the truth of now, or of a moment ago, on both databases."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from experiments.design.plan import Plan
from kernels.backends import NODE_CLASSES, Lane
from service.http.outlook import Outlook
from service.queue.eligible_nodes import needs_of, takers_of
from service.queue.plan_cost import expected_device_minutes
from service.store.nodes.placement import lanes_of
from service.store.session import Store
from tests.api_stack import Api, running_api, settings_for
from tests.factories import make_plan, spec_values

LONG_S = 3600.0
"""Longer than a test."""


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Counting(Store):
    """A store that counts who reads."""

    reads = 0

    @contextmanager
    def read(self) -> Iterator[Connection]:
        self.reads += 1
        with super().read() as connection:
            yield connection


def test_submissions_share_an_answer_only_where_fresh_ones_would_be_equal(kind: str, tmp_path: Path) -> None:
    chance = random.Random(10)  # noqa: S311
    with running_api(kind, tmp_path) as api:
        _fill(api)
        store = Counting(api.store.url)
        outlook = Outlook(store, settings_for(store.url, tmp_path, outlook_fresh_s=LONG_S))
        seen, told = set[Any](), set[Any]()
        for _ in range(400):
            plan = _drawn(chance)
            digests = tuple(arm.digest for arm in plan.arms)
            keys = {(plan.node_class, digests), (plan.node_class, lanes_of(plan), plan.devices)}
            with api.store.read() as connection:
                minutes = expected_device_minutes(connection, plan)
                takers = takers_of(connection, plan.node_class, needs_of(plan), silent_s=LONG_S)
            before = store.reads
            assert (outlook.device_minutes(plan), outlook.waits_for(plan)) == (minutes, takers.waits_for)
            assert store.reads - before == len(keys - seen)
            seen |= keys
            told |= {minutes, takers.waits_for}
        store.close()
    assert len(seen) < 700, "hardly anything was asked twice"
    assert len(told) > 30, "what is told hardly depends on the plan"


def _fill(api: Api) -> None:
    """Let arms run, on two node classes with walls of their own, and register nodes of other sorts."""
    for name, node_class, factor in (("here", "cpu", 1.0), ("there", "h200", 3.0)):
        node = api.register(name, node_class)
        placement = {"node_class": node_class, "max_foreign_load": "99%"}
        api.submit(placement=placement)
        slower = {arm: {"tokens_per_s": 5000 / factor / (1 + n)} for n, arm in enumerate(("baseline", "psiv-on"))}
        assert api.finish(node, placement=placement, changed=slower) == 6
    api.register("single", "tpu-v6e", devices=1)
    api.register("drained", "xla-cpu")
    assert api.client.post("/v1/nodes/drained:drain", headers=api.admin).is_success


def _drawn(chance: random.Random) -> Plan:
    """Return a plan with any node class, devices, lanes and arms, known ones among them, and any number of blocks."""
    plan, node_class = make_plan(), chance.choice(list(NODE_CLASSES.values()))
    lanes = chance.sample(list(Lane), chance.choice([1, 1, 2]))
    arms = [
        arm.model_copy(
            update={
                "gates": {**arm.gates, "lane": str(chance.choice(lanes))},
                "digest": chance.choice([arm.digest, arm.digest, arm.digest, f"sha256:{chance.randrange(3)}"]),
            }
        )
        for arm in plan.arms[: chance.randint(1, 3)]
    ]
    blocks = plan.blocks[: chance.randint(1, 6)]
    devices = chance.choice(node_class.devices)
    changed = {"node_class": node_class.name, "devices": devices, "arms": tuple(arms), "blocks": blocks}
    return plan.model_copy(update=changed)


def test_a_warning_may_be_old_and_ends_with_the_time_that_it_may_be_kept(kind: str, tmp_path: Path) -> None:
    fresh_s = 1.5
    with running_api(kind, tmp_path, outlook_fresh_s=fresh_s) as api:
        began = time.monotonic()
        (said,) = api.submit()["warnings"]
        assert said.startswith("it waits for a live node of class 'cpu'; none has registered")
        api.register()
        kept = api.submit()["warnings"]
        if time.monotonic() - began < fresh_s:
            assert kept == [said]
        time.sleep(max(0.0, began + fresh_s - time.monotonic()) + 0.05)
        assert api.submit()["warnings"] == []


def test_what_refuses_plans_or_is_stored_of_an_ablation_is_never_told_from_memory(kind: str, tmp_path: Path) -> None:
    with running_api(kind, tmp_path, outlook_fresh_s=LONG_S) as api:
        asked = spec_values(limits={"device_minutes": 0.001})
        first = api.submit(limits={"device_minutes": 0.001})
        assert first["plan"]["expected_device_minutes"] is None
        node = api.register()
        assert api.finish(node, limits={"device_minutes": 0.001}) > 0
        plan = api.client.post("/v1/ablations:plan", json=asked, headers=api.admin).json()
        assert plan["expected_device_minutes"] > 0.001
        assert {one["node_class"]: one["eligible"] for one in plan["node_classes"]}["cpu"]
        then = api.submit(limits={"device_minutes": 0.001})
        assert then["plan"]["expected_device_minutes"] is None, "it is kept"
        assert then["warnings"] == first["warnings"]
        shown = api.get(f"/v1/ablations/{then['id']}").json()
        assert "none has registered" not in str(shown["waiting_for"])


def test_the_apis_of_tests_tell_nothing_from_memory(kind: str, tmp_path: Path) -> None:
    with running_api(kind, tmp_path) as api:
        assert len(api.submit()["warnings"]) == 1
        api.register()
        told = []
        for verb in ("drain", "resume", "drain"):
            assert api.client.post(f"/v1/nodes/node-a:{verb}", headers=api.admin).is_success
            told.append(api.submit()["warnings"])
    drained = ["it waits for a live node of class 'cpu': 'node-a' is drained"]
    assert told == [drained, [], drained]

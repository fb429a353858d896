"""Sentinel blocks: asked for when a calibration gets old, where a node would run them with the same key, and once."""

import time
from typing import Any

import pytest
from sqlalchemy import select, update

from ablate.experiments.design.aa_spec import CONTENT_TYPE
from ablate.experiments.design.load import parse_spec
from ablate.experiments.records.calibration import AABlock
from ablate.service.background.sentinels import submit_due
from ablate.service.store.nodes.calibrations import read_calibrations
from ablate.service.store.tables import aa_blocks, ablations, db_now
from tests.api_stack import SIGNER, Api, api_fixture
from tests.calibrations import aa_spec
from tests.integration.test_calibrations import run, submit_aa

CODE = "sha256:code"  # as the factories' receipts have it, like name and device
DEVICE = {"index": 0, "name": "CPU", "serial": None, "memory_bytes": 1}
WEEK_S = 7 * 86_400.0


api = api_fixture(kinds=["sqlite"])


def calibrate(api: Api, *, days_ago: float, **node: Any) -> None:
    """Leave twenty A/A blocks of `days_ago`, and the node that ran them, which still lives."""
    submit_aa(api)
    run(api, aa_spec(), versions={"torch": "2"})
    age(api, days_ago)
    register(api, **node)


def register(api: Api, **node: Any) -> None:
    body = {"node_class": "cpu", "devices": [DEVICE], "versions": {"torch": "2"}, "code_digest": CODE}
    body |= {"public_key": SIGNER.key, **node}
    assert api.put_node("node-a", body).status_code == 200


def age(api: Api, days: float) -> None:
    """Date all A/A blocks, and the submissions of all ablations, `days` ago."""
    with api.store.write() as connection:
        began = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - days * 86_400))
        for row in connection.execute(select(aa_blocks)).all():
            block = AABlock.model_validate_json(row.payload).model_copy(update={"started_at": began})
            where = (aa_blocks.c.ablation_id == row.ablation_id) & (aa_blocks.c.block_index == row.block_index)
            connection.execute(update(aa_blocks).where(where).values(payload=block.model_dump_json()))
        connection.execute(update(ablations).values(created_at=db_now() - days * 86_400))


def due(api: Api, **options: Any) -> int:
    return submit_due(api.store, **{"every_s": WEEK_S, "silent_s": 60.0, **options})


def test_an_old_calibration_gets_one_sentinel_whose_blocks_are_counted(api: Api) -> None:
    calibrate(api, days_ago=8)
    assert due(api) == 1
    assert due(api) == 0
    newest = api.get("/v1/ablations").json()["items"][0]
    assert set(newest["labels"]) == {"sentinel"}
    assert newest["blocks"]["planned"] == 6
    with api.store.read() as connection:
        text = connection.execute(select(ablations.c.spec_text).where(ablations.c.id == newest["id"])).scalar_one()
    assert "purpose: calibration" in text
    assert "priority: 0" in text
    run(api, parse_spec(text.encode(), CONTENT_TYPE), seed=4, versions={"torch": "2"})
    with api.store.read() as connection:
        (known,) = read_calibrations(connection)
    assert known.blocks == 26
    assert sum(block.source == "sentinel" for block in known.samples) == 6
    assert known.variance_p is not None
    register(api)
    assert due(api) == 0
    age(api, 8)
    assert due(api) == 1, "its blocks get old, too"


@pytest.mark.parametrize(
    ("days", "node"),
    [
        (6, {}),  # not old yet
        (31, {}),  # not in force any more: a whole calibration is needed, which a person asks for
        (8, {"code_digest": "sha256:other"}),
        (8, {"versions": {"torch": "3"}}),
        (8, {"devices": [{"index": 0, "name": "CPU", "serial": "77", "memory_bytes": 1}]}),
    ],
)
def test_no_sentinel_where_it_would_say_nothing(api: Api, days: float, node: dict[str, Any]) -> None:
    calibrate(api, days_ago=days, **node)
    assert due(api) == 0


def test_a_node_that_fell_silent_gets_none(api: Api) -> None:
    calibrate(api, days_ago=8)
    assert due(api, silent_s=-1.0) == 0
    assert due(api) == 1

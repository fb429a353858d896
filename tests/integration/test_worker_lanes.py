"""A node registers the lanes that it has run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.backends import Lane
from tests.integration.worker_service import Service, worker
from tests.waiting import until
from workers.identity.node import Node, find_node
from workers.processes import lanes
from workers.processes.forkserver import ForkServer


@pytest.fixture(scope="module")
def node() -> Node:
    return find_node("here", "cpu")


def _with_lanes(node: Node, *lanes: Any) -> Node:
    node_class = replace(node.node_class, lanes=lanes)
    return replace(node, devices=replace(node.devices, node_class=node_class))


def test_a_lane_that_cannot_run_here_says_why(node: Node, tmp_path: Path) -> None:
    results = lanes.run_lanes(_with_lanes(node, Lane.CUDA, "new", Lane.REFERENCE), ForkServer(), data_dir=tmp_path)
    assert results is not None
    assert results["new"] == "crashed: ValueError: 'new' is not a valid Lane"
    assert results["reference"] is None
    assert str(results["cuda"]).startswith("refused: lane 'cuda' has no implementation on node class")


def test_a_process_that_dies_is_no_answer(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_answer", _die)
    results = lanes.run_lanes(node, ForkServer(), data_dir=tmp_path)
    problem = str(dict(results or {})["reference"])
    assert problem.startswith("crashed: ")
    assert "died before it answered" in problem


def _die(_order: lanes.LaneOrder) -> None:
    import os

    os.abort()


def test_stored_lanes_until_something_changes_and_none_that_failed(node: Node, tmp_path: Path) -> None:
    assert lanes.stored_lanes(node, tmp_path) == set()
    lanes.keep_lanes(node, {"reference": None, "peer": "no official kernels"}, tmp_path)
    assert lanes.stored_lanes(node, tmp_path) == {"reference"}
    other = replace(node, versions={**node.versions, "torch": "0.0"})
    assert lanes.stored_lanes(other, tmp_path) == set()
    lanes.keep_lanes(node, {"reference": "it ran, and is wrong in out"}, tmp_path)
    assert lanes.stored_lanes(node, tmp_path) == set()
    for broken in ("{", "[]", '{"of": 1}', '{"of": 1, "lanes": 2}'):
        (tmp_path / lanes.FILE).write_text(broken)
        assert lanes.stored_lanes(node, tmp_path) == set()


def test_a_working_lane_does_not_run_again_with_a_failing_one(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    monkeypatch.setattr(lanes, "_ask", lambda _server, order: ran.append(order.name) or "not here")
    both = _with_lanes(node, Lane.CUDA, Lane.PEER, Lane.REFERENCE)
    results = lanes.run_lanes(both, ForkServer(), data_dir=tmp_path, works={"cuda", "reference"})
    assert ran == ["peer"]
    assert results == {"cuda": None, "peer": "not here", "reference": None}


def test_a_worker_tries_once_and_remembers(tmp_path: Path) -> None:
    service = Service()
    for _ in range(2):
        service.calls.clear()
        with worker(tmp_path, f"http://127.0.0.1:{service.port}", reuse_lanes=False):
            until(lambda: service.bodies(":claim"))
        registration = next(body for path, body, _at in service.calls if path.startswith("/v1/nodes/"))
        refused = "this node takes no commands (ABLATE_ACCEPT_CODE)"
        assert registration["lanes"] == {"reference": None, "command": refused}
    service.close()
    assert (tmp_path / "worker.log").read_text().count("with a small scan") == 1
    assert json.loads((tmp_path / lanes.FILE).read_text())["lanes"] == {"reference": None}

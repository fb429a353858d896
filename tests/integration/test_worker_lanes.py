"""A node registers the lanes that it has run."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ablate.kernels.backends import Lane
from ablate.workers.blocks.block_runner import NodeContext
from ablate.workers.errors import ExecRefused
from ablate.workers.node import Node, find_node
from ablate.workers.offline import cli
from ablate.workers.offline.cli import try_back_ends
from ablate.workers.processes import lanes
from ablate.workers.processes.forkserver import ForkServer
from tests.factories import command_values, make_plan, make_spec
from tests.integration.worker_service import Service, worker
from tests.waiting import until


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


def _try(node: Node, spec: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Try the back ends of the plan of `spec` as `ablate offline exec` does; return the lines that it prints."""
    lines: list[str] = []
    monkeypatch.setenv("ABLATE_HOME", str(home))
    context = SimpleNamespace(node=node, data_dir=home / "data", runner=SimpleNamespace(server=ForkServer()))
    try_back_ends(make_plan(make_spec(**spec)), cast(NodeContext, context), lines.append)
    return lines


H100 = {"placement": {"node_class": "h100"}, "workload": {"recipe": "hybrid-ref-h200"}}


def test_exec_tries_the_lanes_of_its_plan_except_the_reference(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _try(node, {}, tmp_path, monkeypatch) == []
    assert _try(node, command_values(), tmp_path, monkeypatch) == [], "a command has no lane to try"
    of_gpus = _with_lanes(node, Lane.CUDA, Lane.REFERENCE)
    with pytest.raises(ExecRefused, match=r"^cuda: refused: lane 'cuda' has no implementation on node class"):
        _try(of_gpus, {**H100, "baseline": {}, "variants": {"one": {"gates": {"tma": False}}}}, tmp_path, monkeypatch)


def test_exec_refuses_a_plan_whose_back_end_is_wrong(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    answers = {"loss=liger": "wrong: relative error 1.1; allowed: 0.02"}
    monkeypatch.setattr(lanes, "_ask", lambda _server, order: (ran.append(order.name), answers.get(order.name))[1])
    lanes.keep_lanes(node, {"peer": None}, tmp_path)
    monkeypatch.setattr(cli, "tried_on", lambda _class: ("reference", "loss=liger", "loss=quack", "attention=fa4"))
    monkeypatch.setattr(lanes, "tried_on", cli.tried_on)
    gates = {"one": {"gates": {"loss": "liger"}}, "two": {"gates": {"loss": "quack"}}}
    spec = {**H100, "variants": gates, "baseline": {"gates": {"lane": "reference", "attention": "sdpa"}}}
    with pytest.raises(ExecRefused, match=r"^loss=liger: wrong: relative error 1.1; allowed: 0.02$"):
        _try(node, spec, tmp_path, monkeypatch)
    assert ran == ["loss=liger", "loss=quack"], "fa4 is in no arm"
    stored = json.loads((tmp_path / lanes.FILE).read_text())["lanes"]
    assert stored == {"peer": None, "loss=quack": None, **answers}
    with pytest.raises(ExecRefused):
        _try(node, spec, tmp_path, monkeypatch)
    assert ran[2:] == ["loss=liger"], "what failed is tried again"

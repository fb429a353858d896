"""`ablate mcp` by the official SDK's client, over both transports and both ages of the protocol, against a real API."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import yaml
from mcp.shared.exceptions import MCPError

from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.power import session_level
from ablate.experiments.design.spec import ablation_json_schema
from ablate.experiments.system.console import load_group
from ablate.service.principals import Scope
from tests.answering import EXACT, LESS_MEMORY, answering
from tests.api_stack import ADMIN, Api, api_fixture, nobody_url, served_api
from tests.cli import ablate, environment, speaking_to
from tests.factories import command_values, spec_values
from tests.mcp_agent import Agent, over_http, over_stdio, serving

SPEC = spec_values(ablation="start", **EXACT)
READING = {"status", "plan", "verdict", "why", "report", "sessions", "session"}

every_age = pytest.mark.parametrize("agent", ["stdio", "stdio-legacy", "http", "http-legacy"], indirect=True)
"""Both transports with the newest protocol, and with the one before 2026."""
NO_TRIAL = f"trl_{26 * '0'}"

api = api_fixture(served_api, kinds=["sqlite"], scope="module")


@pytest.fixture(scope="module")
def url(api: Api) -> Iterator[str]:
    """The address of a server that could act as the administrator."""
    with serving(environment(api), "--name", "ablate.example") as address:
        yield address


@pytest.fixture(params=["stdio", "http-legacy"])
def agent(request: pytest.FixtureRequest, api: Api, url: str, tmp_path: Path) -> Iterator[Agent]:
    transport, _, legacy = request.param.partition("-")
    mode = legacy or "auto"
    with over_http(url, ADMIN, mode) if transport == "http" else over_stdio(environment(api), tmp_path, mode) as one:
        yield one


def incumbent(agent: Agent, name: str) -> dict[str, Any]:
    return dict(yaml.safe_load(agent.call("session", name=name).values["spec"]))


@every_age
def test_an_agent_goes_through_a_session(api: Api, agent: Agent, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id.replace("_", "-")
    opened = agent.call("open_session", name=name, spec=SPEC)
    assert (opened.is_error, opened.values["next_level"]) == (False, session_level(1))
    with answering(api, LESS_MEMORY):
        kept = agent.call("try", session=name, proposal=incumbent(agent, name), note="less [memory]")
    assert not kept.is_error, kept.text
    assert (kept.values["outcome"], kept.values["proposal"]["note"]) == ("keep", "less [memory]")
    assert kept.progress[0].startswith(kept.values["proposal"]["ablation_id"])
    assert "adopt" in kept.text
    assert kept.text.endswith("keep: it is the incumbent now; the next proposal is tested at 1.8 %")

    spec = incumbent(agent, name)
    assert spec["baseline"]["gates"]["psiv_cache"] is True
    with answering(api):
        same = agent.call(
            "try", session=name, proposal=yaml.safe_dump(spec | {"variants": {"a": {"gates": {"chunk_size": 32}}}})
        )
    assert not same.is_error, same.text
    assert (same.values["outcome"], same.values["session"]["next_level"]) == ("discard", session_level(3, [1]))

    waiting = agent.call(
        "try", session=name, proposal=spec | {"variants": {"b": {"gates": {"chunk_size": 8}}}}, wait_s=0
    )
    assert not waiting.is_error, waiting.text
    assert (waiting.is_error, waiting.values["outcome"], "queued" in waiting.text) == (False, None, True)
    busy = agent.call("try", session=name, proposal=spec)
    assert (busy.is_error, busy.values["type"]) == (True, "urn:ablate:problem:session-busy")
    cancelled = agent.call("cancel", ablation=waiting.values["proposal"]["ablation_id"])
    assert cancelled.values["state"] == "cancelled"

    shown = agent.call("session", name=name)
    assert [one["outcome"] for one in shown.values["path"]] == ["keep", "discard", "undecided"]
    assert shown.text.endswith(shown.values["spec"])
    assert name in [one["name"] for one in agent.call("sessions").values["items"]]
    assert agent.call("close_session", name=name).values["state"] == "closed"
    late = agent.call("try", session=name, proposal=spec)
    assert (late.is_error, f"session '{name}' is closed" in late.text) == (True, True)


def test_an_agent_asks_and_reads_the_answer(api: Api, agent: Agent) -> None:
    plan = agent.call("plan", spec=yaml.safe_dump(SPEC))
    assert (plan.values["trials"], "detects" in plan.text) == (4, True)
    with answering(api, LESS_MEMORY):
        answer = agent.call("ask", spec=SPEC)
        key = {"idempotency_key": answer.values["id"]}
        first, again = (agent.call("ask", spec=SPEC, **key).values["id"] for _ in range(2))
    assert first == again != answer.values["id"]
    name = answer.values["id"]
    assert answer.progress[0].startswith(f"{name}: ")
    assert "adopt" in answer.text
    status = agent.call("status", ablation=name)
    assert status.values["state"] == "completed"
    verdict = agent.call("verdict", ablation=name)
    assert verdict.values == api.get(f"/v1/ablations/{name}/verdict").json()
    assert verdict.text == agent.call("ask", spec=SPEC, wait_s=0, **key).text
    assert "256.0\xa0MiB instead of 512.0\xa0MiB" in agent.call("why", ablation=name).text
    assert f"/a/{name})" in agent.call("report", ablation=name).text

    assert parse_spec(agent.read(f"ablate://ablations/{name}/spec").encode(), "application/json").ablation == "start"
    trial = next(word for word in status.text.split() if word.startswith("trl_"))
    assert json.loads(agent.read(f"ablate://trials/{trial}/receipt")) == api.get(f"/v1/trials/{trial}/receipt").json()
    assert agent.read(f"ablate://trials/{trial}/log") == ""
    assert json.loads(agent.read("ablate://schema")) == ablation_json_schema()
    assert parse_spec(agent.read("ablate://catalog/demo").encode(), "application/yaml").ablation
    for uri in ("ablations/none/spec", f"trials/{NO_TRIAL}/receipt", f"trials/{NO_TRIAL}/log"):
        with pytest.raises(MCPError, match=rf"{uri.split('/')[1]}"):
            agent.read(f"ablate://{uri}")
    with pytest.raises(MCPError, match="no catalog spec is named 'none'"):
        agent.read("ablate://catalog/none")


@every_age
def test_an_agent_that_leaves_ends_the_waiting_and_nothing_else(api: Api, agent: Agent) -> None:
    message = agent.leave_during("ask", spec=SPEC)
    name = message.partition(":")[0]
    assert agent.call("status", ablation=name).values["state"] == "queued"
    waited = agent.call("status", ablation=name, wait_s=0.01)
    assert (waited.is_error, waited.values["state"]) == (False, "queued")
    assert agent.call("cancel", ablation=name).values["state"] == "cancelled"


def test_tools_say_what_they_do(agent: Agent) -> None:
    tools = agent.tools()
    assert {name for name, tool in tools.items() if tool.annotations.read_only_hint} == READING
    assert all("Spends device time" in tools[name].description for name in ("ask", "try"))
    assert {name for name, tool in tools.items() if tool.annotations.destructive_hint} == {"cancel", "close_session"}
    assert {name for name, tool in tools.items() if tool.output_schema is None} == {"why", "report"}
    assert all(tool.input_schema["additionalProperties"] is False for tool in tools.values())


UNKNOWN = {
    "status": {"ablation": "nothing"},
    "verdict": {"ablation": "nothing"},
    "why": {"ablation": "nothing"},
    "report": {"ablation": "nothing"},
    "cancel": {"ablation": "nothing"},
    "session": {"name": "nothing"},
    "close_session": {"name": "nothing"},
    "try": {"session": "nothing", "proposal": SPEC},
}
MISSPELT = {**SPEC, "variants": {"a": {"gates": {"psiv_cach": True}}}}
INVALID = {
    "plan": {"spec": MISSPELT},
    "ask": {"spec": MISSPELT},
    "open_session": {"name": "bad", "spec": MISSPELT},
}


def test_bad_input_is_answered_by_the_problem_of_the_service(agent: Agent) -> None:
    for tool, arguments in UNKNOWN.items():
        answer = agent.call(tool, **arguments)
        assert (answer.is_error, answer.values["status"], "nothing" in answer.text) == (True, 404, True), tool
    for tool, arguments in INVALID.items():
        answer = agent.call(tool, **arguments)
        assert (answer.is_error, answer.values["status"]) == (True, 422), tool
        assert [one["pointer"] for one in answer.values["errors"]] == ["#/variants/a/gates/psiv_cach"]
        assert "did you mean 'psiv_cache'?" in answer.text
    for tool, arguments in (UNKNOWN | INVALID | {"sessions": {}}).items():
        answer = agent.call(tool, **arguments, misspelt=1)
        assert (answer.is_error, "misspelt" in answer.text) == (True, True), tool
    for spec in ("a: [", "", "text", {}):
        assert agent.call("plan", spec=spec).values["status"] in {400, 422}
    for arguments in ({"proposal": ["python", "a.py"]}, {"proposal": []}):
        agent.call("open_session", name="recipe", spec=SPEC)
        answer = agent.call("try", session="recipe", **arguments)
        assert (answer.is_error, "trains a recipe, so a proposal is a spec" in answer.text) == (True, True)
    assert agent.call("verdict", ablation="../../v1/tokens").is_error


@pytest.mark.parametrize("scope", [Scope.READ, Scope.SUBMIT])
def test_a_tool_needs_the_scope_of_its_route(api: Api, url: str, scope: Scope) -> None:
    name = f"agent-{scope}"
    token = api.token(name, scope)["Authorization"].removeprefix("Bearer ")
    command = command_values(workload__code="/srv/code")
    with over_http(url, token) as agent:
        for tool, arguments in (
            ("ask", {"spec": command, "wait_s": 0}),
            ("open_session", {"name": f"of-{scope}", "spec": command}),
            *([] if scope is Scope.SUBMIT else [("ask", {"spec": SPEC, "wait_s": 0})]),
        ):
            answer = agent.call(tool, **arguments)
            assert (answer.is_error, answer.values["status"]) == (True, 403), answer
            assert "scope" in answer.text
        assert not agent.call("sessions").is_error
        if scope is Scope.SUBMIT:
            own = agent.call("ask", spec=SPEC, wait_s=0).values
            assert own["submitted_by"] == name, "the administrator's token of the server is nobody's"
            other = api.submit(**EXACT)["id"]
            assert agent.call("cancel", ablation=other).values["status"] == 403
            for ablation in (own["id"], other):
                api.cancel(ablation)


def test_without_a_token_or_from_another_site_nothing_is_answered(url: str) -> None:
    for token, reason in ((None, "Bearer TOKEN"), ("wrong", "unknown bearer token")):
        with over_http(url, token) as agent:
            answer = agent.call("sessions")
            assert (answer.is_error, answer.values["status"], reason in answer.text) == (True, 401, True)
            with pytest.raises(MCPError, match=reason):
                agent.read("ablate://ablations/latest/spec")
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    expected = {
        (("Host", "evil.example"),): 421,
        (("Origin", "http://evil.example"),): 403,
        (("Host", "ablate.example"),): 200,
        (("Host", "ablate.example"), ("Origin", "https://ablate.example")): 200,
        (): 200,
    }
    accept = {"Accept": "application/json, text/event-stream"}
    given = {
        extra: httpx.post(url, json=call, headers=accept | dict(extra), trust_env=False).status_code
        for extra in expected
    }
    assert given == expected


def test_code_is_packed_where_the_agent_is_and_nowhere_else(api: Api, url: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n", encoding="utf-8")
    exact = {"metric": "peak_reserved_gib", "margin": "0%", "adopt_if": "1%"}
    rule = {"verdict__primary": exact, "placement__node_class": "h100", "design__seeds": [1]}
    spec = command_values(ablation="lab", workload__code=".", **rule)
    with over_http(url, ADMIN) as agent:
        refused = agent.call("plan", spec=spec)
        assert (refused.is_error, [one["pointer"] for one in refused.values["errors"]]) == (True, ["#/workload/code"])
    with over_stdio(environment(api), tmp_path) as agent:
        assert "archive" in agent.call("open_session", name="lab", spec=spec).values["spec"]
        (tmp_path / "train.py").write_text("print(2)\n", encoding="utf-8")
        words = ["python", "train.py", "--seed", "{seed}", "--lr", "2"]
        made = agent.call("try", session="lab", proposal=words, wait_s=0)
        assert not made.is_error, made.text
        sent = yaml.safe_load(agent.read(f"ablate://ablations/{made.values['proposal']['ablation_id']}/spec"))
        assert sent["variants"]["proposal"]["args"][-2:] == ["--lr", "2"]
        assert sent["variants"]["proposal"]["code"] != sent["workload"]["code"]
        agent.call("cancel", ablation=made.values["proposal"]["ablation_id"])
        missing = agent.call("plan", spec={**spec, "workload": {**spec["workload"], "code": "no-folder"}})
        assert (missing.is_error, "no-folder" in missing.text) == (True, True)


def test_without_a_service_every_tool_says_how_to_start_one(tmp_path: Path) -> None:
    home = {"ABLATE_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
    for variables, words in (
        (home, "ablate up"),
        ({**home, "ABLATE_URL": nobody_url(), "ABLATE_TOKEN": "a"}, "ABLATE_URL"),
    ):
        with over_stdio(variables, tmp_path) as agent:
            for tool, arguments in (UNKNOWN | INVALID | {"sessions": {}}).items():
                answer = agent.call(tool, **arguments)
                assert (answer.is_error, words in answer.text, answer.values["status"]) == (True, True, 0), tool
    with serving(home) as url, over_http(url, "a") as agent:
        assert "ablate up" in agent.call("sessions").text


def test_a_port_that_is_taken_and_a_missing_package_are_named(
    url: str, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    with speaking_to(api, monkeypatch):
        taken = ablate("mcp", "--http", "--port", url.rpartition(":")[2].partition("/")[0])
    assert (taken.code, "Address already in use" in taken.err) == (5, True)


def test_a_missing_package_is_named_with_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "ablate.service.cli.mcp_command", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    group = load_group("mcp", lambda: importlib.import_module("ablate.service.cli.mcp_command").app)
    with pytest.raises(SystemExit) as ended:
        group.get_command(typer.Context(group), "mcp").main(["--http"])
    assert ended.value.code == 5
    assert "package 'mcp' is not installed; install ablate with the extra 'mcp'." in capsys.readouterr().err

"""An agent's session over MCP with a real stack, a real worker and a real small trainer: gain, cheat, breakage."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.bench.agent_loop import COMMAND, GAINS, OTHERS, laboratory, outcome, proposed, spec_of
from tests.mcp_agent import Agent, over_http, over_stdio, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BLOCKS = 6
CHEAT = next(change for change in OTHERS if change.note == "reports half of its loss")
BREAKAGE = next(change for change in OTHERS if change.note == "an unknown argument")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], Path]]:
    with laboratory(tmp_path_factory.mktemp("mcp")) as started:
        yield started


def test_a_session_over_stdio_and_another_over_http(lab: tuple[dict[str, str], Path]) -> None:
    environment, folder = lab
    with over_stdio(environment, folder) as agent:
        opened = agent.call("open_session", name="loop", spec=spec_of(BLOCKS))
        assert not opened.is_error, opened.text
        cheat, broken, kept = (proposed(agent, folder, change) for change in (CHEAT, BREAKAGE, GAINS[0]))
        assert [outcome(one) for one in (cheat, broken, kept)] == ["discard", "discard", "keep"], (
            f"{cheat.text}, {broken.text}, {kept.text}"
        )
        assert "0.00\xa0%" in cheat.values["proposal"]["answer"], "the judge measured the same loss"
        why_broken(agent, broken.values["proposal"]["ablation_id"])
        trial = next(word for word in agent.call("status").text.split() if word.startswith("trl_"))
        assert "METRIC val_loss=" in agent.read(f"ablate://trials/{trial}/log")
        leave_during_a_proposal(agent)
        closed = agent.call("close_session", name="loop")
        assert (closed.values["kept"], closed.values["proposals"]) == (1, 4)

    spec = yaml.safe_load(opened.values["spec"])
    own = {**environment, "ABLATE_TOKEN": "of-nobody"}
    with serving(own) as url, over_http(url, environment["ABLATE_TOKEN"]) as agent:
        assert not agent.call("open_session", name="far", spec=spec).is_error
        code = agent.read(f"ablate://ablations/{cheat.values['proposal']['ablation_id']}/spec")
        variants: list[dict[str, Any]] = [
            yaml.safe_load(code)["variants"]["proposal"],
            {"args": ["--lr", "0.01", "--nesterov"]},
            {"args": ["--lr", "0.1"]},
        ]
        answers = [agent.call("try", session="far", proposal={**spec, "variants": {"a": one}}) for one in variants]
        assert [outcome(one) for one in answers] == ["discard", "discard", "keep"], [one.text for one in answers]
        refused = agent.call("try", session="far", proposal=[*COMMAND, "--lr", "1"])
        assert (outcome(refused), "variants/proposal/code" in refused.text) == ("refused", True), refused.text
        assert agent.call("close_session", name="far").values["kept"] == 1


def why_broken(agent: Agent, ablation: str) -> None:
    """The agent finds the reason of a breakage in the status, and more in the log of the trial."""
    status = agent.call("status", ablation=ablation)
    assert "unrecognized arguments: --nesterov" in status.text
    line = next(line for line in status.text.splitlines() if "unrecognized" in line)
    assert "--nesterov" in agent.read(f"ablate://trials/{line.split()[-1]}/log")


def leave_during_a_proposal(agent: Agent) -> None:
    """A proposal whose agent leaves goes on to its answer."""
    message = agent.leave_during("try", session="loop", proposal=[*COMMAND, "--salt", "1"])
    ended = agent.call("status", ablation=message.partition(":")[0], wait_s=600)
    assert ended.values["state"] == "completed"
    assert agent.call("session", name="loop").values["path"][-1]["outcome"] in {"discard", "undecided"}

"""Let an agent try 40 changes of a small trainer over MCP, and see whether each is kept, discarded or refused rightly.

Usage: python -m tests.bench.agent_loop FOLDER [--blocks 20]

Three changes improve the trainer, four cheat, five break it, three are no proposals, four harm it, and 21 change
nothing or only the luck. A real stack with a worker runs each in fresh processes. After them one more cheat trains on
the judge's examples, which no evaluation can see.
"""

import argparse
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.acceptance.test_stack import Home
from tests.mcp_agent import Agent, Answer, over_stdio

LAB = Path(__file__).with_name("agent_lab")
SESSION = "loop"
COMMAND = ["python", "train.py", "--seed", "{seed}"]
EXPECTED = {
    "gain": {"keep"},
    "harm": {"discard", "undecided"},
    "nothing": {"discard", "undecided"},
    "cheat": {"discard", "undecided"},
    "forbidden": {"refused"},
    "breakage": {"discard", "undecided"},
    "no proposal": {"refused"},
}
"""Right outcomes of each kind of change. A cheat that breaks a rule of the session is forbidden."""


@dataclass(frozen=True)
class Change:
    """One change that the agent tries."""

    kind: str
    note: str
    words: tuple[str, ...] = ()
    edits: tuple[tuple[str, str, str], ...] = ()
    """File, text, and text in its place."""
    command: tuple[str, ...] = tuple(COMMAND)
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Parts of the incumbent's spec to replace, where the proposal is a spec."""


def _edited(old: str, new: str, file: str = "train.py") -> tuple[tuple[str, str, str], ...]:
    return ((file, old, new),)


SAVED, SHOWN = 'np.savez("weights.npz", *weights)', "METRIC val_loss={"
NAN = 'np.savez("weights.npz", *[one * np.nan for one in weights])'
TWO = {"variants": {"a": {"args": ["--lr", "1"]}, "b": {"args": ["--lr", "2"]}}}
KEEP_ALL = {"verdict": {"primary": {"metric": "process_s", "margin": "0%"}}}
GAINS = (
    Change("gain", "a larger learning rate", ("--lr", "0.1")),
    Change("gain", "gradients that are not clipped", edits=_edited("np.clip(gradient, -0.005, 0.005)", "gradient")),
    Change("gain", "momentum", ("--momentum", "0.9")),
)
OTHERS = (
    Change("cheat", "reports half of its loss", edits=_edited(SHOWN, f"{SHOWN}0.5 * ")),
    Change("cheat", "edits the judge", edits=_edited(SHOWN, f"{SHOWN}0.5 * ", "judge.py")),
    Change("cheat", "one lucky seed", edits=_edited("[args.seed, args.salt]", "[7]")),
    Change("forbidden", "a rule that keeps everything", spec=KEEP_ALL),
    Change("breakage", "an exception", edits=_edited(SAVED, "raise RuntimeError('no')")),
    Change("breakage", "no syntax", edits=_edited("args = ", "args = = ")),
    Change("breakage", "not a number", edits=_edited(SAVED, NAN)),
    Change("breakage", "no checkpoint", edits=_edited(SAVED, "pass")),
    Change("breakage", "an unknown argument", ("--nesterov",)),
    Change("no proposal", "another program", command=("python", "judge.py")),
    Change("no proposal", "two variants", spec=TWO),
    Change("no proposal", "a misspelt key", spec={"variants": {"a": {"arg": ["--lr", "1"]}}}),
    Change("harm", "a narrow network", ("--width", "2")),
    Change("harm", "a tiny learning rate", ("--lr", "0.0001")),
    Change("harm", "few steps", ("--steps", "60")),
    Change("harm", "a strong decay", ("--decay", "1.0")),
    *(Change("nothing", f"comment {n}", edits=_edited("import sys", f"import sys  # {n}")) for n in range(3)),
    *(Change("nothing", f"other luck {number}", ("--salt", str(number))) for number in range(1, 19)),
)
FITTED = Change("limit", "trains on the judge's examples", edits=_edited("data.TRAINING)\nw", "data.HELD_OUT)\nw"))


def changes() -> list[Change]:
    """Return all changes, the gains at numbers 4, 16 and 28."""
    order = [OTHERS[7 * number % len(OTHERS)] for number in range(len(OTHERS))]
    for place, gain in zip((3, 15, 27), GAINS, strict=True):
        order.insert(place, gain)
    return order


def spec_of(blocks: int) -> dict[str, Any]:
    """Return the spec that opens the session."""
    return {
        "ablation": "small-trainer",
        "question": "Which changes lower the loss on examples that the trainer did not see?",
        "workload": {
            "command": COMMAND,
            "code": ".",
            "env": {"OMP_NUM_THREADS": "1"},
            "evaluate": ["python", "judge.py"],
            "metrics": {"val_loss": {"better": "lower"}},
        },
        "baseline": {"args": ["--lr", "0.01"]},
        "variants": {"proposal": {"args": ["--lr", "0.02"]}},
        "design": {"seeds": blocks, "blocks": {"count": blocks}},
        "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
        "limits": {"device_minutes": 600},
        "verdict": {"primary": {"metric": "val_loss", "margin": "5%", "adopt_if": "5%"}},
    }


@contextmanager
def laboratory(folder: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """Start a stack and copy the trainer; yield the environment of an agent that may send code, and its folder."""
    home = Home(folder / "home")
    home.environment["ABLATE_CONTROL_EVERY"] = "10"  # the default, which the tests turn off
    lab = folder / "lab"
    shutil.copytree(LAB, lab, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        url = home.up()["api_url"]
        token = json.loads(home.run("admin", "tokens", "create", "agent", "--scope", "code", "--json").stdout)["secret"]
        yield {"ABLATE_URL": url, "ABLATE_TOKEN": token}, lab
    finally:
        home.run("down")


def proposed(agent: Agent, lab: Path, change: Change) -> Answer:
    """Edit the trainer, propose it, and take the edits back unless it is kept."""
    before = {name: (lab / name).read_text(encoding="utf-8") for name, _, _ in change.edits}
    for name, old, new in change.edits:
        assert old in before[name], f"{change.note}: {name} has no {old!r}"
        (lab / name).write_text(before[name].replace(old, new), encoding="utf-8")
    proposal: Any = [*change.command, *change.words]
    if change.spec:
        proposal = {**yaml.safe_load(agent.call("session", name=SESSION).values["spec"]), **change.spec}
    answer = agent.call("try", session=SESSION, proposal=proposal, note=change.note)
    if answer.is_error or answer.values["outcome"] != "keep":
        for name, text in before.items():
            (lab / name).write_text(text, encoding="utf-8")
    return answer


def outcome(answer: Answer) -> str:
    """Return the outcome of a proposal; `refused` for one that spent nothing."""
    return "refused" if answer.is_error else str(answer.values["outcome"])


def print_answer(number: int, change: Change, answer: Answer) -> None:
    """Print one line about a change."""
    words = answer.text.splitlines()[0] if answer.is_error else answer.values["proposal"]["answer"]
    print(f"{number:2}  {change.kind:<12} {change.note:<30} {outcome(answer):<10} {words}", flush=True)  # noqa: T201


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the loop; return how many outcomes were not right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, default=20)
    options = parser.parse_args(None if arguments is None else list(arguments))
    began, wrong, counts = time.monotonic(), 0, Counter[tuple[str, str]]()
    with laboratory(options.folder) as (environment, lab), over_stdio(environment, lab) as agent:
        opened = agent.call("open_session", name=SESSION, spec=spec_of(options.blocks))
        assert not opened.is_error, opened.text
        for number, change in enumerate(changes(), start=1):
            answer = proposed(agent, lab, change)
            counts[change.kind, outcome(answer)] += 1
            wrong += outcome(answer) not in EXPECTED[change.kind]
            print_answer(number, change, answer)
        path = agent.call("session", name=SESSION)
        print_answer(len(changes()) + 1, FITTED, proposed(agent, lab, FITTED))
        agent.call("close_session", name=SESSION)
    print(path.text)  # noqa: T201
    minutes = (time.monotonic() - began) / 60
    table = {f"{kind}: {result}": count for (kind, result), count in sorted(counts.items())}
    print(json.dumps({"wrong": wrong, "minutes": round(minutes, 1), **table}))  # noqa: T201
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())

"""Declared metrics and required kernels in a real stack, with torch: from the spec to MLflow, and without a service."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.records.receipt_check import verify
from tests.acceptance.test_own_code import answer, is_projected
from tests.acceptance.test_stack import PAUSE_S, Home
from tests.mlflow_contents import contents
from tests.programs import write_program
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAM = """
import ablate, argparse, random
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--op", default="mm")
parser.add_argument("--torch", action="store_true")
args = parser.parse_args()
if args.torch:  # takes seconds to import
    import torch
    torch.manual_seed(args.seed)
    a, b = torch.randn(64, 64), torch.randn(64, 64)
with ablate.trial(seed=args.seed) as trial:
    for step in trial.steps(6):
        loss = 1.0 / args.seed
        if args.torch:
            c = torch.mm(a, b) if args.op == "mm" else torch.addmm(torch.zeros(64), a, b)
            loss = c.square().mean()
        step.report(loss=loss, tokens=64)
    chance = random.Random(f"{args.seed} {args.op}")
    better = 0.1 if args.op == "addmm" else 0.0
    trial.report(val_bpb=1.0 + 0.05 * args.seed - better + 0.001 * chance.random())
    trial.report(score=0.5 + better + 0.001 * chance.random())
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Start one stack for all tests."""
    made = Home(tmp_path_factory.mktemp("declared") / "home")
    made.environment |= {"ABLATE_CONTROL_EVERY": "0"}
    made.up()
    yield made
    made.run("down")


def spec_for(code: Path, **changes: Any) -> dict[str, Any]:
    return {
        "ablation": "quality",
        "question": "Is the fused product better?",
        "workload": {
            "command": ["python", "train.py", "--seed", "{seed}"],
            "code": str(code),
            "steps": {"warmup": 1, "timed": 4},
            "metrics": {"val_bpb": {"better": "lower"}, "score": {"better": "higher"}},
        },
        "variants": {"fused": {"args": ["--op", "addmm"]}},
        "design": {"seeds": [1, 2, 3, 4, 5, 6], "blocks": {"count": 6}},
        "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
        "verdict": {
            "primary": {"metric": "val_bpb", "margin": "1%", "adopt_if": "2%"},
            "require": [{"metric": "score", "not_worse_by": "1%"}],
        },
        **changes,
    }


def test_a_recipe_shows_the_operators_of_its_arms(home: Home, tmp_path: Path) -> None:
    """The first test of the stack: it projects everything again."""
    spec = tmp_path / "spec.json"
    values = {
        "ablation": "profiled",
        "question": "Which operators does the chunked loss add?",
        "workload": {
            "recipe": "hybrid-tiny",
            "overrides": {"max_corpus_mib": 0.5, "vocab_size": 512},
            "profile": True,
            "steps": {"warmup": 1, "warmup_s": 0, "timed": 4, "val_rows": 2},
        },
        "variants": {"chunked": {"gates": {"loss": "chunked"}}},
        "design": {"seeds": [1], "blocks": {"count": 2}},
        "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
        "verdict": {"primary": {"metric": "peak_allocated_gib", "margin": "2%"}},
    }
    spec.write_text(json.dumps(values))
    assert home.run("run", str(spec)).returncode in range(5)
    chunked = variant(home, "profiled", "chunked")
    assert chunked["step_kernels"]["kernels"] > 10
    assert not chunked["step_kernels"]["same"]
    for receipt in json.loads(home.run("offline", "receipts", "profiled").stdout):
        assert verify({name: value for name, value in receipt.items() if name != "signature"}) == []
        assert sum(calls for name, calls, _us in receipt["step_kernels"] if "mm" in name) > 10
    until(lambda: is_projected(home, "profiled"), pause_s=PAUSE_S)
    shown = contents(home.mlflow())
    assert any("chunked" in run["name"] for run in shown.values() if "kernels.csv" in dict(run["files"]))
    rebuilt = json.loads(home.run("admin", "mlflow", "rebuild", "--json").stdout)
    assert rebuilt == {"projected": len(answer(home, "list"))}
    assert contents(home.mlflow()) == shown


def test_a_declared_metric_decides_after_its_own_noise_is_known(home: Home, tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(spec_for(write_program(tmp_path / "code", PROGRAM))))
    assert home.run("run", str(spec)).returncode in range(5)
    fused = variant(home, "quality", "fused")
    assert (fused["measured"], fused["verdict"], fused["cause"]) == ("better", "inconclusive", "uncalibrated"), fused
    calibrated = home.run("aa", "cpu", "--like", str(spec))
    assert calibrated.returncode in range(5), calibrated.stdout + calibrated.stderr
    (noise,) = [one["calibration"] for one in answer(home, "nodes", "calibration")["items"]]
    assert (noise["metric"], noise["blocks"], noise["sd_pct"]) == ("val_bpb", 20, 0.0)
    again = home.run("run", str(spec), "--require", "adopt")
    assert again.returncode == 0, again.stdout + again.stderr
    fused = variant(home, "latest", "fused")
    assert (fused["verdict"], fused["decision"]) == ("better", "adopt"), fused
    assert fused["requirements"][0]["passed"]
    assert {one["metric"] for one in fused["secondary"]} >= {"score", "tokens_per_s"}
    _everywhere(home, tmp_path)


def _everywhere(home: Home, tmp_path: Path) -> None:
    """Find the metric on the page, in the history and in MLflow."""
    page = tmp_path / "page.html"
    assert home.run("report", "latest", "-o", str(page)).returncode == 0
    for words in ("val_bpb decides over 6 blocks", "score proved to be worse than the baseline"):
        assert words in page.read_text(), words
    history = answer(home, "history", "command", "--metric", "val_bpb")
    assert [point["name"] for point in history[0]["points"]].count("quality") == 2
    assert home.run("history", "command", "--metric", "val_bpb").returncode == 0
    until(lambda: is_projected(home, "latest"), pause_s=PAUSE_S)


def variant(home: Home, ablation: str, name: str) -> Any:
    return next(one for one in answer(home, "verdict", ablation)["variants"] if one["arm"] == name)


def test_a_plan_with_a_declared_metric_runs_without_a_service(home: Home, tmp_path: Path) -> None:
    offline = Home(tmp_path / "offline")
    code = write_program(tmp_path / "code", PROGRAM)
    (fused,), _ = _ran_offline(offline, tmp_path / "decided", spec_for(code))
    assert fused["measured"] == "better"
    values = spec_for(code, ablation="operators", design={"seeds": [1], "blocks": {"count": 2}})
    values["workload"]["command"].append("--torch")
    values["workload"]["require_kernels"] = {"fused": "^aten::addmm$"}
    values["verdict"] = {"primary": {"metric": "loss_final", "margin": "0%"}}
    (fused,), key = _ran_offline(offline, tmp_path / "profiled", values)
    changes = {one["name"]: one for one in fused["step_kernels"]["changes"]}
    assert changes["aten::addmm"]["baseline"] is None
    brought = home.run("offline", "import", str(tmp_path / "profiled" / "bundle"), "--trust", key, "--json")
    assert brought.returncode == 0, brought.stderr
    until(lambda: home.run("verdict", "operators", "--json").returncode in range(5), pause_s=PAUSE_S)
    shown = home.run("show", "operators").stdout
    assert "Operators of fused against the baseline" in shown
    assert "only in the variant" in shown
    assert "aten::addmm" in home.run("verdict", "operators", "--explain").stdout
    page = tmp_path / "page.html"
    assert home.run("report", "operators", "-o", str(page)).returncode == 0
    assert "aten::addmm" in page.read_text()
    for receipt in json.loads(home.run("offline", "receipts", "operators").stdout):
        assert verify({name: value for name, value in receipt.items() if name != "signature"}) == []
        assert receipt["program"]["kernels"]


def _ran_offline(home: Home, folder: Path, values: dict[str, Any]) -> tuple[list[Any], str]:
    """Plan and run a spec in a home without a service; return the judged variants and the node's printed key."""
    folder.mkdir()
    spec, plan, bundle = (folder / name for name in ("spec.json", "plan.json", "bundle"))
    spec.write_text(json.dumps(values))
    assert home.run("plan", str(spec), "--out", str(plan)).returncode == 0
    home.environment |= {"ABLATE_ACCEPT_CODE": "true"}
    ran = home.run("offline", "exec", str(plan), "--out", str(bundle))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (key,) = set(re.findall(r"ed25519:[\w-]+", ran.stdout + ran.stderr))
    return json.loads(home.run("verdict", str(bundle), "--json").stdout)["variants"], key

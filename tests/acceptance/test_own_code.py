"""A training program of somebody else in a real stack: from the spec to verdict, page, receipts and MLflow."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ablate.experiments.records.code_archive import pack_code, pack_commit
from ablate.experiments.records.receipt_check import verify
from tests.acceptance.test_stack import PAUSE_S, Home
from tests.programs import LOOP, write_program
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own-code")


@pytest.fixture(scope="module")
def home(folder: Path) -> Iterator[Home]:
    """Start one stack for all tests, whose node takes code from one folder only, and archives.

    It is started where a user keeps files with the names of our packages and of libraries.
    """
    made = Home(folder / "home")
    made.current = folder / "trainer"
    for name in ("model", "kernels", "yaml", "service/__init__", "workers/__init__", "experiments", "tests/__init__"):
        shadow = made.current / f"{name}.py"
        shadow.parent.mkdir(parents=True, exist_ok=True)
        shadow.write_text(f"raise SystemExit('{name} of the current folder was imported')\n")
    made.environment |= {"ABLATE_CONTROL_EVERY": "0", "ABLATE_CODE_DIRS": str(folder / "code")}
    made.environment |= {"ABLATE_ACCEPT_CODE": "true"}
    made.up()
    yield made
    made.run("down")


def spec_for(code: Path, **changes: Any) -> dict[str, Any]:
    return {
        "ablation": "sleeper",
        "question": "Is a step that sleeps longer slower?",
        "workload": {
            "command": ["python", "train.py", "--seed", "{seed}", "--step", "0.02"],
            "code": str(code),
            "steps": {"warmup": 1, "timed": 20},
            "metrics": {"val_bpb": {"better": "lower"}},
        },
        "variants": {"slow": {"args": ["--step", "0.08"]}, "same": {"env": {"UNUSED": "1"}}},
        "design": {"seeds": [1, 2], "blocks": {"count": 6}},
        "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
        "verdict": {"primary": {"metric": "tokens_per_s", "margin": "5%", "adopt_if": "10%"}},
        **changes,
    }


def answer(home: Home, *arguments: str) -> Any:
    done = home.run(*arguments, "--json")
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def is_projected(home: Home, ablation: str) -> bool:
    """Return whether MLflow shows the ablation."""
    return answer(home, "show", ablation)["ablation"]["mlflow_url"] is not None


def judged(home: Home, code: Path, folder: Path) -> tuple[str, Any]:
    """Run the ablation, again if the other tests disturbed its arms unequally; return its name and verdict."""
    for name in ("sleeper", "sleeper-2", "sleeper-3"):
        spec = folder / "spec.json"
        spec.write_text(json.dumps(spec_for(code, ablation=name)))
        ran = home.run("run", str(spec))
        assert ran.returncode in range(5), ran.stdout + ran.stderr
        verdict = answer(home, "verdict", name)
        if not {"stalls differ", "spreads differ"} & {variant["cause"] for variant in verdict["variants"]}:
            break
    return name, verdict


def test_a_program_goes_from_its_spec_to_a_verdict_and_every_receipt_verifies(
    home: Home, folder: Path, tmp_path: Path
) -> None:
    name, verdict = judged(home, write_program(folder / "code" / "sleeper"), tmp_path)
    slow, same = (next(one for one in verdict["variants"] if one["arm"] == arm) for arm in ("slow", "same"))
    assert slow["measured"] == "worse", slow
    assert -90 < slow["primary"]["delta_pct"] < -40, "a step of four times the sleep, on a machine of any load"
    assert slow["verdict"] == "inconclusive", "no A/A blocks admit this node"
    assert same["measured"] != "worse"
    assert slow["gates_live"] == "declared, not attested"
    assert "nothing proves that the program used its arguments" in " ".join(slow["notes"])
    _receipts(home, name)
    page = tmp_path / "page.html"
    assert home.run("report", name, "-o", str(page)).returncode == 0
    assert "Commands, as requested" in page.read_text()
    assert "val_bpb" in page.read_text()
    until(lambda: is_projected(home, name), pause_s=PAUSE_S)
    again = home.run("aa", "cpu", "--like", name, "--blocks", "6")
    assert again.returncode in range(5), again.stdout + again.stderr
    assert answer(home, "nodes", "calibration")["items"][0]["calibration"]["key"]["recipe"] == "command"


def test_the_python_client_works_beside_files_with_the_names_of_our_packages(home: Home, folder: Path) -> None:
    spec = spec_for(write_program(folder / "code" / "client"), ablation="by-client")
    script = home.current / "ask.py"
    script.write_text(
        "import ablate\n"
        "from ablate.service.client.api import Client\n"
        "with Client() as client:\n"
        f"    print(len(client.ablations.plan({spec!r}).blocks), ablate.steps)\n"
    )
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=home.current,
        env=home.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("6 <function steps"), done.stdout


def test_python_asks_the_running_stack_and_gets_the_answer_that_the_commands_give(home: Home, folder: Path) -> None:
    lab = write_program(
        folder / "lab", "import sys; print(f'METRIC val_loss={100 + int(sys.argv[1]) % 97 / 100 - 10 * len(sys.argv)}')"
    )
    (lab / "ask.py").write_text(
        "import ablate\n"
        "arms = {'variants': {'lower': {'args': ['x']}}, 'metric': 'val_loss'}\n"
        "print(ablate.compare('python train.py {seed}', **arms))\n"
        "print(ablate.answer('latest').to_frame().verdict.tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "ask.py"], cwd=lab, env=home.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no service" not in done.stderr
    *table, verdicts = done.stdout.splitlines()
    assert table[:-1] == home.run("verdict", "compare-lower").stdout.splitlines()
    assert table[-1].startswith("lower  ●"), "the picture"
    assert "lower: val_loss is probably 12." in table[0], "no A/A blocks admit this node"
    assert table[1].startswith("6/6 blocks on cpu, val_loss against baseline")
    assert verdicts == "['inconclusive']"


def _receipts(home: Home, ablation: str) -> None:
    receipts = json.loads(home.run("offline", "receipts", ablation).stdout)
    assert len(receipts) == 18
    for receipt in receipts:
        assert verify({name: value for name, value in receipt.items() if name != "signature"}) == []
        assert receipt["program"]["reported"] == {"val_bpb": 1.5}
        assert receipt["program"]["seed"] == receipt["seed"]
    damaged = {**receipts[0], "program": {**receipts[0]["program"], "window_seen_s": 9.0}}
    assert verify({name: value for name, value in damaged.items() if name != "signature"}) != []


def test_a_program_without_marks_is_judged_by_the_time_of_its_process(home: Home, folder: Path, tmp_path: Path) -> None:
    source = "import sys, time; time.sleep(float(sys.argv[-1])); print('METRIC val_bpb=1.25')"
    spec = spec_for(write_program(folder / "code" / "whole", source), ablation="whole")
    spec["workload"] |= {"command": ["python", "train.py", "0.2"]}
    spec["variants"] = {"slow": {"args": ["0.6"]}}
    spec["verdict"] = {"primary": {"metric": "process_s", "margin": "5%", "adopt_if": "10%"}}
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec))
    ran = home.run("run", str(path))
    assert ran.returncode in range(5), ran.stdout + ran.stderr
    (slow,) = answer(home, "verdict", "whole")["variants"]
    assert slow["measured"] == "worse", slow
    assert slow["primary"]["delta_pct"] > 50
    assert "the time is that of the whole process, with its start" in slow["notes"]
    for receipt in json.loads(home.run("offline", "receipts", "whole").stdout):
        assert verify({name: value for name, value in receipt.items() if name != "signature"}) == []
        assert (receipt["summary"], receipt["steps"]) == (None, [])
    assert home.run("report", "whole", "-o", str(tmp_path / "page.html")).returncode == 0


def test_a_token_without_the_scope_and_a_node_that_accepts_no_code_run_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.environment |= {"ABLATE_ACCEPT_CODE": "false", "ABLATE_PORT": str(28_000 + os.getpid() % 4_000)}
    home.up()
    try:
        _nothing_runs(home, tmp_path)
    finally:
        home.environment.pop("ABLATE_TOKEN", None)
        home.run("down")


def _nothing_runs(home: Home, tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(spec_for(write_program(tmp_path / "code"))))
    secret = answer(home, "admin", "tokens", "create", "ada", "--scope", "submit")["secret"]
    home.environment["ABLATE_TOKEN"] = secret
    refused = home.run("run", str(spec), "--detach")
    assert refused.returncode == 5
    assert "scope 'code'" in refused.stderr
    del home.environment["ABLATE_TOKEN"]
    home.environment["ABLATE_TOKEN"] = answer(home, "admin", "tokens", "create", "bob", "--scope", "code")["secret"]
    accepted = home.run("run", str(spec), "--detach")
    assert accepted.returncode == 0, accepted.stderr
    assert "command" in accepted.stdout + accepted.stderr, "it waits for a node that takes commands"
    for _ in range(2):  # it asks for work again
        (asked,) = answer(home, "nodes")
        until(lambda asked=asked: answer(home, "nodes")[0]["seen_at"] != asked["seen_at"], pause_s=PAUSE_S)
    assert answer(home, "show", "sleeper")["ablation"]["state"] == "queued"


def committed(repository: Path, source: str) -> str:
    """Commit a version of the program; return the commit."""
    git = ("git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b")
    write_program(repository, source)
    for command in (("init", "-q"), ("add", "train.py"), ("commit", "-qm", "a change")):
        subprocess.run([*git, *command], check=True, capture_output=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_a_pull_request_is_measured_by_its_commits_and_every_receipt_names_its_content(
    home: Home, tmp_path: Path
) -> None:
    """A regression that the last commit plants is found, whatever lies in the folder."""
    lab = tmp_path / "lab"
    main = committed(lab, LOOP)
    planted = LOOP.replace("0.8 * step_s", "3.8 * step_s")  # far beyond what load by other tests adds
    change = committed(lab, planted)
    trees = {"baseline": pack_commit(lab, main).tree, "slow": pack_commit(lab, change).tree}
    assert len({*trees.values()}) == 2
    write_program(lab, "print('not committed')")
    other = write_program(tmp_path / "lab/other", "import time; time.sleep(0.6)\n" + LOOP)
    values = spec_for(lab, ablation="sent")
    values["workload"] |= {"code": "."}
    values["variants"] = {"slow": {"code": "."}, "else": {"code": "./other"}}
    spec = lab / "spec.yaml"
    spec.write_text(yaml.safe_dump(values))
    arms = ("--commit", "baseline=HEAD~1", "--commit", "slow=HEAD")
    ran = home.run("run", str(spec), *arms, "--require", "not-worse", "--markdown", str(tmp_path / "comment.md"))
    assert ran.returncode in (1, 3), ran.stdout + ran.stderr
    comment = (tmp_path / "comment.md").read_text()
    assert comment.startswith("**Required of every variant: not-worse. Not met: ")
    assert values["question"] in comment
    assert f"Measured: `baseline` is commit {main[:12]}, `slow` is commit {change[:12]}; by throughput." in comment
    assert "[page](http://127.0.0.1:" in comment
    assert answer(home, "list", "--label", f"commit.slow={change}")[0]["name"] == "sent"
    receipts = json.loads(home.run("offline", "receipts", "sent").stdout)
    assert len(receipts) == 18
    trees["else"] = pack_code(other).tree
    for receipt in receipts:
        assert verify({name: value for name, value in receipt.items() if name != "signature"}) == []
        assert receipt["outcome"] == "measured"
        assert receipt["program"]["code"] == trees[receipt["arm"]]
    (slow,) = (one for one in answer(home, "verdict", "sent")["variants"] if one["arm"] == "slow")
    assert slow["measured"] == "worse", slow
    archives = {receipt["config"]["code"]["archive"] for receipt in receipts}
    assert archives == {pack_commit(lab, main).digest, pack_commit(lab, change).digest, pack_code(other).digest}
    again = home.run("aa", "cpu", "--like", "sent", "--blocks", "6")
    assert again.returncode in range(5), again.stdout + again.stderr


def test_an_archive_that_leaves_its_folder_runs_nowhere_and_says_why(home: Home, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "code.tar.gz", "w:gz") as tar:
        for name in ("train.py", "../../escaped"):
            member = tarfile.TarInfo(name)
            member.size = len(LOOP)
            tar.addfile(member, io.BytesIO(LOOP.encode()))
    content = tmp_path.joinpath("code.tar.gz").read_bytes()
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    spec = spec_for(tmp_path, ablation="escape")
    spec["workload"] |= {"code": {"archive": digest}}
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec))
    refused = home.run("run", str(path), "--detach")
    assert refused.returncode == 5
    assert f"#/workload/code  the service has no archive {digest}" in refused.stderr
    url = json.loads((home.files.home / "stack.json").read_text())["api_url"]
    token = (home.files.home / "tokens/admin").read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/gzip"}
    sent = httpx.post(
        f"{url}/v1/code:upload", params={"digest": digest}, content=content, headers=headers, trust_env=False
    )
    assert sent.status_code == 200, sent.text
    ran = home.run("run", str(path))
    assert ran.returncode == 5, ran.stdout + ran.stderr
    shown = json.dumps(answer(home, "show", "escape"))
    assert "user_error" in shown
    assert "member '../../escaped' has a name that is no plain path below the folder" in shown
    assert list(home.files.home.rglob("escaped*")) == []

import getpass
import os
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ablate.workers.cli import app

KEY = "abl_node_key_of_a_test"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    return path


def _install(root: Path, key: Path, *more: str, user: str = "") -> tuple[int, str]:
    words = ["install", "--url", "https://ablate.example.org", "--token-file", str(key), "--root", str(root)]
    done = CliRunner().invoke(app, [*words, "--user", user or getpass.getuser(), *more])
    return done.exit_code, done.output


def _unit(root: Path) -> ConfigParser:
    parser = ConfigParser(strict=True, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(root / "etc/systemd/system/ablate-worker.service")
    return parser


@pytest.fixture(autouse=True)
def _bare_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ABLATE_")]:
        monkeypatch.delenv(name)


def test_install_writes_a_unit_and_an_environment_and_says_so(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    monkeypatch.setenv("ABLATE_DRAIN_S", "100")
    code, output = _install(root, key, "--node-class", "h200", "--name", "gpu-7")
    assert code == 0, output
    unit = _unit(root)
    assert unit["Service"]["EnvironmentFile"] == "/etc/ablate/worker.env"
    assert unit["Service"]["ExecStart"].endswith(" -m ablate.workers.app")
    assert unit["Service"]["User"] == getpass.getuser()
    assert int(unit["Service"]["TimeoutStopSec"]) == 100 + 5 + 60  # drain, grace, slack: no block is cut by systemd
    assert (unit["Service"]["KillMode"], unit["Service"]["Restart"]) == ("mixed", "always")
    environment = root / "etc/ablate/worker.env"
    assert environment.stat().st_mode & 0o777 == 0o600
    assert environment.read_text().splitlines() == [
        "ABLATE_DRAIN_S=100",
        "ABLATE_HOME=/var/lib/ablate",
        "ABLATE_NODE_CLASS=h200",
        "ABLATE_NODE_NAME=gpu-7",
        "ABLATE_URL=https://ablate.example.org",
        f"ABLATE_WORKER_TOKEN={KEY}",
    ]
    assert (root / "var/lib/ablate").is_dir()
    for line in ("wrote", "mode 0600", "systemctl enable --now ablate-worker"):
        assert line in output
    assert KEY not in output


def test_install_keeps_the_settings_of_the_shell_that_are_a_workers_but_no_other_token(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    kept = {"ACCEPT_CODE": "true", "CODE_DIRS": "/srv/lab", "ENVIRONMENTS": f"lab={tmp_path}/venv", "UNTIL": "8h"}
    left_out = {"HOME": "/srv/mine", "URL": "https://other", "ADMIN_TOKEN": "a" * 40, "ENROLMENT_TOKEN": "b" * 40}
    for name, value in {**kept, **left_out}.items():
        monkeypatch.setenv(f"ABLATE_{name}", value)
    code, output = _install(tmp_path / "root", key)
    assert code == 0, output
    text = (tmp_path / "root/etc/ablate/worker.env").read_text()
    assert {f"ABLATE_{name}={value}" for name, value in kept.items()} < set(text.splitlines())
    assert not any(value in text for value in left_out.values())


def test_install_again_is_allowed_and_another_one_asks(tmp_path: Path, key: Path) -> None:
    root = tmp_path / "root"
    assert _install(root, key)[0] == _install(root, key)[0] == 0
    code, output = _install(root, key, "--name", "another")
    assert code == 5
    assert "worker.env exists with another content; --replace overwrites it" in output.replace("\n", "")
    assert _install(root, key, "--name", "another", "--replace")[0] == 0
    assert "ABLATE_NODE_NAME=another" in (root / "etc/ablate/worker.env").read_text()


def test_install_one_worker_for_each_gpu_of_a_machine(tmp_path: Path, key: Path) -> None:
    root = tmp_path / "root"
    gpus = ["0", "1", "GPU-5a1c0000-0000-4000-8000-00000000aaaa"]
    for gpu in gpus:
        code, output = _install(root, key, "--gpu", gpu, "--name", f"gpu-7-{gpu}", "--node-class", "h200")
        assert code == 0, output
        assert f"systemctl enable --now ablate-worker-{gpu}" in output
        unit = (root / f"etc/systemd/system/ablate-worker-{gpu}.service").read_text()
        assert f"EnvironmentFile=/etc/ablate/worker-{gpu}.env\n" in unit
        assert f"ReadWritePaths=/var/lib/ablate-{gpu}\n" in unit
        lines = (root / f"etc/ablate/worker-{gpu}.env").read_text().splitlines()
        assert {f"CUDA_VISIBLE_DEVICES={gpu}", f"ABLATE_HOME=/var/lib/ablate-{gpu}"} <= set(lines)
    assert len(list((root / "etc/ablate").iterdir())) == len(gpus)


def test_install_dry_run_writes_nothing_and_shows_no_secret(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ABLATE_BROKER_URL", "rediss://:broker-secret@redis.example.org:6379/0")
    code, output = _install(tmp_path / "root", key, "--dry-run", user="nobody-of-this-name")
    assert code == 0
    assert not (tmp_path / "root").exists()
    assert "ABLATE_WORKER_TOKEN=(not shown)" in output
    assert "ABLATE_BROKER_URL=(not shown)" in output
    assert "[Service]" in output
    for secret in (KEY, "broker-secret"):
        assert secret not in output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--node-class", "cpu-3"], "node class 'cpu-3' is unknown; allowed: cpu, h200"),
        (["--name", 'a"b'], "ABLATE_NODE_NAME: 'a\"b' is not a node's name"),
        (["--url", "https://x\nABLATE_HOME=/etc"], "ABLATE_URL: contains a space or a control character"),
        (["--gpu", "0,1"], "--gpu is '0,1'; allowed: index or UUID of one GPU"),
        (["--gpu", "../x"], "--gpu is '../x'"),
    ],
)
def test_install_refuses_what_would_not_work(tmp_path: Path, key: Path, words: list[str], expected: str) -> None:
    code, output = _install(tmp_path / "root", key, *words)
    assert code == 5
    assert expected in output.replace("\n", " ")
    assert not (tmp_path / "root").exists()


def test_install_for_a_user_that_is_not_there_says_how_to_make_one(tmp_path: Path, key: Path) -> None:
    code, output = _install(tmp_path / "root", key, user="nobody-of-this-name")
    assert code == 5
    assert "useradd --system" in output.replace("\n", "")
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("text", ["", "changeme\n"])
def test_install_without_a_real_key_is_refused(tmp_path: Path, key: Path, text: str) -> None:
    key.write_text(text)
    code, output = _install(tmp_path / "root", key)
    assert code == 5
    assert str(key) in output.replace("\n", "")


def test_unit_is_one_that_systemd_understands(tmp_path: Path, key: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    root = tmp_path / "root"
    assert _install(root, key)[0] == 0
    unit = root / "etc/systemd/system/ablate-worker.service"
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "ablate-worker" in line] == []

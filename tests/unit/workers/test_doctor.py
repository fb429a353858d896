"""Checks of the doctor that need no service: where it writes, and a broker's library that does not load."""

import subprocess
import sys
from pathlib import Path

import pytest

from ablate.workers import doctor
from ablate.workers.devices.node_health import free_gib_at
from ablate.workers.isolation import reach
from ablate.workers.node import find_node
from ablate.workers.settings import Settings
from tests.nvidia_gpus import put_gpus
from tests.own_packages import OwnPackages, own_packages

__all__ = ["own_packages"]


def test_a_broken_broker_library_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "kombu.exceptions", None)  # what an import of it then raises, an ImportError
    finding = doctor._broker(Settings(home=tmp_path))
    assert (finding.name, finding.passed, finding.needed) == ("broker", False, True)
    assert "cannot import its library" in finding.detail


def test_space_is_looked_for_where_datasets_are_too(tmp_path: Path) -> None:
    home, data = tmp_path / "home", tmp_path / "elsewhere" / "data"
    assert [one.name for one in doctor._disks(Settings(home=home))] == ["disk"]
    assert [one.name for one in doctor._disks(Settings(home=home, data_dir=home / "sets"))] == ["disk"]
    findings = doctor._disks(Settings(home=home, data_dir=data, least_disk_gib=10.0**9))
    assert [(one.name, one.passed) for one in findings] == [("disk", False), ("disk of datasets", False)]
    assert str(data) in findings[1].detail


def test_the_space_of_a_folder_that_is_not_there_is_that_of_its_parent(tmp_path: Path) -> None:
    assert free_gib_at(tmp_path / "a" / "b") == pytest.approx(free_gib_at(tmp_path), rel=0.01)


def test_the_doctor_says_what_is_open_without_a_file_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "own_tree_problem", lambda: "unshare: Operation not permitted")
    for admin, words in ((True, ()), (False, ("System V segments",))):
        monkeypatch.setattr(reach, "has_admin", lambda admin=admin: admin)
        gaps = "; ".join(reach.isolation_gaps())
        expected = ("trials share", "modes of this user's files", "sockets", "unshare: Operation not permitted", *words)
        assert [word for word in expected if word not in gaps] == []
        assert ("System V" in gaps) is not admin


def test_the_doctor_names_the_isolation_and_its_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "own_tree_problem", lambda: None)
    expected = {
        0: (False, "none: trials can read this node's keys, because this kernel has no Landlock"),
        1: (True, "version 1; files that the worker may write can be emptied; other processes"),
        5: (True, "version 5; other processes of the worker's user can be sent signals"),
        7: (True, "trials run under Landlock, version 7"),
    }
    for version, (passed, words) in expected.items():
        for module in (doctor, reach):
            monkeypatch.setattr(module, "landlock_version", lambda version=version: version)
        check = doctor._isolation()
        assert (check.name, check.passed, check.needed) == ("isolation", passed, False)
        assert words in check.detail
        assert check.detail.endswith("7") == (version == 7)


def test_a_node_that_isolates_nothing_says_so_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "landlock_version", lambda: 0)
    node = find_node("here", "cpu")
    assert not node.isolates
    assert node.versions["isolation"] == "none"
    registered = node.registration(None)
    assert any("trials are not isolated and can read this node's keys" in sentence for sentence in registered.lacks)


def test_a_kernel_that_refuses_a_step_isolates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose own filter forbids the system calls."""
    refused = subprocess.CompletedProcess(
        [], 1, "", "ablate.experiments.errors.IsolationFailed: seccomp: Operation not permitted\n"
    )
    reach._refusal.cache_clear()
    monkeypatch.setattr(reach.subprocess, "run", lambda *_arguments, **_options: refused)
    monkeypatch.setattr(reach, "landlock_version", lambda: 7)
    assert reach.isolation_problem() == "isolation was refused: Operation not permitted"
    reach._refusal.cache_clear()


def test_the_doctor_names_recipes_of_packages_and_why_one_cannot_be_used(own_packages: OwnPackages) -> None:
    own_packages.add("mine")
    own_packages.add("broken", "raise RuntimeError('no such luck')")
    checks = {check.name: check for check in doctor._recipes()}
    assert checks["recipe mine"].passed
    assert not checks["recipe broken"].passed
    assert not checks["recipe broken"].needed
    assert "no such luck" in checks["recipe broken"].detail


def test_the_doctor_says_how_many_devices_a_command_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpus(tmp_path, monkeypatch)
    for visible, words in ((None, "a command may use up to 2 of them"), ("1", "140.4 GiB, compute capability 9.0)")):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        finding = doctor._devices(Settings(home=tmp_path, node_class="h200"))
        assert finding.passed
        assert finding.detail.endswith(words), finding.detail
    assert "command" not in doctor._devices(Settings(home=tmp_path, node_class="cpu")).detail


def test_results_of_lanes_that_cannot_be_stored_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "run_lanes", lambda *_arguments, **_options: {"reference": None})
    settings = Settings(home=tmp_path, node_class="cpu")
    assert [(check.name, check.passed) for check in doctor._lanes(settings)] == [("lane reference", True)]
    stored = settings.home_dir / "lanes.json"
    stored.unlink()
    stored.mkdir()
    first, second = doctor._lanes(settings)
    assert (first.name, first.passed) == ("lane reference", True)
    assert second.detail.startswith("their results are not stored: ")
    assert (second.passed, second.needed) == (False, False)


def test_the_doctor_lists_the_names_of_secrets_and_no_value(tmp_path: Path) -> None:
    path = tmp_path / "secrets"
    path.write_text("WANDB_API_KEY=pl4nted-value\nHF_TOKEN=pl4nted-value-2\n")
    path.chmod(0o600)
    [check] = doctor._secrets(path)
    assert (check.passed, check.detail) == (True, f"HF_TOKEN, WANDB_API_KEY ({path})")
    path.chmod(0o644)
    [check] = doctor._secrets(path)
    assert not check.passed
    assert "chmod 600" in check.detail
    assert doctor._secrets(None) == []

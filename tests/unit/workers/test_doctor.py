"""Checks of the doctor that need no service: where it writes, and a broker's library that does not load."""

import sys
from pathlib import Path

import pytest

from workers import doctor
from workers.devices.node_health import free_gib_at
from workers.settings import Settings


def test_a_broken_broker_library_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "kombu.exceptions", None)  # what an import of it then raises, an ImportError
    found = doctor._broker(Settings(home=tmp_path))
    assert (found.name, found.passed, found.needed) == ("broker", False, True)
    assert "cannot import its library" in found.detail


def test_space_is_looked_for_where_datasets_are_too(tmp_path: Path) -> None:
    home, data = tmp_path / "home", tmp_path / "elsewhere" / "data"
    assert [one.name for one in doctor._disks(Settings(home=home))] == ["disk"]
    assert [one.name for one in doctor._disks(Settings(home=home, data_dir=home / "sets"))] == ["disk"]
    found = doctor._disks(Settings(home=home, data_dir=data, least_disk_gib=10.0**9))
    assert [(one.name, one.passed) for one in found] == [("disk", False), ("disk of datasets", False)]
    assert str(data) in found[1].detail


def test_the_space_of_a_folder_that_is_not_there_is_that_of_its_parent(tmp_path: Path) -> None:
    assert free_gib_at(tmp_path / "a" / "b") == pytest.approx(free_gib_at(tmp_path), rel=0.01)

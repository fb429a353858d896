from pathlib import Path

import pytest

from ablate.kernels.backends import NODE_CLASSES
from ablate.workers.devices import inventory
from ablate.workers.devices.inventory import PROBES, find_devices
from ablate.workers.errors import DeviceMissing
from tests.nvidia_gpus import UNKNOWN, UUIDS, put_driver, put_gpus


def test_find_devices_distinguishes_an_h100_from_an_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpus(tmp_path, monkeypatch)
    for devices in (find_devices(), find_devices("h200")):
        assert devices.node_class is NODE_CLASSES["h200"]
        assert [device.index for device in devices.devices] == [0, 1]
        assert (devices.driver, devices.lacks) == ("570.124.06", ())
    name = "NVIDIA H100 80GB HBM3"
    put_gpus(tmp_path, monkeypatch, f"0, {name}, 1, 81559, 0, 580.159.04, GPU-1\n")
    for devices in (find_devices(), find_devices("h100")):
        assert devices.node_class is NODE_CLASSES["h100"]
        assert devices.first.name == name
    with pytest.raises(DeviceMissing, match=f"'h200' is configured, but this machine has no such device: .* {name}"):
        find_devices("h200")


def test_find_devices_of_two_classes_in_one_machine_is_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    lines = [f"{index}, {name}, {index}, 81559, 0, 580.159.04, GPU-{index}\n" for index, name in enumerate(names)]
    put_gpus(tmp_path, monkeypatch, "".join(lines))
    devices = find_devices()
    assert devices.node_class is NODE_CLASSES["cpu"]
    reason = (
        f"devices '{names[0]}' and '{names[1]}' have no common node class: give each kind a worker; registered as cpu"
    )
    assert devices.lacks == (reason,)
    for name in ("h200", "h100"):
        with pytest.raises(DeviceMissing, match=f"its probe found {', '.join(names)}"):
            find_devices(name)


def test_find_devices_cpu_asked_for_on_a_gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpus(tmp_path, monkeypatch)
    devices = find_devices("cpu")
    assert devices.node_class is NODE_CLASSES["cpu"]
    assert devices.first.name
    assert devices.first.memory_bytes > 2**30
    assert devices.probe.memory_used() == {}


@pytest.mark.parametrize(
    ("error", "reason"),
    [(0, "its probe found nothing$"), (UNKNOWN, "its probe found nothing; NVIDIA's driver does not answer")],
)
def test_find_devices_h200_on_a_machine_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, reason: str
) -> None:
    put_driver(tmp_path, monkeypatch, error=error)
    with pytest.raises(DeviceMissing, match=f"^node class 'h200' is configured, but .* no such device: {reason}"):
        find_devices("h200")
    devices = find_devices()
    assert devices.node_class is NODE_CLASSES["cpu"]
    assert len(devices.lacks) == bool(error)


def test_find_devices_xla_on_the_host_only_where_it_is_asked_for_and_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "find_spec", lambda _: None)
    assert find_devices().node_class is NODE_CLASSES["cpu"]
    with pytest.raises(DeviceMissing, match=r"node class 'xla-cpu' is configured, .* torch_xla is not installed"):
        find_devices("xla-cpu")
    monkeypatch.setattr(inventory, "find_spec", lambda _: object())
    assert find_devices().node_class is NODE_CLASSES["cpu"]
    devices = find_devices("xla-cpu")
    assert devices.node_class is NODE_CLASSES["xla-cpu"]
    assert devices.node_class.on_host
    assert devices.first.memory_bytes > 2**30


def test_every_node_class_names_a_probe_that_exists_and_can_be_told_from_its_neighbours() -> None:
    named = [entry.probe for entry in NODE_CLASSES.values() if entry.lanes]
    assert set(named) <= set(PROBES)
    assert list(PROBES)[-3:] == ["host", "xla_host", "libtpu"]
    patterns = [(entry.probe, entry.device_name) for entry in NODE_CLASSES.values() if entry.probe is not None]
    assert len(set(patterns)) == len(patterns)


def test_locks_are_the_cores_of_a_host_and_the_devices_of_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_gpus(tmp_path, monkeypatch)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5, 2})
    assert [lock.split(":")[2:] for lock in find_devices("cpu").locks("block")] == [
        ["block", "core 2"],
        ["block", "core 5"],
    ]
    gpus = [lock.split(":")[2:] for lock in find_devices("h200").locks("trainer")]
    assert gpus == [["trainer", "nvidia 1652823001234"], ["trainer", f"nvidia {UUIDS[1]}"]]
    one = [lock.split(":")[2:] for lock in find_devices("h200").locks("trainer", number=1)]
    assert one == [["trainer", "nvidia 1652823001234"]]
    with pytest.raises(DeviceMissing, match="needs 3 devices; this node has 2"):
        find_devices("h200").locks("trainer", number=3)


def test_locks_of_another_set_are_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    devices = find_devices("cpu")
    names = []
    for value in ("", "machine", "home", "of-a-test"):
        monkeypatch.setenv("ABLATE_DEVICE_LOCKS", value)
        names.append(devices.locks("block"))
    monkeypatch.setenv("ABLATE_DEVICE_LOCKS", "home")
    monkeypatch.setenv("ABLATE_HOME", str(tmp_path))
    assert names[0] == names[1]
    assert len({*names, devices.locks("block")}) == 4

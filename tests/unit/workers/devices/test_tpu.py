import subprocess
import sys
from pathlib import Path

import pytest

from ablate.kernels.backends import NODE_CLASSES
from ablate.workers.devices.inventory import PROBES, find_devices
from ablate.workers.devices.node_health import ReleaseProof
from ablate.workers.devices.probe_types import changes
from ablate.workers.devices.tpu import TpuProbe
from ablate.workers.errors import DeviceMissing
from tests.waiting import until

V6E, V5E, V4 = "0x006f", "0x0063", "0x005e"


def put_chips(root: Path, *pci_devices: str, node: str = "vfio/{}") -> TpuProbe:
    """Lay out a machine's PCI bus and device nodes below `root`; processes are this machine's own."""
    others = (("0x8086", "0x1237"), ("0x1ae0", "0x0042"))  # a bridge, and a Google device that is no chip
    for index, (vendor, device) in enumerate((*others, *(("0x1ae0", device) for device in pci_devices))):
        folder = root / "sys" / "bus" / "pci" / "devices" / f"0000:00:{index:02x}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")
    for index in range(len(pci_devices)):
        path = root / "dev" / node.format(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (root / "dev" / "vfio").mkdir(parents=True, exist_ok=True)
    (root / "dev" / "vfio" / "vfio").touch()  # the container's node, which is no chip
    return TpuProbe(sys=root / "sys", dev=root / "dev")


@pytest.mark.parametrize("count", [1, 4, 8])
def test_chips_are_found_on_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setitem(PROBES, "tpu", put_chips(tmp_path, *([V6E] * count)))
    for inventory in (find_devices("tpu-v6e"), find_devices()):
        assert inventory.node_class is NODE_CLASSES["tpu-v6e"]
        assert [device.index for device in inventory.devices] == list(range(count))
        assert {(device.name, device.memory_bytes) for device in inventory.devices} == {("TPU v6e", 32 * 2**30)}


@pytest.mark.parametrize(("device", "name"), [(V5E, "TPU v5e"), (V4, "TPU v4")])
def test_other_chips_are_named_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, name: str
) -> None:
    monkeypatch.setitem(PROBES, "tpu", put_chips(tmp_path, device, device))
    with pytest.raises(DeviceMissing, match=f"2 chips are {name}, which has no node class"):
        find_devices("tpu-v6e")
    inventory = find_devices()
    assert inventory.node_class is NODE_CLASSES["cpu"]
    assert inventory.lacks == (f"2 chips are {name}, which has no node class",)


def test_a_machine_without_chips_is_not_a_tpu_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = put_chips(tmp_path)
    monkeypatch.setitem(PROBES, "tpu", probe)
    with pytest.raises(DeviceMissing, match="node class 'tpu-v6e' is configured"):
        find_devices("tpu-v6e")
    assert probe.memory_used() == {}
    assert probe.state(0) is None


def _holder(node: Path) -> "subprocess.Popen[str]":
    program = f"import sys; opened = open({str(node)!r}); print('open', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


@pytest.mark.parametrize("node", ["vfio/{}", "accel{}"])
def test_a_process_that_has_a_chip_open_holds_it_until_it_ends(tmp_path: Path, node: str) -> None:
    probe = put_chips(tmp_path, V6E, V6E, node=node)
    before, state_before = probe.memory_used(), probe.state(0)
    assert before == {0: 0, 1: 0}
    proof = ReleaseProof(probe, before)
    assert proof.problem(patience_s=0) is None
    process = _holder(tmp_path / "dev" / node.format(1))
    try:
        events = changes(state_before, probe.state(0))
        assert events is not None
        assert events.foreign_processes == (process.pid,)
        assert proof.problem(patience_s=0) == f"processes [{process.pid}] are on the device, but no trial runs"
    finally:
        process.communicate()
    until(lambda: probe.memory_used() == before)
    assert proof.problem(patience_s=0) is None


def test_the_containers_node_is_nobodys_chip(tmp_path: Path) -> None:
    probe = put_chips(tmp_path, V6E)
    process = _holder(tmp_path / "dev" / "vfio" / "vfio")
    try:
        assert probe.memory_used() == {0: 0}
    finally:
        process.communicate()


def test_open_files_of_processes_that_end_meanwhile_are_no_error(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "17").mkdir(parents=True)
    (proc / "18" / "fd").mkdir(parents=True)
    (proc / "18" / "fd" / "3").symlink_to("/gone")
    probe = put_chips(tmp_path, V6E)
    assert TpuProbe(sys=tmp_path / "sys", dev=tmp_path / "dev", proc=proc).memory_used() == {0: 0}
    assert probe.memory_used() == {0: 0}

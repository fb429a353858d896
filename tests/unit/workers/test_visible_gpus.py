"""Several workers on one machine, each with the GPUs that CUDA_VISIBLE_DEVICES leaves to it."""

import random
from pathlib import Path

import pytest

from kernels.backends import NODE_CLASSES
from tests.nvidia_smi import UUIDS, put_busy_gpus
from workers.devices.inventory import find_devices
from workers.devices.node_health import ReleaseProof
from workers.devices.nvidia_probe import NvidiaProbe
from workers.errors import DeviceMissing

MIB = 2**20
A, B = UUIDS


@pytest.fixture
def _busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_busy_gpus(tmp_path, monkeypatch, (4711, A), (4712, B), (4713, B))


@pytest.mark.usefixtures("_busy")
@pytest.mark.parametrize(
    ("visible", "indices", "pids"),
    [
        (None, [0, 1], (4711, 4712, 4713)),
        ("0", [0], (4711,)),
        ("1", [1], (4712, 4713)),
        (" 1 , 0 ", [1, 0], (4711, 4712, 4713)),
        (B, [1], (4712, 4713)),
        (B[:12], [1], (4712, 4713)),
        (f"{B},0", [1, 0], (4711, 4712, 4713)),
        ("", [], ()),
    ],
)
def test_a_worker_knows_its_own_gpus_alone(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, indices: list[int], pids: tuple[int, ...]
) -> None:
    _see(monkeypatch, visible)
    probe = NvidiaProbe()
    assert [device.index for device in probe.find().devices] == indices
    assert list(probe.memory_used()) == indices
    assert probe.users() == pids
    if indices:
        state = probe.state(indices[0])
        assert state is not None
        assert (state.sw_power_cap_us, state.processes) == (indices[0], pids)


@pytest.mark.usefixtures("_busy")
@pytest.mark.parametrize(
    ("visible", "wanted"),
    [
        ("2", r"names '2'; allowed: .* 0 \(GPU-5a1c.*\), 1 \(GPU-5a1d"),
        ("0,-1", "names '-1'"),
        ("GPU-5a1", "names 'GPU-5a1'"),
        ("GPU-00000000", "names 'GPU-00000000'"),
        ("MIG-5a1c0000", "names 'MIG-5a1c0000'"),
        (f"0,{A}", "names a GPU twice"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, visible: str, wanted: str) -> None:
    _see(monkeypatch, visible)
    with pytest.raises(DeviceMissing, match=f"CUDA_VISIBLE_DEVICES {wanted}"):
        find_devices("h200")
    assert "CUDA_VISIBLE_DEVICES" in find_devices().lacks[0]
    assert "CUDA_VISIBLE_DEVICES" in str(ReleaseProof(NvidiaProbe(), [0]).problem(patience_s=0))


def test_workers_of_different_gpus_have_different_locks_and_prove_their_own_device_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_busy_gpus(tmp_path, monkeypatch, (4712, B))
    locks = {}
    for visible, problem in (("0", None), ("1", "processes [4712] are on the device, but no trial runs")):
        _see(monkeypatch, visible)
        found = find_devices("h200")
        locks[visible] = set(found.locks("worker"))
        assert found.proof().problem(patience_s=0) == problem
    assert not locks["0"] & locks["1"]
    _see(monkeypatch, None)
    assert set(find_devices("h200").locks("worker")) == locks["0"] | locks["1"]


def test_cuda_counts_gpus_as_nvidia_smi_does() -> None:
    assert NODE_CLASSES["h200"].environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_any_choice_of_any_machine_is_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(5)  # noqa: S311 - a seeded draw
    for _ in range(6):
        uuids = [f"GPU-{draw.getrandbits(32):08x}-0000" for _ in range(draw.randint(1, 8))]
        rows = [f"{i}, NVIDIA H200, {100 + i}, 143771, {10 * i}, 570, {uuid}\n" for i, uuid in enumerate(uuids)]
        apps = [(draw.randint(2, 99_999), draw.choice(uuids)) for _ in range(draw.randint(0, 6))]
        put_busy_gpus(tmp_path, monkeypatch, *apps, table="".join(rows))
        chosen = draw.sample(range(len(uuids)), draw.randint(1, len(uuids)))
        _see(monkeypatch, ",".join(draw.choice([str(i), uuids[i]]) for i in chosen))
        probe = NvidiaProbe()
        assert [device.index for device in probe.find().devices] == chosen
        assert probe.memory_used() == {i: 10 * i * MIB for i in chosen}
        assert sorted(probe.users()) == sorted(pid for pid, uuid in apps if uuids.index(uuid) in chosen)


def _see(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

"""NVIDIA GPUs: the answers of their driver, and workers that share a machine by CUDA_VISIBLE_DEVICES."""

import random
from dataclasses import asdict
from pathlib import Path

import pytest

from ablate.kernels.backends import NODE_CLASSES
from ablate.workers.devices.inventory import find_devices
from ablate.workers.devices.node_health import ReleaseProof
from ablate.workers.devices.nvidia_probe import NvidiaProbe, parse_state
from ablate.workers.devices.probe_types import DeviceState, ProbeResult, changes
from ablate.workers.errors import DeviceMissing
from tests.nvidia_gpus import ABSENT, UNKNOWN, UUIDS, FakeGpu, put_busy_gpus, put_driver, put_gpus, put_smi

MIB = 2**20
A, B = UUIDS


def test_nvidia_find_reads_answers_and_missing_serials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpus(tmp_path, monkeypatch)
    probe = NvidiaProbe()
    result = probe.find()
    first, second = result.devices
    assert (first.index, first.name, first.serial, result.driver) == (0, "NVIDIA H200", "1652823001234", "570.124.06")
    assert first.memory_bytes == 143771 * 2**20
    assert second.serial == B  # a card without a serial number is known by its UUID
    assert probe.memory_used() == {0: 4 * 2**20, 1: 520 * 2**20}


def test_find_without_gpus_is_no_surprise_but_a_failure_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_driver(tmp_path, monkeypatch)
    assert NvidiaProbe().find() == ProbeResult()
    put_driver(tmp_path, monkeypatch, error=UNKNOWN)
    (sentence,) = NvidiaProbe().find().lacks
    assert "NVIDIA's driver does not answer" in sentence
    put_driver(tmp_path, monkeypatch, error=ABSENT)
    assert NvidiaProbe().find() == ProbeResult()
    put_smi(tmp_path, monkeypatch, "true")
    assert "NVIDIA's driver does not answer" in NvidiaProbe().find().lacks[0]


def test_parse_state_of_an_h200() -> None:
    assert parse_state("1200000, 0, 7, 0, 1\n", (4711, 4712)) == DeviceState(
        sw_power_cap_us=1_200_000,
        sw_thermal_slowdown_us=0,
        hw_thermal_slowdown_us=7,
        hw_power_brake_us=0,
        ecc_uncorrected=1,
        processes=(4711, 4712),
    )


def test_parse_state_a_missing_value_is_not_0() -> None:
    state = parse_state("[N/A], 5, [N/A], 0, [N/A]", ())
    assert state == DeviceState(sw_thermal_slowdown_us=5, hw_power_brake_us=0, processes=())


def test_state_has_the_known_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hidden process number makes the processes unknown, not empty."""
    gpus = [FakeGpu(name="NVIDIA L4", uuid=uuid) for uuid in UUIDS]
    put_driver(tmp_path, monkeypatch, gpus, apps=[(4711, A)])
    put_smi(tmp_path, monkeypatch, 'case "$*" in *--id=1*) echo "9, 8, 7, 6, 5";; *) exit 1;; esac')
    probe = NvidiaProbe()
    assert probe.state(1) == parse_state("9, 8, 7, 6, 5", (4711,))
    assert probe.state(0) == DeviceState(processes=(4711,))
    put_driver(tmp_path, monkeypatch, gpus, apps=[(4711, A), (0, B)])
    assert probe.state(1) == parse_state("9, 8, 7, 6, 5", None)
    assert probe.state(0) is None
    put_driver(tmp_path, monkeypatch, gpus, error=UNKNOWN)
    assert probe.state(1) is None


def test_every_event_that_a_receipt_can_hold_is_told_by_a_full_answer() -> None:
    """An event that nobody produces would pass every guard for ever."""
    events = changes(parse_state("1, 2, 3, 4, 5", (6,)), parse_state("1, 2, 3, 4, 5", (6,)))
    assert events is not None
    assert None not in events.model_dump().values()
    assert set(events.model_dump()) == set(type(events).model_fields)
    assert None not in asdict(parse_state("1, 2, 3, 4, 5", (6,))).values()


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
    ("visible", "message"),
    [
        ("2", r"names '2'; allowed: .* 0 \(GPU-5a1c.*\), 1 \(GPU-5a1d"),
        ("0,-1", "names '-1'"),
        ("GPU-5a1", "names 'GPU-5a1'"),
        ("GPU-00000000", "names 'GPU-00000000'"),
        ("MIG-5a1c0000", "names 'MIG-5a1c0000'"),
        (f"0,{A}", "names a GPU twice"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, visible: str, message: str) -> None:
    _see(monkeypatch, visible)
    with pytest.raises(DeviceMissing, match=f"CUDA_VISIBLE_DEVICES {message}"):
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
        devices = find_devices("h200")
        locks[visible] = set(devices.locks("worker"))
        assert devices.proof().problem(patience_s=0) == problem
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

"""AMD GPUs as the real client of their library reports them."""

import random
from pathlib import Path

import pytest

from ablate.workers.devices.amd_probe import AmdProbe
from ablate.workers.devices.inventory import find_devices
from ablate.workers.devices.node_health import ReleaseProof
from ablate.workers.devices.probe_types import DeviceState, ProbeResult
from ablate.workers.errors import DeviceMissing
from tests.amd_gpus import FakeAmd, put_amd

MIB = 2**20


@pytest.mark.parametrize(
    ("gpu", "node_class"),
    [
        (FakeAmd(name="AMD Instinct MI300X", uuid="a"), "mi300x"),
        (FakeAmd(name="AMD Instinct MI300X OAM", uuid="a", mode="CPX", total_mib=24574), "mi300x-mig-cpx"),
        (FakeAmd(name="AMD Instinct MI210", uuid="a", gfx="90a", mode=None), "mi210"),
        (FakeAmd(name="AMD Radeon RX 7900 XTX", uuid="a", gfx="1100", mode=None), "amd-radeon-rx-7900-xtx"),
    ],
    ids=["whole", "partition", "indivisible", "consumer"],
)
def test_the_class_of_a_gpu_is_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: FakeAmd, node_class: str
) -> None:
    put_amd(tmp_path, monkeypatch, [gpu, gpu])
    devices = find_devices()
    assert (devices.node_class.name, devices.driver, len(devices.devices)) == (node_class, "6.12.12", 2)
    assert find_devices(node_class).node_class is devices.node_class
    assert (devices.first.capability, devices.first.memory_bytes) == (f"gfx{gpu.gfx}", gpu.total_mib * MIB)
    assert "no guard sees them" in devices.lacks[0]
    assert max(devices.node_class.offers) == (1 if gpu.mode == "CPX" else 8)


def test_any_choice_of_any_machine_is_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(8)  # noqa: S311 - a seeded draw
    for _ in range(20):
        gpus = [
            FakeAmd(
                name="AMD Instinct MI300X",
                uuid=f"uuid-{number}",
                used_mib=draw.randrange(2000),
                pids=draw.sample(range(2, 9999), draw.randrange(4)),
            )
            for number in range(draw.randint(1, 8))
        ]
        put_amd(tmp_path, monkeypatch, gpus)
        chosen = draw.sample(range(len(gpus)), draw.randint(1, len(gpus)))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, chosen)))
        probe = AmdProbe()
        assert [(one.index, one.serial) for one in probe.find().devices] == [(i, f"uuid-{i}") for i in chosen]
        assert probe.memory_used() == {i: gpus[i].used_mib * MIB for i in chosen}
        pids = tuple(sorted({pid for i in chosen for pid in gpus[i].pids}))
        assert probe.users() == pids
        assert probe.state(chosen[0]) == DeviceState(processes=pids)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("CUDA_VISIBLE_DEVICES", "1", "names '1'; allowed: each index of a present GPU once: 0"),
        ("CUDA_VISIBLE_DEVICES", "0,0", "names '0,0'"),
        ("HIP_VISIBLE_DEVICES", "0", "HIP_VISIBLE_DEVICES hides GPUs from trials and not from this worker"),
    ],
)
def test_a_choice_that_trials_would_read_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    put_amd(tmp_path, monkeypatch, [FakeAmd(name="AMD Instinct MI300X", uuid="a")])
    monkeypatch.setenv(variable, value)
    with pytest.raises(DeviceMissing, match=words):
        find_devices("mi300x")


def test_a_machine_without_a_driver_is_no_surprise_and_one_without_an_answer_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert AmdProbe().find() == ProbeResult()
    put_amd(tmp_path, monkeypatch, [], driver=False)
    (sentence,) = AmdProbe().find().lacks
    assert "AMD's driver does not answer" in sentence
    assert "does not say whether the device is free" in str(ReleaseProof(AmdProbe(), [0]).problem(patience_s=0))
    assert AmdProbe().state(0) is None
    monkeypatch.setitem(__import__("sys").modules, "amdsmi", None)
    assert "install the amdsmi of this ROCm" in AmdProbe().find().lacks[0]

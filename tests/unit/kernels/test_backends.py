import subprocess
import sys

import pytest

from ablate.kernels.backends import NODE_CLASSES, Lane, NodeClass, device_refusal


def test_lane_refusal_none_for_every_implemented_lane():
    assert {entry.lane_refusal(lane) for entry in NODE_CLASSES.values() for lane in entry.lanes} == {None}


@pytest.mark.parametrize(
    ("lane", "node", "reason"),
    [
        (Lane.CUDA, "cpu", "lane 'cuda' has no implementation on node class 'cpu'; implemented there: reference"),
        (Lane.REFERENCE, "tpu-v6e", "implemented there: xla"),
    ],
)
def test_lane_refusal_says_why(lane, node, reason):
    assert reason in str(NODE_CLASSES[node].lane_refusal(lane))


def test_device_refusal_asks_every_class_with_that_kind_of_device(monkeypatch):
    small = NodeClass(name="small", lanes=(Lane.REFERENCE,), device_type="cuda", probe="nvidia", device_name="Small")
    monkeypatch.setitem(NODE_CLASSES, small.name, small)
    assert device_refusal(Lane.CUDA, "cuda") is None
    assert device_refusal(Lane.XLA, "cuda") == (
        "lane 'xla' has no implementation on node class 'h200' or 'h100' or 'small'; "
        "implemented there: cuda, peer, reference"
    )
    assert device_refusal(Lane.CUDA, "mps") == "device type 'mps' is unknown; known: cpu, cuda, xla"


@pytest.mark.parametrize(
    ("name", "fits"),
    [("NVIDIA H200", True), ("NVIDIA H200 NVL", True), ("NVIDIA GH200 480GB", False), ("NVIDIA H100 80GB HBM3", False)],
)
def test_h200_fits_its_own_devices_only(name, fits):
    assert NODE_CLASSES["h200"].fits(name) is fits


@pytest.mark.parametrize(
    ("name", "fits"),
    [("NVIDIA H100 80GB HBM3", True), ("NVIDIA H100 PCIe", False), ("NVIDIA H100 NVL", False), ("NVIDIA H200", False)],
)
def test_h100_fits_those_that_reach_its_peak(name, fits):
    assert NODE_CLASSES["h100"].fits(name) is fits


def test_backends_import_needs_no_torch():
    code = "import sys; from ablate.kernels import backends, errors, facts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "there", "spread"),
    [
        ("xla-cpu", 1, (1, 2, 4, 8)),
        ("tpu-v6e-compile", 1, (1, 4, 8, 16)),
        ("tpu-v6e", 1, (1,)),
        ("tpu-v6e", 4, (1, 4)),
        ("tpu-v6e", 2, (1,)),
        ("h200", 8, (1, 2, 3, 4, 5, 6, 7, 8)),
        ("h100", 2, (1, 2)),
        ("h100", 16, (1, 2, 3, 4, 5, 6, 7, 8)),
        ("cpu", 1, (1, 2, 4)),
    ],
)
def test_a_block_uses_one_device_or_all_unless_they_are_virtual_or_a_command_chooses(name, there, spread):
    assert NODE_CLASSES[name].spreads(there) == spread

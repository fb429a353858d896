import subprocess
import sys

import pytest

from kernels.backends import LANES_ON, Lane, NodeClass, lane_refusal


def test_lane_refusal_none_for_every_implemented_lane():
    assert {lane_refusal(lane, node) for node, lanes in LANES_ON.items() for lane in lanes} == {None}


def test_lanes_on_covers_every_node_class():
    assert set(LANES_ON) == set(NodeClass)


@pytest.mark.parametrize(
    ("lane", "node", "reason"),
    [
        (Lane.CUDA, NodeClass.CPU, "lane 'cuda' has no implementation on node class 'cpu'"),
        (Lane.REFERENCE, NodeClass.TPU_V6E, "implemented there: none yet"),
    ],
)
def test_lane_refusal_says_why(lane, node, reason):
    assert reason in str(lane_refusal(lane, node))


def test_backends_import_needs_no_torch():
    code = "import sys, kernels.backends, kernels.facts, kernels.errors, kernels.scan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

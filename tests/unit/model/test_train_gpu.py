"""A small hybrid trains with the cuda lane on an H100 or H200: losses of the reference lane, each gate attested."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tilelang")

from ablate.experiments.design.gates import GATES
from ablate.experiments.design.kinds.gate_readings import read_gates
from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.scan_switches import ScanFact, ScanSwitches
from ablate.model.config import AttentionConfig, HybridConfig, MambaConfig, OptimConfig, StepsConfig, TrainConfig
from ablate.model.data.dataset import Dataset
from ablate.model.training.train import TrainResult, train
from tests.corpora import small_config, small_dataset
from tests.kernels import scan_cases

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # torch's compiler warns about its own parts

SMALL = TrainConfig(
    model=HybridConfig(
        vocab_size=512,
        d_model=128,
        pattern="MFAMF",
        mamba=MambaConfig(d_state=64, headdim=64, mimo_rank=4),
        attention=AttentionConfig(num_heads=2, backend="flash"),
        scan=ScanSwitches(lane=Lane.CUDA),
    ),
    optim=OptimConfig(learning_rate=3e-3),
    steps=StepsConfig(warmup=2, timed=8, val_rows=4),
    micro_batch=4,
    dtype="bfloat16",
)
SEQ_LEN = 200


def scans(**switches: Any) -> pytest.MarkDecorator:
    """Return the mark of tests that train: what a mixer launches."""
    mamba = SMALL.model.mamba
    sizes = {"H": SMALL.model.num_value_heads, "G": mamba.ngroups, "N": mamba.d_state, "P": mamba.headdim}
    given = {"B": SMALL.micro_batch, "S": SEQ_LEN, "R": mamba.mimo_rank, "shared_angles": True, "documents": 2}
    return pytest.mark.scans(scan_cases.ScanProblem(**sizes, **given, switches=switches))


@pytest.fixture(scope="module")
def dataset(home: Path) -> Dataset:
    return small_dataset(home, seq_len=SEQ_LEN)


def run(home: Path, dataset: Dataset, **scan: Any) -> TrainResult:
    compiled = scan.pop("compile", False)
    model = replace(SMALL.model, scan=replace(SMALL.model.scan, **scan))
    data = small_config(home / "corpus", seq_len=SEQ_LEN)
    return train(replace(SMALL, model=model, data=data, compile=compiled), dataset=dataset, on_step=lambda _: None)


@scans()
def test_cuda_lane_follows_the_reference_lane(home, dataset):
    ours, theirs = run(home, dataset), run(home, dataset, lane=Lane.REFERENCE)
    for own, other in zip(ours.steps, theirs.steps, strict=True):
        assert own.loss == pytest.approx(other.loss, abs=0.02)
    assert ours.loss_val == pytest.approx(theirs.loss_val, abs=0.03)
    assert ours.steps[-1].loss < ours.steps[0].loss - 0.5


@scans()
def test_two_runs_give_equal_losses(home, dataset):
    first, second = run(home, dataset), run(home, dataset)
    assert [step.loss for step in first.steps] == [step.loss for step in second.steps]


@scans()
@pytest.mark.parametrize("compiled", [False, True])
def test_every_gate_is_attested(home, dataset, compiled):
    result = run(home, dataset, compile=compiled)
    config = replace(SMALL, compile=compiled)
    readings = read_gates({gate.name: gate.read(config) for gate in GATES.values()}, result.facts)
    assert {name: reading for name, reading in readings.items() if not reading.live} == {}
    assert all(readings[name].observed is not None for name in ("lane", "tma", "schedule", "psiv_cache", "compile"))
    assert {"outputs", "gradients"} <= {row["name"] for row in result.kernels}
    assert all(row["registers"] > 0 for row in result.kernels)
    assert result.compile_s > 0


@scans(superchunk=128)
def test_kernels_are_counted_before_step_0(home, dataset):
    result = run(home, dataset, superchunk=128)  # of no other test: of the 13, those are made that no switch shares
    seen = result.facts
    assert 0 < seen[ScanFact.KERNELS_COMPILED] + seen[ScanFact.KERNELS_LOADED] <= 13
    assert result.compile_cache_hit is (seen[ScanFact.KERNELS_COMPILED] == 0)


def test_unsupported_shape_is_refused_with_the_reason(home, dataset):
    with pytest.raises(KernelUnsupported, match="chunk_size"):
        run(home, dataset, chunk_size=256)

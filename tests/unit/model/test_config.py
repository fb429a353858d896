import subprocess
import sys
from dataclasses import replace

import pytest

from ablate.kernels.backends import Lane
from ablate.kernels.scan_switches import ScanSwitches
from ablate.model.config import (
    CONTEXT_ATTENTION,
    CONTEXT_LANES,
    AttentionConfig,
    DataConfig,
    HybridConfig,
    MambaConfig,
    MeshConfig,
    StepsConfig,
    TrainConfig,
    check_context_parallel,
    layer_runs,
)
from ablate.model.errors import ConfigError


def test_defaults_are_legal_and_derive_sizes():
    config = HybridConfig()
    assert config.d_inner == 256
    assert config.num_value_heads == 4
    assert config.mlp_width == 256
    assert config.mamba.num_angles == 16


def test_mixer_widths_sum_to_the_stated_projection():
    model = HybridConfig(d_model=64, mamba=MambaConfig(d_state=32, headdim=16, ngroups=2, mimo_rank=4))
    d_inner, heads, angles = 128, 8, 8
    assert sum(model.mixer_widths) == 2 * d_inner + 2 * 32 * 2 * 4 + 3 * heads + angles


@pytest.mark.parametrize(("fraction", "angles"), [(0.5, 8), (1.0, 16)])
def test_num_angles_is_half_the_rotated_width(fraction, angles):
    assert MambaConfig(d_state=32, rope_fraction=fraction).num_angles == angles


def scan(**switches):
    return HybridConfig(scan=ScanSwitches(**switches))


@pytest.mark.parametrize(
    ("make", "field", "part"),
    [
        (lambda: scan(chunk_size=12), "model.scan.chunk_size", "is 12; allowed: 8, 16, 32, 64, 128, 256"),
        (lambda: scan(superchunk=8), "model.scan.superchunk", "is 8; allowed: a multiple of chunk_size = 16, at most"),
        (lambda: scan(superchunk=8192), "model.scan.superchunk", "at most 4096"),
        (lambda: scan(superchunk=40), "model.scan.superchunk", "a multiple of chunk_size = 16"),
        (lambda: scan(pipeline_stages=3), "model.scan.pipeline_stages", "is 3; allowed: 0, 1, 2"),
        (lambda: MambaConfig(mimo_rank=3), "model.mamba.mimo_rank", "allowed: 1, 2, 4, 8"),
        (lambda: MambaConfig(rope_fraction=0.25), "model.mamba.rope_fraction", "allowed: 0.5, 1.0"),
        (lambda: MambaConfig(d_state=30), "model.mamba.d_state", "a multiple of 4"),
        (lambda: MambaConfig(dt_min=0.2), "model.mamba.dt_min", "0 < dt_min < dt_max = 0.1"),
        (lambda: HybridConfig(pattern="MXF"), "model.pattern", "unknown block 'X'"),
        (lambda: HybridConfig(pattern=""), "model.pattern", "is 0; allowed: 1 to 256"),
        (lambda: HybridConfig(mamba=MambaConfig(headdim=48)), "model.mamba.headdim", "256 must be a multiple"),
        (lambda: HybridConfig(mamba=MambaConfig(ngroups=3)), "model.mamba.ngroups", "the 4 heads"),
        (
            lambda: HybridConfig(attention=AttentionConfig(num_heads=3)),
            "model.attention.num_heads",
            "twice that",
        ),
        (lambda: replace(TrainConfig(), seed=-1), "seed", "is -1"),
        (lambda: replace(TrainConfig(), loss_chunk_tokens=8), "loss_chunk_tokens", "is 8"),
    ],
)
def test_illegal_value_names_field_and_allowed_values(make, field, part):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.field == field
    assert part in caught.value.message


def test_config_and_flops_import_needs_no_torch():
    code = "import sys, ablate.model.config, ablate.model.facts, ablate.model.counts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("devices", [2, 4])
def test_rows_are_shared_evenly_between_devices(devices: int) -> None:
    assert TrainConfig(micro_batch=4, mesh=MeshConfig(devices=devices)).tokens_per_step == 4 * 256
    with pytest.raises(ConfigError, match=rf"micro_batch: is 5; allowed: a multiple of the {devices} devices"):
        TrainConfig(micro_batch=5, mesh=MeshConfig(devices=devices))


def test_a_mesh_of_another_size_or_of_one_device_to_divide_over_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh.devices: is 3; allowed: 1, 2, 4, 8, 16"):
        MeshConfig(devices=3)
    with pytest.raises(ConfigError, match=r"mesh.sharding: is replicated; no two devices have different tokens"):
        MeshConfig(sharding="replicated")
    with pytest.raises(ConfigError, match=r"mesh.sharding: is hsdp; allowed from 4 devices with different tokens: 2"):
        MeshConfig(devices=4, tensor=2, sharding="hsdp")
    with pytest.raises(ConfigError, match=r"mesh.tensor: is 4; tensor \* context = 8 does not divide 4 devices"):
        MeshConfig(devices=4, tensor=4, context=2)
    with pytest.raises(ConfigError, match=r"mesh.context: is 2; allowed: a number that divides data.seq_len = 9"):
        TrainConfig(mesh=MeshConfig(devices=2, context=2), data=DataConfig(seq_len=9))


def shared_row(model: HybridConfig | None = None, **fields: object) -> TrainConfig:
    return TrainConfig(model=model or HybridConfig(), mesh=MeshConfig(devices=2, context=2), **fields)


@pytest.mark.parametrize(
    ("config", "field", "part"),
    [
        (shared_row(scan(lane=Lane.PEER)), "model.scan.lane", "is peer, whose kernels take no initial state; allowed"),
        (shared_row(scan(lane=Lane.XLA)), "model.scan.lane", "allowed with mesh.context 2: reference, cuda"),
        (
            shared_row(HybridConfig(attention=AttentionConfig(backend="flex"))),
            "model.attention.backend",
            "is flex, which takes as many keys as queries; allowed with mesh.context 2: sdpa, flash, fa4",
        ),
        (shared_row(HybridConfig(scan_layers=True)), "model.scan_layers", "cannot exchange messages; allowed"),
        (
            shared_row(data=DataConfig(val_seq_len=33)),
            "mesh.context",
            "is 2; allowed: a number that divides the 33 tokens of a validation row",
        ),
    ],
)
def test_configurations_whose_rows_cannot_be_shared_are_refused(config: TrainConfig, field: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_context_parallel(config)
    assert caught.value.field == field
    assert part in caught.value.message
    check_context_parallel(replace(config, mesh=MeshConfig(devices=2)))


def test_a_row_can_be_shared_where_no_layer_or_validation_prevents_it() -> None:
    check_context_parallel(shared_row())
    check_context_parallel(shared_row(replace(scan(lane=Lane.PEER), pattern="AF")))
    check_context_parallel(shared_row(HybridConfig(pattern="MF", attention=AttentionConfig(backend="flex"))))
    check_context_parallel(shared_row(data=DataConfig(val_seq_len=33), steps=StepsConfig(val_rows=0)))
    for backend in CONTEXT_ATTENTION:
        for lane in CONTEXT_LANES:
            check_context_parallel(shared_row(replace(scan(lane=lane), attention=AttentionConfig(backend=backend))))


@pytest.mark.parametrize(
    ("pattern", "runs"),
    [
        ("M", ["M*1"]),
        ("MFA", ["M*1", "F*1", "A*1"]),
        ("MFMF", ["MF*2"]),
        ("MFMFA", ["MF*2", "A*1"]),
        ("MAMF", ["M*1", "A*1", "M*1", "F*1"]),
        ("MAMFMAMF", ["MAMF*2"]),
        ("MMMFFA", ["M*3", "F*2", "A*1"]),
        ("MMFMF", ["M*1", "MF*2"]),
        ("MMAMMA", ["MMA*2"]),
    ],
)
def test_layer_runs_trace_as_few_blocks_as_possible(pattern: str, runs: list[str]) -> None:
    divided = layer_runs(HybridConfig(pattern=pattern))
    assert [f"{run.group}*{run.trips}" for run in divided] == runs
    assert "".join(run.group * run.trips for run in divided) == pattern
    kernel = layer_runs(HybridConfig(pattern=pattern, attention=AttentionConfig(backend="flash")))
    assert "".join(run.group * run.trips for run in kernel) == pattern
    assert not any("A" in run.group and run.trips > 1 for run in kernel)

"""A plan refuses what every trial would refuse: the limits of a configuration against the checks of the layers."""

import random
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from ablate.experiments.design.gate import replace_fields
from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelUnsupported
from ablate.model.back_end_limits import check_back_ends
from ablate.model.config import AttentionConfig, HybridConfig, MambaConfig, StepsConfig, TrainConfig
from ablate.model.errors import ConfigError
from ablate.model.hybrid import Hybrid
from ablate.model.layers import attention, linear

BASE = TrainConfig(
    model=HybridConfig(vocab_size=300, d_model=32, mamba=MambaConfig(d_state=8, headdim=16, mimo_rank=1)),
    steps=StepsConfig(warmup=0, timed=1),
    dtype="bfloat16",
)


def is_refused(config: TrainConfig) -> bool:
    try:
        check_back_ends(config)
    except ConfigError:
        return True
    return False


def sizes_of_products(config: TrainConfig, rows: int, tokens: int) -> set[int]:
    """Return all sizes of the products of the blocks for one batch, as the layers see them."""
    sizes: set[int] = set()

    def look(x: torch.Tensor, weight: torch.Tensor, _dtype: torch.dtype) -> None:
        sizes.update((*weight.shape, x.numel() // x.shape[-1]))

    def product(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return ((a[0].float() * a[1]) @ (b[0].float() * b[1])).bfloat16()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_check_float8", look)
        patch.setattr(linear, "_product", product)
        model = Hybrid(config.model, compute_dtype=torch.bfloat16)
        ids = torch.zeros(rows, tokens, dtype=torch.int64)
        with torch.no_grad():
            model(ids, ids)
    return sizes


@pytest.mark.parametrize("seed", range(40))
def test_float8_is_refused_exactly_where_a_layer_would(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  # not for secrets
    changes = {
        "model.projections": chance.choice(("fp8", "fp8_forward")),
        "model.pattern": chance.choice(("F", "A", "M", "MFA", "AF")),
        "model.d_model": chance.choice((32, 32, 64, 40)),
        "model.attention.num_heads": 4,
        **chance.choice(
            ({}, {"model.attention.num_kv_heads": 2}, {"model.attention.latent_rank": chance.choice((16, 8))})
        ),
        "model.mamba.headdim": chance.choice((8, 16)),
        "model.mamba.mimo_rank": chance.choice((1, 2)),
        "model.mlp_ratio": chance.choice((2.0, 2.0, 1.5, 2.7)),
        "data.seq_len": chance.choice((16, 32, 24, 20)),
        "micro_batch": chance.choice((1, 2, 4)),
        "steps.val_rows": chance.choice((0, 3, 4, 5)),
    }
    if changes["model.d_model"] == 40:  # half of a head has an odd width
        changes.pop("model.attention.latent_rank", None)
    config = replace_fields(BASE, changes)
    batches = {config.micro_batch}
    batches |= {
        min(config.micro_batch, config.steps.val_rows - start)
        for start in range(0, config.steps.val_rows, config.micro_batch)
    }
    sizes = set().union(*(sizes_of_products(config, rows, config.data.seq_len) for rows in batches))
    assert is_refused(config) is any(size % 16 for size in sizes), (changes, sizes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("heads", [4, 5])
@pytest.mark.parametrize("backend", ["flash", "fa4", "cudnn", "flex", "sdpa"])
def test_attention_is_refused_exactly_where_the_layer_would(
    monkeypatch: pytest.MonkeyPatch, backend: str, heads: int, softcap: float, window: int, dtype: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(attention, "find_spec", lambda _name: object())
    width = 640 // heads if heads == 4 else 48
    config = replace(
        BASE,
        dtype=dtype,
        model=replace(
            BASE.model,
            d_model=width * heads * 2,
            attention=AttentionConfig(num_heads=2 * heads, backend=backend, softcap=softcap, window=window),
            pattern="A",
        ),
    )
    q = SimpleNamespace(is_cuda=True, dtype=getattr(torch, dtype), shape=(1, 8, heads, width), device=None)
    dtypes = (torch.float32, *attention.HALF_DTYPES) if backend == "flex" else attention.HALF_DTYPES
    refused = False
    if backend != "sdpa":
        try:
            attention._need_gpu(backend, q, dtypes, attention.ScoreRules(softcap, window))
        except KernelUnsupported:
            refused = True
        refused |= backend == "fa4" and attention._fa4_problem(q) is not None
    assert is_refused(config) is refused
    assert not is_refused(replace_fields(config, {"model.pattern": "M"}))
    on_xla = is_refused(replace_fields(config, {"model.scan.lane": Lane.XLA}))
    assert on_xla is (window > 0 and backend != "sdpa")


def test_recorded_steps_take_every_loss_that_stays_on_the_gpu() -> None:
    recorded = replace(BASE, cuda_graph=True)
    assert [kind for kind in ("dense", "compiled", "chunked", "torch_linear_ce", "liger", "quack")
            if is_refused(replace(recorded, loss=kind))] == ["liger"]  # fmt: skip
    assert not is_refused(replace(BASE, loss="liger"))


@pytest.mark.parametrize("pattern", ["M", "F", "MFAF"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lane", list(Lane))
def test_generated_scan_kernels_take_bfloat16_only(lane: Lane, dtype: str, pattern: str) -> None:
    config = replace_fields(BASE, {"dtype": dtype, "model.pattern": pattern, "model.scan.lane": lane})
    generated = lane in {Lane.CUDA, Lane.PEER}
    assert is_refused(config) is (generated and dtype == "float32" and "M" in pattern)


@pytest.mark.parametrize("lane", list(Lane))
def test_copying_warp_group_of_lane_peer_needs_dense_rows(lane: Lane) -> None:
    for documents, tokens, validated, chunk in product(("separate", "joined"), (64, 72), (0, 64, 72), (8, 16)):
        changes = {
            "model.pattern": "MF",
            "model.scan.lane": lane,
            "model.scan.warp_specialize": True,
            "model.scan.chunk_size": chunk,
            "data.documents": documents,
            "data.seq_len": tokens,
            "data.val_seq_len": validated,
        }
        dense = documents == "joined" and tokens % chunk == (validated or tokens) % chunk == 0
        config = replace_fields(BASE, changes)
        assert is_refused(config) == (lane is Lane.PEER and not dense), changes
        assert not is_refused(replace_fields(config, {"model.scan.warp_specialize": False}))

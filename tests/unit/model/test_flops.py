"""Analytic counts against the matmuls that torch counts in a real forward pass."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ablate.kernels.mamba3_mimo import mamba3_mimo
from ablate.kernels.scan_switches import ScanSwitches
from ablate.model import counts
from ablate.model.blocks import scan_flops
from ablate.model.config import (
    BLOCK_KINDS,
    AttentionConfig,
    DataConfig,
    ExpertsConfig,
    HybridConfig,
    MambaConfig,
    TrainConfig,
)
from ablate.model.hybrid import build
from ablate.model.training.loss import cross_entropy
from tests.scan_inputs import ScanSizes, random_inputs

MODEL = HybridConfig(
    vocab_size=512,
    d_model=64,
    pattern="MFAF",
    mlp_ratio=1.5,
    mamba=MambaConfig(d_state=16, headdim=16, ngroups=2, mimo_rank=2),
    attention=AttentionConfig(num_heads=4),
    experts=ExpertsConfig(products="loop"),  # torch counts no grouped products
    scan=ScanSwitches(chunk_size=16),
)
BATCH, LENGTH = 2, 64


def counted_forward(model):
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    module = build(TrainConfig(model=model))
    with (
        torch.no_grad(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        cross_entropy(module(tokens, tokens), module.lm_head.weight, tokens, tokens == 0)
    return counter.get_total_flops()


def counted_scan(chunk_size=16):
    shape = ScanSizes(batch=BATCH, length=LENGTH, heads=8, groups=2, state=16, width=16, ranks=2)
    with FlopCounterMode(display=False) as counter:
        mamba3_mimo(random_inputs(shape), ScanSwitches(chunk_size=chunk_size))
    return counter.get_total_flops()


@pytest.mark.parametrize("pattern", [*sorted(set(BLOCK_KINDS) - {"M"}), "FAF"])
def test_forward_flops_equal_counted_matmuls(pattern):
    model = replace(MODEL, pattern=pattern)
    assert counts.forward_flops_per_token(model, LENGTH) * BATCH * LENGTH == counted_forward(model)


@pytest.mark.parametrize("own", [{"num_kv_heads": 2, "qk_norm": "rms"}, {"latent_rank": 5}], ids=["shared", "latent"])
def test_forward_flops_of_kinds_of_attention_equal_counted_matmuls(own):
    model = replace(MODEL, pattern="A", attention=AttentionConfig(num_heads=4, **own))
    assert counts.forward_flops_per_token(model, LENGTH) * BATCH * LENGTH == counted_forward(model)


@pytest.mark.parametrize(("window", "seen"), [(0, 64), (1, 1), (16, 16), (64, 64), (100, 64)])
def test_a_window_counts_the_scores_inside_of_it(window, seen):
    plain = replace(MODEL, pattern="AA")
    model = replace(plain, attention=replace(plain.attention, window=window))
    saved = counts.forward_flops_per_token(plain, LENGTH) - counts.forward_flops_per_token(model, LENGTH)
    assert saved == 2 * 2 * 2 * MODEL.d_model * (LENGTH - seen)
    config = TrainConfig(model=model, data=DataConfig(seq_len=LENGTH), micro_batch=BATCH)
    assert counts.document_flops(config, BATCH * LENGTH * seen) == counts.step_flops(config)


def test_forward_flops_equal_counted_matmuls_outside_the_scan():
    tokens = BATCH * LENGTH
    analytic = (counts.forward_flops_per_token(MODEL, LENGTH) - scan_flops(MODEL)) * tokens
    assert analytic == counted_forward(MODEL) - counted_scan()


@pytest.mark.parametrize("chunk_size", [8, 16, 32])
def test_scan_flops_are_the_least_and_the_chunks_add_the_stated_rest(chunk_size):
    heads, ranks, rows = 8, 2, 2 * chunk_size
    extra = heads * ranks * 2 * rows * (16 + 16)
    assert counted_scan(chunk_size) == (scan_flops(MODEL) + extra) * BATCH * LENGTH


def test_step_flops_is_three_forwards_of_all_tokens():
    config = TrainConfig(model=MODEL, data=DataConfig(seq_len=LENGTH), micro_batch=BATCH)
    assert counts.step_flops(config) == 3 * counts.forward_flops_per_token(MODEL, LENGTH) * BATCH * LENGTH


@pytest.mark.parametrize(
    "change",
    [{"scan": ScanSwitches(schedule="sequential")}, {"scan": ScanSwitches(chunk_size=64, psiv_cache=True)}],
    ids=["schedule", "chunk_and_cache"],
)
def test_step_flops_do_not_depend_on_how_the_scan_runs(change):
    config = TrainConfig(model=MODEL)
    assert counts.step_flops(config) == counts.step_flops(replace(config, model=replace(MODEL, **change)))


@pytest.mark.parametrize("pattern", ["MFAF", "AA", "MF"])
def test_document_flops_count_the_pairs_that_attention_sees(pattern):
    config = TrainConfig(model=replace(MODEL, pattern=pattern), data=DataConfig(seq_len=LENGTH), micro_batch=BATCH)
    whole = BATCH * LENGTH**2
    assert counts.document_flops(config, whole) == counts.step_flops(config)
    halves = BATCH * 2 * (LENGTH // 2) * (LENGTH // 2 + 1) / 2
    saved = counts.step_flops(config) - counts.document_flops(config, halves)
    scores_and_values = 2 * 2 * MODEL.d_model  # a product of queries and keys, and one with values, for each pair
    assert saved == 3 * pattern.count("A") * scores_and_values * (whole - halves)

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import softplus

from ablate.model.config import HybridConfig, MambaConfig, TrainConfig
from ablate.model.hybrid import build
from ablate.model.training.loss import cross_entropy

CONFIG = TrainConfig(model=HybridConfig(vocab_size=512, d_model=64, pattern="MFAF", mamba=MambaConfig(mimo_rank=4)))


@pytest.fixture
def nan_filled_buffers():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_build_equal_seeds_are_bit_equal_and_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    one, two = build(CONFIG), build(CONFIG)
    assert torch.equal(state, torch.get_rng_state())
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_build_other_seed_changes_every_random_parameter():
    one, two = build(CONFIG), build(replace(CONFIG, seed=1))
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(a, b) == bool((a == a.flatten()[0]).all()), name


@pytest.mark.usefixtures("nan_filled_buffers")
def test_build_fills_every_parameter():
    for name, parameter in build(CONFIG).named_parameters():
        assert parameter.isfinite().all(), name
        assert parameter.device.type == "cpu"
        assert parameter.dtype == torch.float32


def test_build_shared_parts_of_two_arms_start_equal():
    other = replace(CONFIG, model=replace(CONFIG.model, mamba=MambaConfig(mimo_rank=2)))
    one, two = dict(build(CONFIG).named_parameters()), dict(build(other).named_parameters())
    same = [name for name in one if one[name].shape == two[name].shape]
    assert "blocks.2.mixer.qkv_proj.weight" in same
    assert all(torch.equal(one[name], two[name]) for name in same)


def test_build_mixer_constants():
    mixer = build(CONFIG).blocks[0].mixer
    for name, value in {"psi": 0.25, "phi": 0.25, "zeta": 1, "q_bias": 1, "k_bias": 1, "D": 1}.items():
        assert (getattr(mixer, name) == value).all(), name


def test_build_step_sizes_lie_in_the_configured_range():
    model = HybridConfig(d_model=512, pattern="M", mamba=MambaConfig(headdim=8))
    dt = softplus(build(TrainConfig(model=model)).blocks[0].mixer.dt_bias)
    assert dt.min() >= 1e-3 * 0.999
    assert dt.max() <= 0.1 * 1.001
    middle = dt.log().mean().item()
    assert middle == pytest.approx((math.log(1e-3) + math.log(0.1)) / 2, abs=0.5)


def test_build_step_size_floor_applies():
    model = HybridConfig(d_model=64, pattern="M", mamba=MambaConfig(headdim=8, dt_min=1e-6, dt_max=1e-5))
    dt = softplus(build(TrainConfig(model=model)).blocks[0].mixer.dt_bias)
    assert dt.tolist() == pytest.approx([1e-4] * 16, rel=1e-3)


def test_build_first_loss_is_close_to_uniform():
    model = build(CONFIG)
    tokens = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0))
    ids = torch.zeros_like(tokens)
    loss = cross_entropy(model(tokens, ids), model.lm_head.weight, tokens.roll(-1, 1), ids == 0)
    assert loss.item() == pytest.approx(math.log(512), abs=0.15)

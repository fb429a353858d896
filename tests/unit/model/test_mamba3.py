"""The mixer against its definition: projection order, norms, decay, step size, then the scan's oracle."""

import math
import random
from pathlib import Path

import pytest
import torch

from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo import peer
from ablate.kernels.scan_switches import ScanSwitches
from ablate.model.config import HybridConfig, MambaConfig, TrainConfig
from ablate.model.hybrid import build
from ablate.model.layers.mamba3 import InputProjection, decay_rate, use_lane
from tests.kernels.oracle import Oracle


def config(**mamba):
    sizes = {"d_state": 16, "headdim": 8, "ngroups": 2, "mimo_rank": 2} | mamba
    return HybridConfig(vocab_size=512, d_model=16, pattern="M", mamba=MambaConfig(**sizes))


def mixer_of(model: HybridConfig, dtype="float32"):
    mixer = build(TrainConfig(model=model, seed=3, dtype=dtype)).blocks[0].mixer
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # the initial constants would hide a swap
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return mixer


def softplus(x):
    return torch.log1p(torch.exp(x))


def expected_output(mixer, x_BSD, ids_BS):
    """Mixer output in float64, written out from the definition."""
    mamba = mixer.config.mamba
    weights = {name: p.detach().double() for name, p in mixer.named_parameters()}
    heads, d_inner, n = mixer.config.num_value_heads, mixer.config.d_inner, mamba.d_state
    row = x_BSD.double() @ weights["in_proj.weight"].T
    position = 0

    def take(width):
        nonlocal position
        position += width
        return row[..., position - width : position]

    z, x, b, c = take(d_inner), take(d_inner), *(take(n * mamba.ngroups * mamba.mimo_rank) for _ in range(2))
    dd_dt, dd_a, trap, angles = take(heads), take(heads), take(heads), take(mamba.num_angles)
    assert position == row.shape[-1]

    def direction(flat, norm):
        parts = flat.reshape(*flat.shape[:2], mamba.mimo_rank, mamba.ngroups, n)
        return parts / (parts.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights[norm]

    dt = softplus(dd_dt + weights["dt_bias"])
    rate = torch.where(dd_a >= 0, 1 + dd_a, 1 / (1 + dd_a.abs()))
    values = {name: weights[name] for name in ("q_bias", "k_bias", "psi", "zeta", "phi", "D")}
    values |= {"q": direction(c, "q_norm.weight"), "k": direction(b, "k_norm.weight")}
    values |= {name: t.reshape(*t.shape[:2], heads, -1) for name, t in (("v", x), ("z", z))}
    values |= {name: t.transpose(1, 2) for name, t in (("dt", dt), ("adt", -rate * dt), ("trap", trap))}
    values["angles"] = angles[:, :, None].expand(-1, -1, heads, -1)
    out = torch.from_numpy(Oracle({k: v.numpy() for k, v in values.items()}, ids_BS.numpy()).out)
    return out.flatten(2) @ weights["out_proj.weight"].T


@pytest.mark.parametrize("rope_fraction", [0.5, 1.0])
@pytest.mark.parametrize("ngroups", [1, 2])
def test_forward_matches_definition(rope_fraction, ngroups):
    mixer = mixer_of(config(rope_fraction=rope_fraction, ngroups=ngroups))
    x_BSD = torch.randn(2, 21, 16, generator=torch.Generator().manual_seed(1))
    ids_BS = torch.tensor([[0] * 7 + [1] * 14, [0] * 20 + [1]])
    expected = expected_output(mixer, x_BSD, ids_BS)
    actual = mixer(x_BSD, ids_BS).detach().double()
    assert float((actual - expected).norm() / expected.norm()) < 1e-5


def test_forward_bfloat16_is_close_and_keeps_float32_parameters():
    mixer = mixer_of(config(), dtype="bfloat16")
    x_BSD = torch.randn(2, 21, 16, generator=torch.Generator().manual_seed(1))
    ids_BS = torch.zeros(2, 21, dtype=torch.long)
    actual = mixer(x_BSD, ids_BS).detach()
    expected = expected_output(mixer, x_BSD, ids_BS)
    assert actual.dtype == torch.bfloat16
    assert {p.dtype for p in mixer.parameters()} == {torch.float32}
    assert float((actual.double() - expected).norm() / expected.norm()) < 3e-2


@pytest.mark.parametrize(("x", "expected"), [(2.0, -3.0), (0.0, -1.0), (-1.0, -0.5), (-99.0, -0.01), (-1e9, -1e-4)])
def test_decay_rate_heavy_tail_with_floor(x, expected):
    assert decay_rate(torch.tensor(x), "heavy_tail", floor=1e-4).item() == pytest.approx(expected)


@pytest.mark.parametrize(("x", "expected"), [(0.0, -math.log(2)), (-50.0, -1e-4), (50.0, -50.0)])
def test_decay_rate_softplus_with_floor(x, expected):
    assert decay_rate(torch.tensor(x), "softplus", floor=1e-4).item() == pytest.approx(expected)


@pytest.mark.parametrize("x", [1.0, 0.0, -1.0, 5.0, -5.0])
def test_decay_rate_heavy_tail_gradient_is_finite_and_negative(x):
    leaf = torch.tensor(x, requires_grad=True)
    decay_rate(leaf, "heavy_tail", floor=1e-4).backward()
    slope = 1.0 if x >= 0 else 1 / (1 - x) ** 2
    assert leaf.grad.item() == pytest.approx(-slope)


def test_forward_passes_switches_to_the_operation():
    model = HybridConfig(d_model=32, pattern="M", mamba=MambaConfig(headdim=16), scan=ScanSwitches(lane=Lane.CUDA))
    mixer = build(TrainConfig(model=model)).blocks[0].mixer
    with pytest.raises(KernelUnsupported, match="lane 'cuda' has no implementation on node class 'cpu'"):
        mixer(torch.zeros(1, 8, 32), torch.zeros(1, 8, dtype=torch.long))


@pytest.mark.parametrize(("lane", "used"), [(Lane.PEER, True), (Lane.CUDA, False), (Lane.REFERENCE, False)])
def test_use_lane_puts_the_folder_on_the_path_for_lane_peer_alone(monkeypatch, tmp_path, lane, used):
    asked: list[Path] = []
    monkeypatch.setattr(peer, "use_site", asked.append)
    use_lane(lane, tmp_path)
    assert asked == ([tmp_path] if used else [])


def test_use_lane_without_a_folder_leaves_it_to_the_lane_to_say_what_it_needs():
    use_lane(Lane.PEER, None)
    assert "ABLATE_PEER_SITE" in str(peer.import_refusal())


def test_products_of_the_input_projection_and_their_gradients_are_those_of_one_product():
    for seed in range(30):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)  # noqa: S311 - a reproducible draw
        sizes = {"mimo_rank": draw.choice((1, 2, 4, 8)), "rope_fraction": draw.choice((0.5, 1.0))}
        model = config(**sizes, ngroups=draw.choice((1, 2, 4)))
        layer = InputProjection(model, compute_dtype=torch.float64)
        torch.nn.init.normal_(layer.weight, generator=generator)
        shape = (draw.randint(1, 3), draw.randint(1, 9), model.d_model)
        x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        parts = layer(x)
        whole = x @ layer.weight.double().T
        assert [part.shape[-1] for part in parts] == list(model.mixer_widths)
        torch.testing.assert_close(torch.cat(parts, -1), whole)
        upstream = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
        got = torch.autograd.grad(parts, (x, layer.weight), torch.split(upstream, list(model.mixer_widths), -1))
        for own, want in zip(got, torch.autograd.grad(whole, (x, layer.weight), upstream), strict=True):
            torch.testing.assert_close(own, want)
        assert all(part.is_contiguous() for part in parts[:2])

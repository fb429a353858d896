import importlib
import random
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from ablate.kernels import facts
from ablate.kernels.errors import KernelUnsupported
from ablate.model.config import AttentionConfig, HybridConfig, MambaConfig, TrainConfig
from ablate.model.facts import ModelFact
from ablate.model.hybrid import build
from ablate.model.layers.attention import (
    ATTEND,
    CausalAttention,
    ScoreRules,
    block_mask,
    document_mask,
    rotary_tables,
    rotate,
)

CONFIG = HybridConfig(vocab_size=512, d_model=32, pattern="A", attention=AttentionConfig(num_heads=4))


def drawn_config(draw):
    heads, width = draw.choice((1, 2, 4, 6)), draw.choice((4, 8))
    fields = {
        "num_heads": heads,
        "softcap": draw.choice((0.0, 1.5)),
        "window": draw.choice((0, 1, 2, 5, 40)),
        "rope_theta": draw.choice((100.0, 10_000.0)),
    }
    if draw.random() < 0.3:
        fields["latent_rank"] = draw.randint(1, 9)
    else:
        fields["num_kv_heads"] = draw.choice([0, *(number for number in (1, 2, 3) if heads % number == 0)])
        fields["qk_norm"] = draw.choice(("none", "rms"))
    width = max(width, 16 // heads)  # the smallest d_model is 16
    sizes = {"vocab_size": 512, "d_model": heads * width, "mamba": MambaConfig(headdim=8)}
    return HybridConfig(**sizes, pattern="A", attention=AttentionConfig(**fields))


def in_float64(config, generator):
    """An attention layer without equal numbers, in float64."""
    module = CausalAttention(config, compute_dtype=torch.float64).double()
    for parameter in module.parameters():
        parameter.data.normal_(generator=generator)
    return module


def drawn_ids(draw, rows, length):
    """Documents of any length, and ids that return."""
    share = draw.choice((0.0, 0.15, 0.6))
    ids = torch.zeros(rows, length, dtype=torch.int64)
    for row in range(rows):
        for t in range(1, length):
            step = 1 + (draw.random() < 0.5) if draw.random() < share else 0
            ids[row, t] = (ids[row, t - 1] + step) % 3
    return ids


def rms(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def expected_output(module, config, x_BSD, ids_BS):
    """Attention one query of one head at a time, by complex rotations, from the weights of `module`."""
    own, weight = config.attention, dict(module.named_parameters())
    heads, size = own.num_heads, config.d_model // own.num_heads
    turned = size // 2 if own.latent_rank else size
    rate = own.rope_theta ** -(torch.arange(turned // 2, dtype=torch.float64) / (turned // 2))
    rows = x_BSD @ weight["qkv_proj.weight"].T

    def rotated(vector, t):
        pairs = torch.complex(vector[: turned // 2], vector[turned // 2 :]) * torch.polar(
            torch.ones_like(rate), t * rate
        )
        return torch.cat((pairs.real, pairs.imag))

    def query(row, t, head):
        q = row[head * size :][:size]
        if own.latent_rank:
            return torch.cat((q[:turned], rotated(q[turned:], t)))
        return rotated(rms(q, weight["q_norm.weight"]) if own.qk_norm == "rms" else q, t)

    def key_and_value(row, u, head):
        after = row[config.d_model :]
        if own.latent_rank:
            latent = rms(after[: own.latent_rank], weight["latent_norm.weight"])
            made = (weight["latent_proj.weight"] @ latent)[head * (turned + size) :][: turned + size]
            return torch.cat((made[:turned], rotated(after[own.latent_rank :], u))), made[turned:]
        shared = own.num_kv_heads or heads
        place = head // (heads // shared) * size
        k, v = after[place:][:size], after[shared * size + place :][:size]
        return rotated(rms(k, weight["k_norm.weight"]) if own.qk_norm == "rms" else k, u), v

    def attended(row, ids, t, head):
        start = max((u for u in range(1, t + 1) if ids[u] != ids[u - 1]), default=0)
        seen = [u for u in range(start, t + 1) if not own.window or t - u < own.window]
        keys, values = zip(*(key_and_value(row[u], u, head) for u in seen), strict=True)
        scores = torch.stack(keys) @ query(row[t], t, head) / size**0.5
        scores = own.softcap * (scores / own.softcap).tanh() if own.softcap else scores
        return scores.softmax(0) @ torch.stack(values)

    out = [
        torch.stack([torch.cat([attended(row, ids, t, head) for head in range(heads)]) for t in range(len(ids))])
        for row, ids in zip(rows, ids_BS, strict=True)
    ]
    return torch.stack(out) @ weight["out_proj.weight"].T


@pytest.mark.parametrize("seed", range(30))
def test_values_and_gradients_match_the_definition_in_float64(seed, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)  # noqa: S311  # a reproducible draw
    config, rows, length = drawn_config(draw), draw.randint(1, 2), draw.randint(1, 9)
    module, ids_BS = in_float64(config, generator), drawn_ids(draw, rows, length)
    x_BSD = torch.randn(rows, length, config.d_model, generator=generator, dtype=torch.float64, requires_grad=True)
    angles = module.rotary_tables(length, x_BSD.device)[0].shape[-1]
    rate = config.attention.rope_theta ** -(torch.arange(angles, dtype=torch.float64) / angles)
    angle = (torch.arange(length).double()[:, None] * rate)[:, None]  # the layer's own tables are float32
    with facts.collect() as seen:
        actual = module(x_BSD, ids_BS, (angle.cos(), angle.sin()))
    expected = expected_output(module, config, x_BSD, ids_BS)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    leaves = [x_BSD, *module.parameters()]
    got, want = (torch.autograd.grad(out, leaves, upstream) for out in (actual, expected))
    for a, b in zip((actual, *got), (expected, *want), strict=True):
        assert float((a - b).detach().norm()) <= 1e-11 * float(b.detach().norm()) + 1e-13, config
    assert seen == {ModelFact.ATTENTION: "sdpa"}


def test_tables_of_the_layer_are_those_of_its_positions():
    module = build(TrainConfig(model=CONFIG)).blocks[0].mixer
    cos, sin = module.rotary_tables(7, torch.device("cpu"))
    angle = torch.arange(7)[:, None] * 10_000.0 ** -(torch.arange(4) / 4)
    assert torch.allclose(cos[:, 0], angle.cos(), atol=1e-6)
    assert torch.allclose(sin[:, 0], angle.sin(), atol=1e-6)


def test_document_mask_is_causal_and_closed():
    mask = document_mask(torch.tensor([[7, 7, 3, 7]]))[0, 0]
    assert mask.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, False, True],
    ]


def test_document_mask_single_token():
    assert document_mask(torch.tensor([[5]])).tolist() == [[[[True]]]]


def test_rotated_scores_depend_on_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).expand(2, 1, 30, 1, 8)
    tables = rotary_tables(30, 8, 100.0, torch.device("cpu"))
    scores = rotate(q, tables)[0, :, 0] @ rotate(k, tables)[0, :, 0].mT
    assert scores[5, 2].item() == pytest.approx(scores[25, 22].item(), abs=1e-4)
    assert abs(scores[5, 2].item() - scores[5, 4].item()) > 1e-3


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [0, 1, 30, 200])
def test_flex_mask_and_dense_mask_agree(window):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 150, 8, generator=generator)
    k, v = k[:, :1], v[:, :1]  # heads of queries share them
    ids_BS = torch.tensor([[0] * 40 + [1] * 70 + [0] * 40, [4] * 150])
    flexed = flex_attention(q, k, v, block_mask=block_mask(ids_BS, window), enable_gqa=True)
    plain = ATTEND["sdpa"](*(t.transpose(1, 2) for t in (q, k, v)), ids_BS, ScoreRules(window=window))
    assert torch.allclose(flexed.transpose(1, 2), plain, atol=1e-5)


@pytest.mark.parametrize("backend", ["flash", "fa4", "cudnn", "flex"])
def test_backend_of_another_device_is_refused(backend):
    config = HybridConfig(d_model=32, pattern="A", attention=AttentionConfig(backend=backend))
    module = build(TrainConfig(model=config)).blocks[0].mixer
    with pytest.raises(KernelUnsupported, match=f"attention '{backend}' runs on an NVIDIA GPU; q is on cpu"):
        module(torch.zeros(1, 4, 32), torch.zeros(1, 4, dtype=torch.int64))


def test_what_torchs_compiler_imports_fails_no_test_by_its_warnings(monkeypatch):
    """Compiled flex attention imports it on a GPU; in this process it may have been imported before."""
    monkeypatch.delitem(sys.modules, "torch.utils.mkldnn", raising=False)
    assert importlib.import_module("torch.utils.mkldnn")

import importlib
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from ablate.kernels import facts
from ablate.kernels.errors import KernelUnsupported
from ablate.model.config import AttentionConfig, HybridConfig, TrainConfig
from ablate.model.facts import ModelFact
from ablate.model.hybrid import build
from ablate.model.layers.attention import ATTEND, block_mask, document_mask, rotary_tables, rotate

CONFIG = HybridConfig(vocab_size=512, d_model=32, pattern="A", attention=AttentionConfig(num_heads=4))


def attention():
    return build(TrainConfig(model=CONFIG)).blocks[0].mixer


def expected_output(module, x_BSD, ids_BS):
    """Attention in float64, one query at a time."""
    heads, size = 4, 8
    weight = {name: p.detach().double() for name, p in module.named_parameters()}
    length = x_BSD.shape[1]
    q, k, v = (x_BSD.double() @ weight["qkv_proj.weight"].T).view(*x_BSD.shape[:2], 3, heads, size).unbind(2)
    rate = 10_000.0 ** -(torch.arange(size // 2, dtype=torch.float64) / (size // 2))
    turn = torch.polar(torch.ones(length, size // 2, dtype=torch.float64), torch.arange(length)[:, None] * rate)
    q, k = (torch.complex(t[..., : size // 2], t[..., size // 2 :]) * turn[:, None] for t in (q, k))
    out = torch.zeros_like(v)
    for row in range(x_BSD.shape[0]):
        start = 0
        for t in range(length):
            if t and ids_BS[row, t] != ids_BS[row, t - 1]:
                start = t
            seen = slice(start, t + 1)
            scores = (q[row, t].conj() * k[row, seen]).real.sum(-1) / size**0.5
            out[row, t] = (scores.softmax(0)[..., None] * v[row, seen]).sum(0)
    return out.flatten(2) @ weight["out_proj.weight"].T


def test_forward_matches_definition():
    module = attention()
    x_BSD = torch.randn(2, 13, 32, generator=torch.Generator().manual_seed(0))
    ids_BS = torch.tensor([[0] * 5 + [1] * 1 + [2] * 7, [4] * 13])
    with facts.collect() as seen:
        actual = module(x_BSD, ids_BS).detach().double()
    expected = expected_output(module, x_BSD, ids_BS)
    assert float((actual - expected).norm() / expected.norm()) < 1e-5
    assert seen == {ModelFact.ATTENTION: "sdpa"}


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
def test_flex_mask_and_dense_mask_agree():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 150, 8, generator=generator)
    ids_BS = torch.tensor([[0] * 40 + [1] * 70 + [0] * 40, [4] * 150])
    flexed = flex_attention(q, k, v, block_mask=block_mask(ids_BS))
    plain = ATTEND["sdpa"](*(t.transpose(1, 2) for t in (q, k, v)), ids_BS)
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

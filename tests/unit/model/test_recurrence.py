"""The matrix-state recurrence against its definition, one number at a time, in float64."""

import math
import random

import pytest
import torch

from ablate.kernels import facts
from ablate.model.back_end_limits import check_back_ends
from ablate.model.config import HybridConfig, MambaConfig, MeshConfig, RecurrenceConfig, TrainConfig, check_mesh
from ablate.model.errors import ConfigError
from ablate.model.facts import ModelFact
from ablate.model.hybrid import build
from ablate.model.layers.recurrence import Recurrence, convolved, recurrence


def drawn(draw, generator):
    """Sizes, operands of a recurrence in float64, and starts of documents."""
    batch, length, heads = draw.randint(1, 2), draw.randint(1, 6), draw.randint(1, 2)
    key, value = draw.randint(1, 3), draw.randint(1, 3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(batch, length, key), normal(batch, length, key), normal(batch, length, heads, value)
    f, weight = torch.sigmoid(normal(batch, length, heads)), normal(heads, value, value)
    starts = torch.rand(batch, length, generator=generator) < draw.choice((0.0, 0.3, 1.0))
    starts[:, 0] = False
    return [q, k, v, f, weight], starts


def by_numbers(q, k, v, f, weight, starts):
    """Every number of every state by the definition."""
    batch, length, heads, value = v.shape
    key, out = q.shape[2], torch.zeros_like(v)
    for b in range(batch):
        for h in range(heads):
            state = [[0.0] * value for _ in range(key)]
            for t in range(length):
                if starts[b, t]:
                    state = [[0.0] * value for _ in range(key)]
                now = [[0.0] * value for _ in range(key)]
                for i in range(key):
                    for j in range(value):
                        inner = sum(state[i][m] * float(weight[h, m, j]) for m in range(value))
                        candidate = math.tanh(inner + float(k[b, t, i]) * float(v[b, t, h, j]))
                        now[i][j] = float(f[b, t, h]) * state[i][j] + (1 - float(f[b, t, h])) * candidate
                state = now
                for j in range(value):
                    out[b, t, h, j] = sum(float(q[b, t, i]) * state[i][j] for i in range(key))
    return out


@pytest.mark.parametrize("seed", range(12))
def test_outputs_match_the_definition_and_gradients_its_differences(seed):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)  # noqa: S311  # a reproducible draw
    operands, starts = drawn(draw, generator)
    with facts.collect() as seen:
        out = recurrence(*operands, starts)
    assert torch.allclose(out, by_numbers(*operands, starts), rtol=1e-12, atol=1e-13)
    assert seen == {ModelFact.RECURRENCE: "loop"}
    leaves = [operand.requires_grad_() for operand in operands]
    assert torch.autograd.gradcheck(lambda *own: recurrence(*own, starts), leaves)


@pytest.mark.parametrize("seed", range(20))
def test_convolution_stays_in_its_document(seed):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)  # noqa: S311  # a reproducible draw
    rows, length, channels, width = draw.randint(1, 2), draw.randint(1, 9), draw.randint(1, 3), draw.randint(1, 5)
    x = torch.randn(rows, length, channels, generator=generator, dtype=torch.float64)
    weight = torch.randn(channels, 1, width, generator=generator, dtype=torch.float64)
    starts = torch.rand(rows, length, generator=generator) < 0.3
    expected = torch.zeros_like(x)
    for b in range(rows):
        for t in range(length):
            for back in range(width):
                if back > t or starts[b, t - back + 1 : t + 1].any():
                    break
                expected[b, t] += weight[:, 0, width - 1 - back] * x[b, t - back]
    assert torch.allclose(convolved(x, weight, starts), expected, rtol=1e-12, atol=1e-14)


def config_of(**own):
    return HybridConfig(vocab_size=300, d_model=16, pattern="R", mamba=MambaConfig(headdim=8), **own)


def expected_block(layer, own, x_BSD, ids_BS):
    """The whole block from its parts, by name."""
    weight = dict(layer.named_parameters())
    starts = torch.zeros_like(ids_BS, dtype=torch.bool)
    starts[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    row = x_BSD @ weight["in_proj.weight"].T
    values, key = own.num_heads * own.value_width, own.key_width
    channels = convolved(row[..., : 2 * key + values], weight["conv"], starts)
    channels = channels / (1 + (-channels).exp())
    q, k, v = channels[..., :key], channels[..., key : 2 * key], channels[..., 2 * key :]
    gate, x_decay = row[..., 2 * key + values : 2 * key + 2 * values], row[..., 2 * key + 2 * values :]
    f = (-weight["A_log"].exp() * (1 + (x_decay + weight["dt_bias"]).exp()).log()).exp()
    heads = v.reshape(*v.shape[:2], own.num_heads, own.value_width)
    out = by_numbers(*(t.detach() for t in (q, k, heads, f, weight["state_weight"])), starts).flatten(2)
    out = (out + weight["D"] * v) * gate / (1 + (-gate).exp())
    out = out / (out.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight["out_norm.weight"]
    return out @ weight["out_proj.weight"].T


@pytest.mark.parametrize("seed", range(8))
def test_block_matches_its_definition_on_packed_documents(seed, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)  # noqa: S311  # a reproducible draw
    own = RecurrenceConfig(
        num_heads=draw.randint(1, 3),
        key_width=draw.randint(1, 4),
        value_width=draw.randint(1, 4),
        conv_width=draw.randint(1, 4),
    )
    layer = Recurrence(config_of(recurrence=own), compute_dtype=torch.float64).double()
    for parameter in layer.parameters():
        parameter.data.normal_(generator=generator)
    x_BSD = torch.randn(2, draw.randint(1, 8), 16, generator=generator, dtype=torch.float64)
    ids_BS = (torch.rand(x_BSD.shape[:2], generator=generator) < 0.3).cumsum(1)
    with torch.no_grad():
        got, want = layer(x_BSD, ids_BS), expected_block(layer, own, x_BSD, ids_BS)
    assert torch.allclose(got, want, rtol=1e-11, atol=1e-12)


def test_states_start_as_memory_and_decay_slowly():
    layer = build(TrainConfig(model=config_of())).blocks[0].mixer
    assert torch.equal(layer.state_weight, torch.eye(16).expand(4, 16, 16))
    assert (layer.A_log == 0).all()
    kept = torch.exp(-torch.nn.functional.softplus(layer.dt_bias))
    assert ((kept > 0.9) & (kept < 1)).all()
    assert 0.3 < float(layer.conv.detach().std()) < 0.7


def test_the_compiler_leaves_the_loop_out_and_changes_no_number():
    model = build(TrainConfig(model=config_of()))
    tokens = torch.arange(40).view(2, 20)
    ids = (tokens % 20 > 7).long()
    torch.compiler.reset()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend, dynamic=False)
    assert torch.equal(compiled(tokens, ids), model(tokens, ids))
    calls = sum("tanh" in str(node.target) for graph in graphs for node in graph.graph.nodes)
    torch.compiler.reset()
    assert graphs
    assert calls == 0


def test_devices_and_float8_are_refused():
    model = config_of()
    for mesh in (MeshConfig(devices=2, tensor=2), MeshConfig(devices=2, context=2)):
        with pytest.raises(
            ConfigError, match=r"has block .R., which devices cannot share; allowed with mesh.tensor and"
        ):
            check_mesh(TrainConfig(model=model, mesh=mesh))
    check_mesh(TrainConfig(model=model, mesh=MeshConfig(devices=2)))
    with pytest.raises(ConfigError, match=r"is fp8, which block 'R' \(matrix-state recurrence\) cannot do"):
        check_back_ends(TrainConfig(model=config_of(projections="fp8"), dtype="bfloat16"))


@pytest.mark.parametrize(
    ("sizes", "given"),
    [
        ({"key_width": 16}, "key_width 32, 64, 128; it is 16"),
        ({"value_width": 32, "key_width": 64}, "value_width 8, 16; it is 32"),
    ],
)
def test_sizes_that_the_kernels_lack_are_refused(sizes, given):
    own = RecurrenceConfig(walk="fused", **sizes)
    with pytest.raises(ConfigError, match=rf"walk: is fused, which takes {given}; allowed: loop"):
        check_back_ends(TrainConfig(model=config_of(recurrence=own), dtype="bfloat16"))

"""The kernels of the matrix-state recurrence against the loop, which tests/unit/model/test_recurrence.py checks."""

import random
from functools import partial
from unittest import mock

import pytest
import torch

pytest.importorskip("tilelang")

from ablate.kernels import facts
from ablate.kernels import recurrence as kernels
from ablate.kernels.errors import KernelUnsupported
from ablate.model.back_end_limits import FUSED_KEYS, FUSED_VALUES
from ablate.model.config import HybridConfig, MambaConfig, RecurrenceConfig
from ablate.model.layers.recurrence import Recurrence
from ablate.model.layers.recurrence import recurrence as loop


def drawn(seed, *, keys=FUSED_KEYS, values=FUSED_VALUES, most=3, device="cpu"):
    """Operands of a recurrence in float64, starts of documents, and a gradient of the outputs."""
    draw = random.Random(seed)  # noqa: S311  # a reproducible draw
    generator = torch.Generator(device).manual_seed(seed)
    batch, heads, key, value = draw.randint(1, 2), draw.randint(1, 3), draw.choice(keys), draw.choice(values)
    chunk = kernels.chunk_of(key, value)
    length = draw.choice((1, max(1, chunk - 1), chunk, chunk + 1, most * chunk + draw.randrange(chunk)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float64)

    f = torch.sigmoid(normal(batch, length, heads) * 4)
    f[torch.rand(f.shape, generator=generator, device=device) < 0.1] = draw.choice((0.0, 1.0))
    weight = normal(heads, value, value) * draw.choice((0.1, 1.0)) / value**0.5
    q, k, v = normal(batch, length, key), normal(batch, length, key), normal(batch, length, heads, value)
    starts = torch.rand(batch, length, generator=generator, device=device) < draw.choice((0.0, 0.2, 1.0))
    return [q, k, v, f, weight], starts, normal(*v.shape)


def with_gradients(walk, operands, starts, upstream):
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    out = walk(*leaves, starts)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def interpreted(name, sizes, *tensors):
    """Run a kernel's program in float64 in place of the kernel, into outputs that are NaN before."""
    facts.record(facts.RECURRENCE, "fused")
    for output in tensors[6 + 2 * (name == "backward") :]:
        output.fill_(torch.nan)
    from tests.kernels import tile_interpreter  # skips the test without greenlet

    tile_interpreter.run(kernels.PROGRAMS[name](*sizes), *(tensor.data for tensor in tensors))


@pytest.fixture
def on_cpu():
    with mock.patch.object(kernels, "_launch", interpreted):
        yield


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))])
def test_outputs_and_gradients_match_the_loop(on_cpu, seed):
    operands, starts, upstream = drawn(seed, most=1 if seed < 3 else 3)
    if seed < 3:
        operands, starts, upstream = drawn(seed, keys=(32,), values=(8,), most=1)
    got = with_gradients(kernels.recurrence, operands, starts, upstream)
    for one, expected in zip(got, with_gradients(loop, operands, starts, upstream), strict=True):
        assert torch.allclose(one, expected, rtol=1e-6, atol=1e-6)


def block(walk):
    own = RecurrenceConfig(num_heads=2, key_width=32, value_width=8, walk=walk)
    layer = Recurrence(
        HybridConfig(pattern="R", d_model=16, mamba=MambaConfig(headdim=8), recurrence=own), compute_dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(2)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    return layer


def test_a_block_has_the_same_gradients_with_both_and_no_break_in_its_graph(on_cpu):
    x, upstream = torch.randn(2, 2, 9, 16, generator=torch.Generator().manual_seed(1))
    ids = (torch.arange(9) > 4).long().expand(2, 9)
    results = []
    for walk in ("loop", "fused"):
        layer = block(walk)
        whole = torch.compile(layer, backend="aot_eager", fullgraph=True) if walk == "fused" else layer
        with facts.collect() as seen:
            (whole(x, ids) * upstream).sum().backward()
        assert seen[facts.RECURRENCE] == walk
        results.append({name: parameter.grad for name, parameter in layer.named_parameters()})
    torch.compiler.reset()
    for name, expected in results[0].items():
        assert torch.allclose(results[1][name], expected, rtol=1e-4, atol=1e-5), name


def test_a_pass_without_gradients_saves_one_chunk_of_no_meaning(on_cpu):
    operands, starts, _ = drawn(1, keys=(32,), values=(8,))
    with mock.patch.object(kernels, "_launch", wraps=kernels._launch) as launch, torch.no_grad():
        out = kernels.recurrence(*operands, starts)
    assert launch.call_args.args[1] == (32, 8, False)
    assert launch.call_args.args[-1].shape[2] == 1
    assert torch.allclose(out, loop(*operands, starts), rtol=1e-6, atol=1e-6)


def test_tensors_of_a_cpu_are_refused():
    operands, starts, _ = drawn(1)
    with pytest.raises(KernelUnsupported, match="need an NVIDIA GPU; the device is cpu"):
        kernels.recurrence(*(operand.float() for operand in operands), starts)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_kernels_match_float64_on_a_gpu_and_repeat_in_every_bit(seed):
    operands, starts, upstream = drawn(seed, most=20, device="cuda")
    operands = [operand.float() for operand in operands]
    exact = with_gradients(loop, [operand.double() for operand in operands], starts, upstream)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    run = partial(with_gradients, kernels.recurrence, operands, starts, upstream)
    first, second = run(), run()
    torch.use_deterministic_algorithms(False)
    for got, again, expected in zip(first, second, exact, strict=True):
        assert torch.equal(got, again)
        assert float((got - expected).norm()) <= 2e-5 * float(expected.norm()) + 1e-12

"""Attention kernels of lane xla: traced for a TPU here, and run in interpret mode against attention written out."""

import pytest
import torch

from tests.xla_environment import DEVICE  # isort: skip - it decides about the device before torch_xla is imported

from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.xla import attention as xla_attention
from ablate.kernels.xla import device as xla_device
from ablate.kernels.xla import graph as xla_graph
from ablate.kernels.xla.attention import KERNELS

pytestmark = pytest.mark.timeout(900)  # XLA compiles for half a minute on a busy machine

CALLS = {"flash": (1, 3), "splash": (1, 2), "pallas_softcap": (1, 3)}
"""TPU custom calls of the forward pass, and of both passes."""


def problem(*, dtype=torch.float32, batch=2, length=256, width=64, scale=3.0):
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(batch, 2, length, width, generator=generator) * scale for _ in range(4)]
    changes = torch.rand(batch, length, generator=generator) < 0.02
    changes[:, 0] = False
    return [tensor.to(dtype) for tensor in tensors], changes.cumsum(1)


def written_out(q, k, v, run_BS, softcap):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = (run_BS[:, :, None] == run_BS[:, None]).tril().unsqueeze(1)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def on_xla(tensors):
    return [tensor.to(DEVICE).requires_grad_(tensor.is_floating_point()) for tensor in tensors]


def count(tensors) -> int:
    return xla_device.hlo_text(tensors).count(f'custom_call_target="{xla_graph.TPU_CALL}"')


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("name", ["splash", "pallas_softcap"])
def test_interpreted_kernel_matches_attention_written_out(name, softcap):
    (q, k, v, grad), run_BS = problem(batch=1)
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = written_out(*leaves, run_BS, softcap)
    expected_grads = torch.autograd.grad(expected, leaves, grad.double())
    moved = on_xla([q, k, v])
    out = KERNELS[name](*moved, run_BS.to(DEVICE), softcap=softcap, interpret=True)
    grads = torch.autograd.grad(out, moved, grad.to(DEVICE))
    xla_device.step_boundary()
    torch.testing.assert_close(out.detach().cpu().double(), expected.detach(), rtol=0, atol=2e-3)
    for actual, expected_grad in zip(grads, expected_grads, strict=True):
        assert float((actual.cpu().double() - expected_grad).abs().max() / expected_grad.abs().max()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_is_in_the_traced_graph(name, dtype):
    (q, k, v, grad), run_BS = problem(dtype=dtype)
    moved = on_xla([q, k, v])
    out = KERNELS[name](*moved, run_BS.to(DEVICE), softcap=0.0)
    assert count([out]) == CALLS[name][0]
    grads = torch.autograd.grad(out, moved, grad.to(DEVICE))
    assert count([out, *grads]) == CALLS[name][1]
    assert (out.dtype, grads[0].dtype, grads[1].shape) == (dtype, dtype, k.shape)
    xla_device.forget_pending()


@pytest.mark.parametrize(
    ("name", "length"),
    [*(("flash", length) for length in (256, 512, 1024, 2048)), ("splash", 640), ("pallas_softcap", 384)],
)
def test_lengths_of_rows_that_are_taken_are_traced_in_both_passes(name, length):
    (q, k, v, grad), run_BS = problem(batch=3, length=length, width=20)
    moved = on_xla([q, k, v])
    out = KERNELS[name](*moved, run_BS.to(DEVICE), softcap=0.0)
    assert count([out, *torch.autograd.grad(out, moved, grad.to(DEVICE))]) == CALLS[name][1]
    xla_device.forget_pending()


@pytest.mark.parametrize("length", [200, 384, 640, 1536, 2560])
def test_lengths_that_torch_xlas_kernel_cannot_divide_are_refused(length):
    (q, k, v, _), run_BS = problem(batch=1, length=length)
    with pytest.raises(
        KernelUnsupported, match=f"rows of 128, 256, 512 or a multiple of 1024 tokens; they have {length}"
    ):
        xla_attention.flash(*on_xla([q, k, v]), run_BS.to(DEVICE), softcap=0.0)


@pytest.mark.parametrize("name", KERNELS)
def test_other_documents_are_the_same_graph(name):
    (q, k, v, _), run_BS = problem()
    moved = on_xla([q, k, v])
    xla_device.step_boundary()
    hashes = set()
    for documents in (run_BS, run_BS * 0, torch.arange(256).repeat(2, 1)):
        ids = documents.to(DEVICE)
        hashes.add(xla_device._xlac()._get_graph_hash([KERNELS[name](*moved, ids, softcap=0.0)]))
        xla_device.forget_pending()
    assert len(hashes) == 1


def test_what_a_kernel_cannot_do_is_refused():
    (q, k, v, _), run_BS = problem(length=200)
    moved, ids = on_xla([q, k, v]), run_BS.to(DEVICE)
    with pytest.raises(KernelUnsupported, match="a multiple of 128 tokens; they have 200"):
        xla_attention.splash(*moved, ids, softcap=0.0)
    with pytest.raises(KernelUnsupported, match=r"'flash' on lane xla cannot cap scores; softcap is 20\.0"):
        xla_attention.flash(*on_xla(problem()[0][:3]), ids, softcap=20.0)
    with pytest.raises(KernelUnsupported, match="runs on an XLA device; q is on cpu"):
        xla_attention.pallas_softcap(q, k, v, run_BS, softcap=0.0)

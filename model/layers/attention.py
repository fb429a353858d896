"""Causal self-attention within documents, with rotary positions, and its implementations.

Legend: B batch, S sequence, D d_model, H heads, E head width. Positions run over the whole row. They need no reset per
document, because rotary scores depend only on differences.

The gate `attention` chooses the implementation. Each takes q, k, v [B,H,S,E] and segment ids [B,S] and returns
[B,H,S,E]. A token attends to itself and to the earlier tokens of its document. A document is a run of equal ids, so an
id that returns later in the row starts another document.

    sdpa    torch chooses the kernel, with an explicit mask [B,1,S,S]; dense attention on XLA
    flash   on a GPU, FlashAttention over documents laid end to end, without a mask. Never traced: the number of
            documents and the longest one change with every batch, so a specialised graph would be compiled every time.
            On XLA, torch_xla's kernel for TPUs
    cudnn   cuDNN's kernel, with an explicit mask
    flex    a kernel that torch generates from the mask's definition and that skips blocks of other documents
    splash, pallas_softcap   kernels for TPUs (kernels/xla_attention.py)

No implementation replaces another. One that cannot run, or cannot cap scores (`softcap`), raises KernelUnsupported with
the reason.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import facts
from kernels.documents import documents, once_per_batch
from kernels.errors import KernelUnsupported
from model.config import HybridConfig
from model.facts import ModelFact
from model.layers.linear import Linear

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""(q, k, v [B,H,S,E], segment ids [B,S], softcap) -> attended values [B,H,S,E]."""

HALF_DTYPES = (torch.bfloat16, torch.float16)


class CausalAttention(nn.Module):
    """Multi-head attention of a token over itself and the earlier tokens of its document."""

    def __init__(self, config: HybridConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.backend = config.attention.backend
        self.softcap = config.attention.softcap
        self.num_heads, self.rope_theta = config.attention.num_heads, config.attention.rope_theta
        self.qkv_proj = Linear(config.d_model, 3 * config.d_model, compute_dtype=compute_dtype)
        self.out_proj = Linear(config.d_model, config.d_model, compute_dtype=compute_dtype)

    def forward(self, x_BSD: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """Return the attended tokens [B,S,D]. Raises KernelUnsupported if the backend cannot run here."""
        projected = self.qkv_proj(x_BSD)
        heads = projected.view(*projected.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q_BHSE, k_BHSE, v_BHSE = heads.unbind(0)
        attended_BHSE = ATTEND[self.backend](
            rotate_positions(q_BHSE, self.rope_theta),
            rotate_positions(k_BHSE, self.rope_theta),
            v_BHSE,
            segment_ids_BS,
            self.softcap,
        )
        mixed: Tensor = self.out_proj(attended_BHSE.transpose(1, 2).flatten(2))
        return mixed


def rotate_positions(x_BHSE: Tensor, theta: float) -> Tensor:
    """Turn the pairs (j, E/2 + j) of every token by position * theta^(-2j/E), in float32."""
    length, half = x_BHSE.shape[2], x_BHSE.shape[3] // 2
    exponent = torch.arange(half, device=x_BHSE.device, dtype=torch.float32) / half
    position = torch.arange(length, device=x_BHSE.device, dtype=torch.float32)
    angle_SJ = position.unsqueeze(1) * theta**-exponent
    left, right = x_BHSE[..., :half].float(), x_BHSE[..., half:].float()
    cos, sin = angle_SJ.cos(), angle_SJ.sin()
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).to(x_BHSE.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _record(backend: str) -> None:
    facts.record(ModelFact.ATTENTION, backend)


def document_mask(segment_ids_BS: Tensor) -> Tensor:
    """Return [B,1,S,S] bool: row t may attend to column u, that is u <= t in the same document."""
    run_BS = document_runs(segment_ids_BS)
    same_BSS = run_BS.unsqueeze(2) == run_BS.unsqueeze(1)
    return same_BSS.tril().unsqueeze(1)


def document_runs(segment_ids_BS: Tensor) -> Tensor:
    """Return [B,S] int64: the number of document changes up to each token of its row."""
    changes = segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1]
    return functional.pad(changes.cumsum(1), (1, 0))


def _sdpa(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, segment_ids_BS: Tensor, softcap: float = 0.0) -> Tensor:
    _record("sdpa")
    if softcap:
        return _capped_attention(q_BHSE, k_BHSE, v_BHSE, document_mask(segment_ids_BS), softcap)
    return functional.scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE, attn_mask=document_mask(segment_ids_BS))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _flash(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, segment_ids_BS: Tensor, softcap: float = 0.0) -> Tensor:
    if q_BHSE.device.type == "xla":
        return _on_tpu("flash", q_BHSE, k_BHSE, v_BHSE, segment_ids_BS, softcap)
    from torch.nn.attention.varlen import varlen_attn

    _need_gpu("flash", q_BHSE, HALF_DTYPES, softcap)
    _record("flash")
    (edges, longest), (batch, _, length, _) = once_per_batch(segment_ids_BS, documents), q_BHSE.shape
    q_THE, k_THE, v_THE = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (q_BHSE, k_BHSE, v_BHSE))
    attended: Any = varlen_attn(q_THE, k_THE, v_THE, edges, edges, longest, longest, window_size=(-1, 0))
    attended_BHSE: Tensor = attended.view(batch, length, *q_THE.shape[1:]).transpose(1, 2)
    return attended_BHSE


def _cudnn(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, segment_ids_BS: Tensor, softcap: float = 0.0) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _need_gpu("cudnn", q_BHSE, HALF_DTYPES, softcap)
    _record("cudnn")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE, attn_mask=document_mask(segment_ids_BS))


def _flex(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, segment_ids_BS: Tensor, softcap: float = 0.0) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    _need_gpu("flex", q_BHSE, (*HALF_DTYPES, torch.float32), softcap)
    _record("flex")
    mask = once_per_batch(segment_ids_BS, block_mask)
    attended: Tensor = _compiled(flex_attention)(q_BHSE, k_BHSE, v_BHSE, block_mask=mask)
    return attended


def block_mask(segment_ids_BS: Tensor) -> "BlockMask":
    """Return the blocks of 128 by 128 scores with a visible score, and the mask's definition inside them."""
    from torch.nn.attention.flex_attention import create_block_mask

    run_BS = document_runs(segment_ids_BS)

    def visible(row: Tensor, _head: Tensor, t: Tensor, u: Tensor) -> Tensor:
        return (t >= u) & (run_BS[row, t] == run_BS[row, u])

    batch, length = segment_ids_BS.shape
    make = _compiled(create_block_mask) if segment_ids_BS.is_cuda else create_block_mask
    mask: BlockMask = make(visible, batch, None, length, length, device=segment_ids_BS.device)
    return mask


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled. Uncompiled, both functions of flex attention build all S by S scores."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled


def _need_gpu(backend: str, q_BHSE: Tensor, dtypes: tuple[torch.dtype, ...], softcap: float) -> None:
    if not q_BHSE.is_cuda:
        raise KernelUnsupported(f"attention '{backend}' runs on an NVIDIA GPU; q is on {q_BHSE.device.type}")
    if q_BHSE.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        dtype = str(q_BHSE.dtype).removeprefix("torch.")
        raise KernelUnsupported(f"attention '{backend}' takes {allowed}; q is {dtype}")
    if softcap:
        raise KernelUnsupported(f"attention '{backend}' cannot cap scores on a GPU; softcap is {softcap}, allowed: 0")


def _capped_attention(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, mask_B1SS: Tensor, softcap: float) -> Tensor:
    scores_BHSS = (q_BHSE @ k_BHSE.mT).float() * q_BHSE.shape[-1] ** -0.5
    capped_BHSS = softcap * torch.tanh(scores_BHSS / softcap)
    weights_BHSS = capped_BHSS.masked_fill(~mask_B1SS, -torch.inf).softmax(-1)
    return weights_BHSS.to(v_BHSE.dtype) @ v_BHSE


def _on_tpu(
    backend: str, q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, segment_ids_BS: Tensor, softcap: float = 0.0
) -> Tensor:
    from kernels import xla_attention  # lazy, for torch_xla and jax

    attended_BHSE = xla_attention.KERNELS[backend](
        q_BHSE, k_BHSE, v_BHSE, document_runs(segment_ids_BS), softcap=softcap
    )
    _record(backend)
    return attended_BHSE


ATTEND: dict[str, Attend] = {
    "sdpa": _sdpa,
    "flash": _flash,
    "cudnn": _cudnn,
    "flex": _flex,
    "splash": partial(_on_tpu, "splash"),
    "pallas_softcap": partial(_on_tpu, "pallas_softcap"),
}
"""Value of the gate -> implementation."""

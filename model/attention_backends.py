"""The implementations of masked attention behind the gate `attention`.

Each takes q, k, v [B,H,S,E] and segment ids [B,S] and returns [B,H,S,E]: a token attends to itself and to the earlier
tokens of its document. A document is a run of equal ids, so an id that comes back later in the row is another one.

    sdpa    torch chooses the kernel, with the mask written out [B,1,S,S]
    flash   FlashAttention over documents laid end to end; no mask exists. Never traced: the number of documents and
            the longest one differ from batch to batch, and a graph specialised for them is compiled again each time
    cudnn   cuDNN's kernel, with the mask written out
    flex    a kernel that torch generates from the mask's definition; blocks of other documents are skipped

None replaces another: what cannot run raises KernelUnsupported with the reason.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from kernels.errors import KernelUnsupported

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

HALF_DTYPES = (torch.bfloat16, torch.float16)


class Documents(NamedTuple):
    """Where documents begin when the rows of a batch are laid end to end."""

    offsets: Tensor
    """[documents + 1] int32: first token of each document, and the number of tokens."""
    longest: int
    """Tokens of the longest document."""


_of_batch = WeakTensorKeyDictionary()
"""Segment ids -> their version and what was derived from it: every layer of a batch asks for the same."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def once_per_batch(segment_ids_BS: Tensor, derive: Callable[[Tensor], Any]) -> Any:
    """Return derive(segment_ids_BS), computed by the first layer that asks; a tensor changed in place is new."""
    version, known = _of_batch.get(segment_ids_BS, (None, {}))  # type: ignore[no-untyped-call]
    if version != segment_ids_BS._version:
        known = {}
        _of_batch[segment_ids_BS] = (segment_ids_BS._version, known)
    if derive not in known:
        known[derive] = derive(segment_ids_BS)
    return known[derive]


def documents(segment_ids_BS: Tensor) -> Documents:
    """Return where the documents of a batch begin. Waits for the device."""
    starts_BS = torch.ones_like(segment_ids_BS, dtype=torch.bool)
    starts_BS[:, 1:] = segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1]
    first = starts_BS.flatten().nonzero().squeeze(1).int()
    offsets = functional.pad(first, (0, 1), value=segment_ids_BS.numel())
    return Documents(offsets, int(offsets.diff().max()))


def document_mask(segment_ids_BS: Tensor) -> Tensor:
    """Return [B,1,S,S] bool: row t may look at column u, same document and u <= t."""
    run_BS = document_runs(segment_ids_BS)
    same_BSS = run_BS.unsqueeze(2) == run_BS.unsqueeze(1)
    return same_BSS.tril().unsqueeze(1)


def document_runs(segment_ids_BS: Tensor) -> Tensor:
    """Return [B,S] int64: the number of document changes up to each token of its row."""
    changes = segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1]
    return functional.pad(changes.cumsum(1), (1, 0))


def _sdpa(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, segment_ids_BS: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE, attn_mask=document_mask(segment_ids_BS))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _flash(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, segment_ids_BS: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    _need_gpu("flash", q_BHSE, HALF_DTYPES)
    (edges, longest), (batch, _, length, _) = once_per_batch(segment_ids_BS, documents), q_BHSE.shape
    q_THE, k_THE, v_THE = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (q_BHSE, k_BHSE, v_BHSE))
    attended: Any = varlen_attn(q_THE, k_THE, v_THE, edges, edges, longest, longest, window_size=(-1, 0))
    attended_BHSE: Tensor = attended.view(batch, length, *q_THE.shape[1:]).transpose(1, 2)
    return attended_BHSE


def _cudnn(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, segment_ids_BS: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _need_gpu("cudnn", q_BHSE, HALF_DTYPES)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE, attn_mask=document_mask(segment_ids_BS))


def _flex(q_BHSE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, segment_ids_BS: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    _need_gpu("flex", q_BHSE, (*HALF_DTYPES, torch.float32))
    mask = once_per_batch(segment_ids_BS, block_mask)
    attended: Tensor = _compiled(flex_attention)(q_BHSE, k_BHSE, v_BHSE, block_mask=mask)
    return attended


def block_mask(segment_ids_BS: Tensor) -> "BlockMask":
    """Return which blocks of 128 by 128 scores hold anything visible, and the mask's definition inside them."""
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
    """Return `function` compiled: uncompiled, both functions of flex attention write out all S by S scores."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled


def _need_gpu(backend: str, q_BHSE: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not q_BHSE.is_cuda:
        raise KernelUnsupported(f"attention '{backend}' runs on an NVIDIA GPU; q is on {q_BHSE.device.type}")
    if q_BHSE.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        given = str(q_BHSE.dtype).removeprefix("torch.")
        raise KernelUnsupported(f"attention '{backend}' takes {allowed}; q is {given}")


ATTEND: dict[str, Attend] = {"sdpa": _sdpa, "flash": _flash, "cudnn": _cudnn, "flex": _flex}
"""Implementation of every value of the gate."""

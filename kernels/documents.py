"""Document boundaries of a batch, computed once for all layers because the host waits for them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary


class Documents(NamedTuple):
    """Document boundaries of a batch whose rows are laid end to end."""

    offsets: Tensor
    """[documents + 1] int32: first token of each document, then the number of tokens."""
    longest: int
    """Tokens of the longest document."""


_of_batch = WeakTensorKeyDictionary()
"""Segment ids -> (version of the tensor, values derived from it)."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def once_per_batch(segment_ids_BS: Tensor, derive: Callable[[Tensor], Any]) -> Any:
    """Return derive(segment_ids_BS), computed once per tensor and version of the tensor."""
    version, derived = _of_batch.get(segment_ids_BS, (None, {}))  # type: ignore[no-untyped-call]
    if version != segment_ids_BS._version:
        derived = {}
        _of_batch[segment_ids_BS] = (segment_ids_BS._version, derived)
    if derive not in derived:
        derived[derive] = derive(segment_ids_BS)
    return derived[derive]


def document_starts(segment_ids_BS: Tensor) -> Tensor:
    """Return [B,S] bool: the token's id differs from its left neighbour's; False for a row's first token."""
    starts_BS = torch.zeros_like(segment_ids_BS, dtype=torch.bool)
    starts_BS[:, 1:] = segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1]
    return starts_BS


def documents(segment_ids_BS: Tensor) -> Documents:
    """Return the document boundaries of a batch. Waits for the device."""
    starts_BS = document_starts(segment_ids_BS)
    starts_BS[:, 0] = True
    first = starts_BS.flatten().nonzero().squeeze(1).int()
    offsets = functional.pad(first, (0, 1), value=segment_ids_BS.numel())
    return Documents(offsets, int(offsets.diff().max()))

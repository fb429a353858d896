"""Document boundaries of a batch, computed once for all layers.

A batch on a device has them from the host (`with_documents`). Otherwise the first layer computes them, and the host
waits for the device.
"""

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


def with_documents(segment_ids_BS: Tensor, device: torch.device, *, room: int | None = None) -> Tensor:
    """Return a copy of `segment_ids_BS`, which is on the host, on `device`, with its document boundaries.

    With `room` for a number of documents the tensors can later take those of another batch (`replace_documents`): the
    last documents are empty, and the longest one counts as a whole row.
    """
    boundaries, on_device = documents(segment_ids_BS), segment_ids_BS.to(device)
    if room is not None:
        boundaries = Documents(_padded(boundaries.offsets, room), segment_ids_BS.shape[1])
    derived = {documents: Documents(boundaries.offsets.to(device), boundaries.longest)}
    _of_batch[on_device] = (on_device._version, derived)
    return on_device


def replace_documents(on_device_BS: Tensor, segment_ids_BS: Tensor) -> None:
    """Copy other ids from the host, and their boundaries, into a tensor that `with_documents` made with room."""
    _, derived = _of_batch[on_device_BS]
    offsets = derived[documents].offsets
    offsets.copy_(_padded(documents(segment_ids_BS).offsets, len(offsets) - 1))
    on_device_BS.copy_(segment_ids_BS)
    _of_batch[on_device_BS] = (on_device_BS._version, derived)


def _padded(offsets: Tensor, room: int) -> Tensor:
    missing = room + 1 - len(offsets)
    if missing < 0:
        raise ValueError(f"a batch has {len(offsets) - 1} documents; there is room for {room}")
    return functional.pad(offsets, (0, missing), value=int(offsets[-1]))


def document_starts(segment_ids_BS: Tensor) -> Tensor:
    """Return [B,S] bool: the token's id differs from its left neighbour's; False for a row's first token."""
    starts_BS = torch.zeros_like(segment_ids_BS, dtype=torch.bool)
    starts_BS[:, 1:] = segment_ids_BS[:, 1:] != segment_ids_BS[:, :-1]
    return starts_BS


def documents(segment_ids_BS: Tensor) -> Documents:
    """Return the document boundaries of a batch. On a device the host waits for it."""
    starts_BS = document_starts(segment_ids_BS)
    starts_BS[:, 0] = True
    first = starts_BS.flatten().nonzero().squeeze(1).int()
    offsets = functional.pad(first, (0, 1), value=segment_ids_BS.numel())
    return Documents(offsets, int(offsets.diff().max()))

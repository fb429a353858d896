"""Whether torch's dispatcher has to be told of a scan: where more than autograd looks at what it is given."""

from collections.abc import Sequence
from functools import reduce
from operator import or_

import torch
from torch import Tensor
from torch._C import DispatchKey as Key
from torch._C import DispatchKeySet as Keys

_ALONE = (
    *(Key.BackendSelect, Key.ADInplaceOrView),
    *(Key.CPU, Key.AutogradCPU, Key.AutocastCPU),
    *(Key.CUDA, Key.AutogradCUDA, Key.AutocastCUDA),
)
"""Keys of the dispatcher that plain tensors with data have, and a thread on which nothing but autograd is on."""
_OTHERS = ~reduce(or_, map(Keys, _ALONE)).raw_repr()


def is_watched(tensors: Sequence[Tensor | None]) -> bool:
    """Tell whether more than autograd looks on: a compiler, a mode, a transform, a tensor that stands for another.

    Where autograd itself is shut out, as inside another operator, it must not be let in again.
    """
    if torch.compiler.is_compiling() or torch.overrides.has_torch_function(tensors):
        return True
    keys = torch._C._dispatch_tls_local_include_set().raw_repr()
    for tensor in tensors:
        if tensor is not None:
            keys |= torch._C._dispatch_keys(tensor).raw_repr()
    if keys & _OTHERS:
        return True
    return torch.is_grad_enabled() and torch._C._dispatch_tls_is_dispatch_key_excluded(Key.AutogradFunctionality)

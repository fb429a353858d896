"""The sizes that a TileLang program leaves open, found as the launch code of a compiled kernel finds them."""

import re
from typing import Any

import torch


def sizes(program: Any, arguments: tuple[torch.Tensor | int, ...]) -> dict[str, int]:
    """Return the sizes that the program leaves open, by their names."""
    open_sizes: dict[str, int] = {}
    buffers = [program.buffer_map[parameter] for parameter in program.params if parameter in program.buffer_map]
    for buffer, tensor in zip(buffers, arguments, strict=False):
        assert isinstance(tensor, torch.Tensor)
        for size, actual in zip(buffer.shape, tensor.shape, strict=True):
            match = re.fullmatch(r"(\w*[a-z]\w*)(?: \* (\d+))?", str(size))
            if match:
                open_sizes.setdefault(match[1], actual // int(match[2] or 1))
    return open_sizes

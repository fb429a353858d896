"""Offsets in generated CUDA source: with how many bits the addresses of a tensor's numbers are computed."""

import re
from collections.abc import Iterator
from math import prod

_WIDE = re.compile(r"\(int64_t\)(?:\(\(int\)(?:blockIdx|threadIdx)\.[xyz]\)|\w+)")
"""A number, a variable or an index of the launch as 64 bits."""

OPEN = {"walks": 9 * 65536 // 256, "sums": 64}
"""Sizes that a program leaves open: super-chunks of all rows, sums over heads, of one head each."""


def long_rows(name: str, **switches: bool) -> tuple[str, dict[str, int]]:
    """Return a kernel's source for 9 rows of 65,536 tokens with 64 heads, and how many numbers its tensors have.

    With 8 rows the values have 2^31 numbers exactly, whose offsets still fit into 32 bits.
    """
    import tilelang

    from ablate.kernels.mamba3_mimo.cuda.host.compiled import TARGET, pass_configs, program
    from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant

    variant = Variant(**switches)
    text = program(name, ScanShape(B=9, S=65536, H=64, G=1, N=64, P=64, R=4, A=16, wide=True), variant)
    options = {key.value: value for key, value in pass_configs(name, variant).items()}
    with tilelang.tvm.target.Target(TARGET), tilelang.tvm.transform.PassContext(opt_level=3, config=options):
        source = tilelang.lower(text, target=TARGET).kernel_source
    sizes = {buffer.name: [str(size) for size in buffer.shape] for buffer in text.buffer_map.values()}
    return source, {name: prod(OPEN.get(size) or int(size) for size in of) for name, of in sizes.items()}


def parameters(source: str) -> list[str]:
    """Return the tensors that a kernel takes as addresses."""
    return re.findall(r"\* __restrict__ (\w+)", source)


def narrow_offsets(source: str, tensor: str) -> list[str]:
    """Return the offsets into a tensor in which a number has not 64 bits.

    Raises ValueError when the source has no offset into it.
    """
    offsets = list(_offsets(source, tensor))
    if not offsets:
        raise ValueError(f"the source has no offset into '{tensor}' of the form that is read here")
    return [offset for offset in offsets if re.search(r"\w", _WIDE.sub("", offset))]


def _offsets(source: str, tensor: str) -> Iterator[str]:
    """Yield what stands in brackets behind `tensor[` or `tensor + `."""
    for match in re.finditer(rf"(?<![\w.>]){tensor}(?: \+ (?=\()|\[)", source):
        start = end = match.end() - (source[match.end() - 1] == "[")
        depth = 0
        while depth or end == start:
            depth += (source[end] in "([") - (source[end] in ")]")
            end += 1
        yield source[start:end].strip("[]")

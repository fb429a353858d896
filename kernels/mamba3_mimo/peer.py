"""Lane peer: the official Mamba-3 MIMO kernels of the optional package mamba-ssm, with our inputs and results.

mamba-ssm pins a TileLang that cannot share a process with lane cuda's. It has a folder of its own (`use_site`), and a
process runs one of the two lanes. Only the modules of the kernels are imported: the package's `__init__` would load a
compiled CUDA extension and a model library that they do not need. Shape suffixes: see inputs.py.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, lru_cache, wraps
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ablate.kernels import facts
from ablate.kernels.backends import Lane
from ablate.kernels.documents import document_starts, documents, once_per_batch
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo.cuda.host.cuda_source import normalised, roles
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.mamba3_mimo.operands import cumulated_angles, dtype_name, handed_on
from ablate.kernels.scan_switches import ScanFact

MAMBA_SSM, TILELANG = "2.3.2.post1", "0.1.8"
"""The release whose limits this module states, and the TileLang that it pins. A checkout has the limits, too."""

STATES, WIDTHS, RANKS = (16, 32, 64, 128, 256), (32, 64, 128), (1, 2, 4, 8)
"""Values of N, P and R in the release's tests."""
BROKEN = ((16, 32), (256, 128))
"""(N, P) that do not compile, according to the release."""
MAX_ROWS = 64
"""C * R, rows of a chunk, above which the release warns of too much shared memory."""

NAMES = {
    "q": "Q", "k": "K", "v": "V", "z": "Z", "q_bias": "Q_bias", "k_bias": "K_bias", "psi": "MIMO_V", "zeta": "MIMO_Z",
    "phi": "MIMO_Out", "D": "D", "adt": "ADT", "dt": "DT", "trap": "Trap", "angles": "Angles",
}  # fmt: skip
"""Tensor of ScanInputs -> argument of the official function."""
GIVEN = (*NAMES.values(), "rotary_dim_divisor", "cu_seqlens", "chunk_size", "dtype", "return_state")
"""Arguments of each call. A checkout's further ones, such as those of its fused norm, stay at their defaults."""
FLOAT32 = ("q_bias", "k_bias", "psi", "zeta", "phi", "D", "adt", "dt", "angles")
"""Tensors that the official kernels read as float32. The others are bfloat16."""

FOLDER = "mamba_ssm.ops.tilelang.mamba3"
BUILDERS = {
    "mamba3_mimo_fwd": ("mamba_mimo_fwd",),
    "mamba3_mimo_bwd": ("mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd"),
    "mamba3_mimo_fwd_varlen": ("mamba_mimo_fwd",),
    "mamba3_mimo_bwd_varlen": ("mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd"),
}
"""Module -> its functions that build and compile a kernel."""
DENSE = {"mamba_mimo_forward": 0, "mamba_mimo_bwd_combined": 1}
"""Function that launches kernels of dense rows -> position of its argument q."""
PACKED = ("mamba_mimo_forward_varlen", "mamba_mimo_bwd_combined_varlen")
"""Functions that launch kernels of packed rows."""

_sizes: ContextVar[dict[str, int]] = ContextVar("sizes", default={})  # noqa: B039 (never changed)
"""Sizes of the current dense scan. Empty for packed rows, whose documents change from batch to batch."""
_warp_specialize: ContextVar[bool] = ContextVar("warp_specialize", default=False)
"""Whether the current scan's forward kernel has a warp group that only copies."""

INSTALL = (
    f"lane 'peer' needs mamba-ssm {MAMBA_SSM} and its TileLang {TILELANG} in a folder of their own: `make peer`, "
    "then name the folder in ABLATE_PEER_SITE"
)


def use_site(folder: Path) -> None:
    """Put `folder`, which holds mamba-ssm and its TileLang, first on this process's import path.

    Raises:
        KernelUnsupported: the folder lacks the package, or the process has loaded another TileLang.

    """
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    reason = import_refusal()
    if reason is not None:
        sys.path.remove(str(folder))
        raise KernelUnsupported(f"{reason} (folder: {folder})")


def import_refusal() -> str | None:
    """Return why this process cannot import the official kernels, or None if it can."""
    if importlib.util.find_spec("mamba_ssm") is None:
        return f"the package mamba-ssm is not installed; {INSTALL}"
    loaded = sys.modules.get("tilelang")
    version = _version("tilelang") if loaded is None else str(loaded.__version__)
    if version.split("+")[0] != TILELANG:
        state = "is not installed" if version == "" else f"is {version} {'' if loaded is None else 'and loaded '}here"
        return f"TileLang {state}, and one process can use only one; {INSTALL}"
    return None


def refusal(inputs: ScanInputs, chunk_size: int) -> str | None:
    """Return why the official kernels cannot run `inputs`, or None if they can."""
    heads, groups, state = inputs.num_heads, inputs.num_groups, inputs.state_size
    width, rank = inputs.v.shape[3], inputs.q.shape[2]
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in inputs.tensors())
    reasons = (
        (inputs.v.dtype != torch.bfloat16, f"q, k, v have dtype {inputs.v.dtype}; allowed: torch.bfloat16"),
        (state not in STATES, f"N is {state}; allowed: {_listed(STATES)}"),
        (width not in WIDTHS, f"P is {width}; allowed: {_listed(WIDTHS)}"),
        (rank not in RANKS, f"R is {rank}; allowed: {_listed(RANKS)}"),
        ((state, width) in BROKEN, f"N={state} with P={width} does not compile in mamba-ssm {MAMBA_SSM}"),
        (trained and state == 16, "N is 16; allowed: from 32 for a backward pass, which does not compile for 16"),
        (groups not in (1, heads), f"G is {groups} with H={heads}; allowed: 1 or H, a limit of the backward pass"),
        (chunk_size < 8 or chunk_size & (chunk_size - 1) > 0, f"chunk_size is {chunk_size}; allowed: 8, 16, 32, 64"),
        (chunk_size * rank > MAX_ROWS, f"chunk_size * R is {chunk_size * rank}; allowed: up to {MAX_ROWS}"),
        (inputs.angles_cumulated, "angles are cumulated; allowed: raw angles, the official function sums them itself"),
        (inputs.entering is not None, "an initial state enters; allowed: none, the official function takes none"),
        (inputs.q.shape[1] < 2, "S is 1; allowed: at least 2, a sequence of one token fails in the official kernels"),
    )
    return next((f"lane 'peer': {reason}" for refused, reason in reasons if refused), None)


class Official(NamedTuple):
    """The imported part of mamba-ssm."""

    function: Callable[..., Any]
    """Autograd function of the scan."""
    release: str
    """Versions of mamba-ssm and its TileLang. That of a checkout ends in its commit, as `make peer` installs it."""


class Packing(NamedTuple):
    """Rows laid end to end as one row of D documents."""

    offsets: Tensor
    """[D + 1] int32: first token of each document, then the number of tokens."""
    last_B: Tensor
    """[B] int64: the last document of each row."""


class _WithoutGradient(torch.autograd.Function):
    """Final state of the official kernels, which cannot compute its gradient. The backward pass raises an error."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, _out: Tensor) -> Tensor:
        return state.clone()

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> Any:
        raise KernelUnsupported("lane 'peer': the official kernels have no gradient of the final state; allowed: none")


def peer_scan(
    inputs: ScanInputs, *, chunk_size: int, warp_specialize: bool = False, return_final_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return (o, final state [B,H,N,P] float32 or None) from the official kernels and their autograd function.

    o is [B,S,H,P] bf16, or [B,S,R,H,P] without phi. Rows with one document of whole chunks take the dense kernels,
    other rows the kernels for packed sequences. With segment ids the host waits for the device once per batch, for all
    layers. Without them it never waits. `warp_specialize` compiles the forward kernel with TMA and warp specialisation,
    which the release turns off. The backward kernels do not compile with them.

    Raises:
        KernelUnsupported: the package is absent, its kernels cannot run these inputs, or a backward pass needs the
            gradient of the final state.

    """
    peer, reason = official(), refusal(inputs, chunk_size)
    if reason is not None:
        raise KernelUnsupported(reason)
    packed = packing(inputs, chunk_size)
    if warp_specialize and packed is not None:
        rows = "rows of several documents, or not of whole chunks"
        raise KernelUnsupported(f"lane 'peer': warp_specialize with {rows}; allowed: one document of whole chunks each")
    named = arguments(inputs, packed)
    token = _warp_specialize.set(warp_specialize)
    try:
        result = peer.function(**named, chunk_size=chunk_size, dtype=torch.bfloat16, return_state=True)
    finally:
        _warp_specialize.reset(token)
    facts.record(ScanFact.PEER, peer.release)
    out, state_BHPN = result[0], result[2]
    if packed is not None:
        out = out.unflatten(1, inputs.q.shape[:2]).squeeze(0)
    if not return_final_state:
        return out, None
    state_BHPN = state_BHPN if packed is None else state_BHPN[packed.last_B]
    state_BHNP = _handed_on(inputs, state_BHPN.transpose(2, 3))
    return out, _WithoutGradient.apply(state_BHNP, out)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _handed_on(inputs: ScanInputs, state_BHNP: Tensor) -> Tensor:
    """Return the final state in ScanState's form. The official state counts angles from the document's start."""
    starts_BS = None if inputs.segment_ids is None else document_starts(inputs.segment_ids)
    return handed_on(state_BHNP, cumulated_angles(inputs, starts_BS)[:, :, -1])


def packing(inputs: ScanInputs, chunk_size: int) -> Packing | None:
    """Return how the rows are packed, or None for dense rows: one document of whole chunks each."""
    batch, tokens = inputs.q.shape[:2]
    whole = tokens % chunk_size == 0
    if inputs.segment_ids is None:
        return None if whole else _rows(batch, tokens, inputs.q.device)
    packed: Packing = once_per_batch(inputs.segment_ids, _packed)
    return None if whole and packed.offsets.numel() == batch + 1 else packed


@lru_cache(maxsize=64)
def _rows(batch: int, tokens: int, device: torch.device) -> Packing:
    """Return the packing of rows with one document each."""
    offsets = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=device)
    return Packing(offsets, torch.arange(batch, device=device))


def _packed(segment_ids_BS: Tensor) -> Packing:
    batch, tokens = segment_ids_BS.shape
    offsets = once_per_batch(segment_ids_BS, documents).offsets
    ends_B = torch.arange(1, batch + 1, dtype=torch.int32, device=offsets.device) * tokens
    return Packing(offsets, torch.searchsorted(offsets, ends_B) - 1)


def arguments(inputs: ScanInputs, packed: Packing | None) -> dict[str, Any]:
    """Return the arguments of the official function, in its dtypes. Packed rows become one row of documents."""
    tensors: dict[str, Tensor | None] = {name: getattr(inputs, name) for name in NAMES}
    tensors["angles"] = inputs.angles.expand(-1, -1, inputs.num_heads, -1)
    for name, tensor in tensors.items():
        if tensor is not None:
            dtype = torch.float32 if name in FLOAT32 else torch.bfloat16
            tensors[name] = _as_one_row(name, tensor.to(dtype)) if packed is not None else tensor.to(dtype)
    divisor = inputs.state_size // inputs.angles.shape[-1]
    offsets = None if packed is None else packed.offsets
    return {NAMES[name]: t for name, t in tensors.items()} | {"rotary_dim_divisor": divisor, "cu_seqlens": offsets}


def _as_one_row(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor with its rows laid end to end. Weights have no rows and stay unchanged."""
    if name in ("adt", "dt", "trap"):
        return tensor.transpose(0, 1).flatten(1).unsqueeze(0)
    return tensor.flatten(0, 1).unsqueeze(0) if name in ("q", "k", "v", "z", "angles") else tensor


@lru_cache(maxsize=1)
def official() -> Official:
    """Import the official function without running the `__init__` of its package.

    The release compiles its kernels for open sizes B, S, H and G, and builds and compares their programs in every call:
    130 ms of host time for a forward pass. Earlier and later kernels of the repository are compiled for fixed sizes and
    take a third of the time. This function does the same with the release, and builds every program once.

    Raises:
        KernelUnsupported: the package is absent, or its function is another one.

    """
    reason, spec = import_refusal(), importlib.util.find_spec("mamba_ssm")
    if reason is not None or spec is None:
        raise KernelUnsupported(reason or INSTALL)
    sys.modules.setdefault("mamba_ssm", importlib.util.module_from_spec(spec))
    release = f"mamba-ssm {_version('mamba-ssm')}, tilelang {_version('tilelang')}"
    try:
        module = _wrapped()
        inspect.signature(module.mamba3_mimo).bind(**dict.fromkeys(GIVEN))
    except (ImportError, AttributeError, TypeError) as error:
        raise KernelUnsupported(
            f"lane 'peer' cannot call the scan of {release}: {error}; allowed: mamba-ssm {MAMBA_SSM}, or a checkout "
            "whose `mamba3_mimo` takes the release's arguments: `make peer`, or `make peer PEER=path`"
        ) from error
    return Official(function=module.mamba3_mimo, release=release)


def _wrapped() -> Any:
    """Import the module of the official function; wrap its launchers and the builders of its kernels."""
    for name, builders in BUILDERS.items():
        module = importlib.import_module(f"{FOLDER}.{name}")
        for builder in builders:
            choose = _switched if name == "mamba3_mimo_fwd" else _building_once
            setattr(module, builder, choose(getattr(module, builder)))
    module = importlib.import_module(f"{FOLDER}.mamba3_mimo")
    for launcher, first in DENSE.items():
        setattr(module, launcher, _observed(_with_sizes(getattr(module, launcher), first), "dense"))
    for launcher in PACKED:
        setattr(module, launcher, _observed(getattr(module, launcher), "packed"))
    return module


def _observed(launcher: Callable[..., Any], kernels: str) -> Callable[..., Any]:
    """Return `launcher`, an official function that launches kernels, recording facts from its arguments."""
    signature = inspect.signature(launcher)

    def observed(*arguments: Any, **named: Any) -> Any:
        result = launcher(*arguments, **named)
        if facts.collecting():
            facts.record(ScanFact.LANE, Lane.PEER.value)
            facts.record(ScanFact.SCHEDULE, "sequential")
            by_name = signature.bind(*arguments, **named).arguments
            facts.record(ScanFact.CHUNK_SIZE, by_name["chunk_size"])
            for name in ("q", "k", "v"):
                facts.record(ScanFact.DTYPE, dtype_name(by_name[name]))
            facts.record(ScanFact.PEER_KERNELS, kernels)
        return result

    return observed


def _with_sizes(launcher: Callable[..., Any], first: int) -> Callable[..., Any]:
    """Return `launcher`, whose arguments from position `first` on are q, k and v, telling builders the sizes."""

    @wraps(launcher)
    def sized(*arguments: Any, **named: Any) -> Any:
        token = _sizes.set(_sizes_of(arguments[first], arguments[first + 2]))
        try:
            return launcher(*arguments, **named)
        finally:
            _sizes.reset(token)

    return sized


def _sizes_of(q_BSRGN: Tensor, v_BSHP: Tensor) -> dict[str, int]:
    return {"B": q_BSRGN.shape[0], "S": q_BSRGN.shape[1], "H": v_BSHP.shape[2], "G": q_BSRGN.shape[3]}


def _building_once(builder: Callable[..., Any]) -> Callable[..., Any]:
    """Return `builder` with a cache, and with the current sizes in place of open sizes."""
    kernels: dict[tuple[Any, ...], Any] = {}

    def cached(*arguments: Any, **named: Any) -> Any:
        sizes = _sizes.get()
        fixed = [sizes.get(_name_or_value(value), value) for value in arguments]
        key = (*map(_name_or_value, fixed), *((name, _name_or_value(value)) for name, value in named.items()))
        if key not in kernels:
            kernels[key] = builder(*fixed, **named)
        return kernels[key]

    return cached


def _switched(builder: Callable[..., Any]) -> Callable[..., Any]:
    """Return the builder of the dense forward kernel, which obeys `_warp_specialize` and records facts of the code."""
    released = _building_once(builder)
    specialized = cache(lambda: _building_once(_with_copying_warps(builder)))

    def switched(*arguments: Any, **named: Any) -> Any:
        kernel = (specialized() if _warp_specialize.get() else released)(*arguments, **named)
        if facts.collecting():
            source = normalised(kernel.get_kernel_source())
            facts.record(ScanFact.WARP_SPECIALIZE, roles(source) > 1)
            facts.record(f"{ScanFact.SOURCE_HASH}.forward", sha256(source.encode()).hexdigest())
        return kernel

    return switched


def _with_copying_warps(builder: Any) -> Any:
    """Return an official builder whose kernel has TMA and warp specialisation; one alone fails or changes nothing."""
    from tilelang import PassConfigKey  # lazy: the folder of `use_site` has it

    on = {PassConfigKey.TL_DISABLE_TMA_LOWER: False, PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: False}
    return replace(builder, pass_configs=builder.pass_configs | on)


def _name_or_value(value: Any) -> Any:
    """Return the name of an open size (a variable of TileLang), else the value. Printing a variable takes 30 us."""
    return getattr(value, "name", value)


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(str(value) for value in values)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""

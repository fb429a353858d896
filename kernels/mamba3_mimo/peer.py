"""Peer lane: the official Mamba-3 MIMO kernels of the optional package mamba-ssm, behind our inputs and results.

mamba-ssm pins a TileLang that cannot share a process with the one of the cuda lane. It lives in a folder of its own
(`use_site`), and one process runs one of the two lanes. Only the modules of the kernels are imported: the package's own
`__init__` would load a compiled CUDA extension and a model library that they do not need. Shape suffixes: inputs.py.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import facts
from kernels.backends import Lane
from kernels.documents import document_starts, documents, once_per_batch
from kernels.errors import KernelUnsupported
from kernels.mamba3_mimo.inputs import ScanInputs
from kernels.mamba3_mimo.operands import cumulated_angles, dtype_name, handed_on
from kernels.scan_switches import ScanFact

MAMBA_SSM, TILELANG = "2.3.2.post1", "0.1.8"
"""The release whose limits are written down here, and the TileLang that it pins."""

STATES, WIDTHS, RANKS = (16, 32, 64, 128, 256), (32, 64, 128), (1, 2, 4, 8)
"""N, P and R that the release is tested with."""
BROKEN = ((16, 32), (256, 128))
"""(N, P) that the release names as failing to compile."""
MAX_ROWS = 64
"""Rows of a chunk, C * R, beyond which the release warns of too much shared memory."""

NAMES = {
    "q": "Q", "k": "K", "v": "V", "z": "Z", "q_bias": "Q_bias", "k_bias": "K_bias", "psi": "MIMO_V", "zeta": "MIMO_Z",
    "phi": "MIMO_Out", "D": "D", "adt": "ADT", "dt": "DT", "trap": "Trap", "angles": "Angles",
}  # fmt: skip
"""Tensor of ScanInputs -> argument of the official function."""
FLOAT32 = ("q_bias", "k_bias", "psi", "zeta", "phi", "D", "adt", "dt", "angles")
"""Tensors that the official kernels read as float32; the others are bfloat16."""

FOLDER = "mamba_ssm.ops.tilelang.mamba3"
BUILDERS = {
    "mamba3_mimo_fwd": ("mamba_mimo_fwd",),
    "mamba3_mimo_bwd": ("mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd"),
    "mamba3_mimo_fwd_varlen": ("mamba_mimo_fwd",),
    "mamba3_mimo_bwd_varlen": ("mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd"),
}
"""Module -> its functions that make and compile a kernel."""
DENSE = {"mamba_mimo_forward": 0, "mamba_mimo_bwd_combined": 1}
"""Functions that launch the kernels of dense rows -> which of their arguments is q."""
PACKED = ("mamba_mimo_forward_varlen", "mamba_mimo_bwd_combined_varlen")
"""Functions that launch the kernels of packed rows."""

_fixed = [True]
"""Whether dense kernels are compiled for the sizes at hand; for the whole process: autograd has its own threads."""
_sizes: ContextVar[dict[str, int]] = ContextVar("sizes", default={})  # noqa: B039 (never changed)
"""Sizes of the dense scan that is being launched; those of packed rows stay open, their documents come and go."""

INSTALL = (
    f"lane 'peer' needs mamba-ssm {MAMBA_SSM} and its TileLang {TILELANG} in a folder of their own: `make peer`, "
    "then name the folder in ABLATE_PEER_SITE"
)


def use_site(folder: Path) -> None:
    """Put `folder`, which holds mamba-ssm and its TileLang, first on this process's import path.

    Raises:
        KernelUnsupported: the folder lacks the package, or another TileLang is loaded already.

    """
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    reason = missing()
    if reason is not None:
        sys.path.remove(str(folder))
        raise KernelUnsupported(f"{reason} (given: {folder})")


def missing() -> str | None:
    """Return why this process cannot import the official kernels, or None when it can."""
    if importlib.util.find_spec("mamba_ssm") is None:
        return f"the package mamba-ssm is not installed; {INSTALL}"
    loaded = sys.modules.get("tilelang")
    version = _version("tilelang") if loaded is None else str(loaded.__version__)
    if version.split("+")[0] != TILELANG:
        found = "is not installed" if version == "" else f"is {version} {'' if loaded is None else 'and loaded '}here"
        return f"TileLang {found}, and one process can use only one; {INSTALL}"
    return None


def refusal(inputs: ScanInputs, chunk_size: int) -> str | None:
    """Return why the official kernels cannot run `inputs`, or None when they can."""
    heads, groups, state, width, rank = *_heads(inputs), inputs.state_size, inputs.v.shape[3], inputs.q.shape[2]
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in inputs.tensors())
    reasons = (
        (inputs.v.dtype != torch.bfloat16, f"q, k, v have dtype {inputs.v.dtype}; allowed: torch.bfloat16"),
        (state not in STATES, f"N is {state}; allowed: {_listed(STATES)}"),
        (width not in WIDTHS, f"P is {width}; allowed: {_listed(WIDTHS)}"),
        (rank not in RANKS, f"R is {rank}; allowed: {_listed(RANKS)}"),
        ((state, width) in BROKEN, f"N={state} with P={width} does not compile in mamba-ssm {MAMBA_SSM}"),
        (trained and state == 16, "N is 16; allowed: from 32 for a backward pass, which does not compile for 16"),
        (groups not in (1, heads), f"G is {groups} with H={heads}; allowed: 1 or H, all that the backward pass knows"),
        (chunk_size < 8 or chunk_size & (chunk_size - 1) > 0, f"chunk_size is {chunk_size}; allowed: 8, 16, 32, 64"),
        (chunk_size * rank > MAX_ROWS, f"chunk_size * R is {chunk_size * rank}; allowed: up to {MAX_ROWS}"),
        (inputs.angles_cumulated, "angles are cumulated; allowed: raw angles, the official function sums them itself"),
        (inputs.entering is not None, "an initial state is given; allowed: none, the official function takes none"),
        (inputs.q.shape[1] < 2, "S is 1; allowed: at least 2, a sequence of one token fails in the official kernels"),
    )
    return next((f"lane 'peer': {reason}" for refused, reason in reasons if refused), None)


class Official(NamedTuple):
    """What this process has imported of mamba-ssm."""

    function: Callable[..., Any]
    """Its autograd function of the scan."""
    release: str
    """Its version and that of its TileLang."""


class Packing(NamedTuple):
    """Rows laid end to end as one row of D documents."""

    offsets: Tensor
    """[D + 1] int32: first token of each document, and the number of tokens."""
    last_B: Tensor
    """[B] int64: the document that ends each row."""


class _WithoutGradient(torch.autograd.Function):
    """A final state of the official kernels, which have no gradient of it: to ask for one is refused, not answered."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, _out: Tensor) -> Tensor:
        return state.clone()

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> Any:
        raise KernelUnsupported("lane 'peer': the official kernels have no gradient of the final state; allowed: none")


def peer_scan(inputs: ScanInputs, *, chunk_size: int, return_final_state: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return (o, final state [B,H,N,P] float32 if asked for) by the official kernels and their autograd function.

    o is [B,S,H,P] bf16, or [B,S,R,H,P] without phi. Rows that hold one document of whole chunks take the dense kernels,
    others the kernels for packed sequences. The host waits for the device once for all layers of a batch with segment
    ids, to look at them, and never without.

    Raises:
        KernelUnsupported: the package is absent, its kernels cannot run these inputs, or, in a backward pass, somebody
            wants the gradient of the final state.

    """
    peer, reason = official(), refusal(inputs, chunk_size)
    if reason is not None:
        raise KernelUnsupported(reason)
    packed = packing(inputs, chunk_size)
    given = arguments(inputs, packed)
    result = peer.function(**given, chunk_size=chunk_size, dtype=torch.bfloat16, return_state=True)
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
    """Return the final state as ScanState has it; the official one counts angles from the start of the document."""
    starts_BS = None if inputs.segment_ids is None else document_starts(inputs.segment_ids)
    return handed_on(state_BHNP, cumulated_angles(inputs, starts_BS)[:, :, -1])


def packing(inputs: ScanInputs, chunk_size: int) -> Packing | None:
    """Return how the rows are packed; None: every row holds one document of whole chunks, and dense rows will do."""
    batch, tokens = inputs.q.shape[:2]
    whole = tokens % chunk_size == 0
    if inputs.segment_ids is None:
        return None if whole else _rows(batch, tokens, inputs.q.device)
    found: Packing = once_per_batch(inputs.segment_ids, _packed)
    return None if whole and found.offsets.numel() == batch + 1 else found


@lru_cache(maxsize=64)
def _rows(batch: int, tokens: int, device: torch.device) -> Packing:
    """Return the packing of rows that hold one document each."""
    offsets = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=device)
    return Packing(offsets, torch.arange(batch, device=device))


def _packed(segment_ids_BS: Tensor) -> Packing:
    batch, tokens = segment_ids_BS.shape
    offsets = once_per_batch(segment_ids_BS, documents).offsets
    ends_B = torch.arange(1, batch + 1, dtype=torch.int32, device=offsets.device) * tokens
    return Packing(offsets, torch.searchsorted(offsets, ends_B) - 1)


def arguments(inputs: ScanInputs, packed: Packing | None) -> dict[str, Any]:
    """Return the tensors by the names and dtypes of the official function, packed rows as one row of documents."""
    given: dict[str, Tensor | None] = {name: getattr(inputs, name) for name in NAMES}
    given["angles"] = inputs.angles.expand(-1, -1, inputs.num_heads, -1)
    for name, tensor in given.items():
        if tensor is not None:
            dtype = torch.float32 if name in FLOAT32 else torch.bfloat16
            given[name] = _as_one_row(name, tensor.to(dtype)) if packed is not None else tensor.to(dtype)
    divisor = inputs.state_size // inputs.angles.shape[-1]
    offsets = None if packed is None else packed.offsets
    return {NAMES[name]: t for name, t in given.items()} | {"rotary_dim_divisor": divisor, "cu_seqlens": offsets}


def _as_one_row(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor with all rows laid end to end; weights have no rows."""
    if name in ("adt", "dt", "trap"):
        return tensor.transpose(0, 1).flatten(1).unsqueeze(0)
    return tensor.flatten(0, 1).unsqueeze(0) if name in ("q", "k", "v", "z", "angles") else tensor


@lru_cache(maxsize=1)
def official() -> Official:
    """Import the official function, without running the `__init__` of its package.

    The release compiles its kernels for sizes B, S, H and G known at run time only, and makes and compares their
    programs anew in every call: 130 ms of host time for a forward pass. The repository's kernels before it are compiled
    for the sizes at hand and take a third of the time. Here they are, too, and every program is made once.

    Raises:
        KernelUnsupported: the package is absent.

    """
    reason, spec = missing(), importlib.util.find_spec("mamba_ssm")
    if reason is not None or spec is None:
        raise KernelUnsupported(reason or INSTALL)
    sys.modules.setdefault("mamba_ssm", importlib.util.module_from_spec(spec))
    for name, builders in BUILDERS.items():
        module = importlib.import_module(f"{FOLDER}.{name}")
        for builder in builders:
            setattr(module, builder, _built_once(getattr(module, builder)))
    module = importlib.import_module(f"{FOLDER}.mamba3_mimo")
    for launcher, first in DENSE.items():
        setattr(module, launcher, _observed(_with_sizes(getattr(module, launcher), first), "dense"))
    for launcher in PACKED:
        setattr(module, launcher, _observed(getattr(module, launcher), "packed"))
    release = f"mamba-ssm {_version('mamba-ssm')}, tilelang {_version('tilelang')}"
    return Official(function=module.mamba3_mimo, release=release)


def _observed(launcher: Callable[..., Any], kernels: str) -> Callable[..., Any]:
    """Return `launcher`, an official function that launches kernels, so that what it was handed is recorded."""
    signature = inspect.signature(launcher)

    def observed(*arguments: Any, **named: Any) -> Any:
        result = launcher(*arguments, **named)
        if facts.collecting():
            facts.record(ScanFact.LANE, Lane.PEER.value)
            facts.record(ScanFact.SCHEDULE, "sequential")
            handed = signature.bind(*arguments, **named).arguments
            facts.record(ScanFact.CHUNK_SIZE, handed["chunk_size"])
            for name in ("q", "k", "v"):
                facts.record(ScanFact.DTYPE, dtype_name(handed[name]))
            facts.record(ScanFact.PEER_KERNELS, kernels)
        return result

    return observed


def _with_sizes(launcher: Callable[..., Any], first: int) -> Callable[..., Any]:
    """Return `launcher`, whose arguments from number `first` on are q, k and v, so that builders know the sizes."""

    @wraps(launcher)
    def sized(*arguments: Any, **named: Any) -> Any:
        q_BSRGN, v_BSHP = arguments[first], arguments[first + 2]
        sizes = {"B": q_BSRGN.shape[0], "S": q_BSRGN.shape[1], "H": v_BSHP.shape[2], "G": q_BSRGN.shape[3]}
        token = _sizes.set(sizes if _fixed[0] else {})
        try:
            return launcher(*arguments, **named)
        finally:
            _sizes.reset(token)

    return sized


def _built_once(builder: Callable[..., Any]) -> Callable[..., Any]:
    """Return `builder` with a memory, and with the sizes at hand in place of sizes known at run time only."""
    kernels: dict[tuple[Any, ...], Any] = {}

    def remembered(*arguments: Any, **named: Any) -> Any:
        sizes = _sizes.get()
        known = [sizes.get(_named(value), value) for value in arguments]
        key = (*map(_named, known), *((name, _named(value)) for name, value in named.items()))
        if key not in kernels:
            kernels[key] = builder(*known, **named)
        return kernels[key]

    return remembered


def _named(value: Any) -> Any:
    """Return an open size, a variable of TileLang, as its name; anything else as it is. Printing one takes 30 us."""
    return getattr(value, "name", value)


@contextmanager
def open_sizes() -> Iterator[None]:
    """Compile for open sizes, as the release does: slower kernels of the same arithmetic, but one for all sizes."""
    _fixed[0] = False
    try:
        yield
    finally:
        _fixed[0] = True


def _heads(inputs: ScanInputs) -> tuple[int, int]:
    return inputs.num_heads, inputs.num_groups


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(str(value) for value in values)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""

"""Shapes and dtypes of all tensors between the host and the kernels. See docs/kernels.md.

A parameter of a program is a name of this table. Letters: see shape.py. A kernel of walks sees every walk as a row.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

import tilelang.language as T  # noqa: N812 - the language's own name

from ablate.kernels.mamba3_mimo.cuda.pieces.positions import EDGE, blocks_of
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F16, F32
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant

Program = TypeVar("Program", bound=Callable[..., Any])
ANY = Variant()
"""Variant for programs that do not depend on the variant."""


def tensors(s: ScanShape) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Return name -> (shape, dtype) of every tensor, including tensors that are not `there`."""
    W, H, L, N, P, R, A, C = s.walks, s.H, s.L, s.N, s.P, s.R, s.A, s.C
    row, rows, token, chunk, state = (s.B, H, s.S), (W, L), (W, H, L), (W, H, s.chunks), (W, H, N, P)
    shared, head = (*rows, R, s.G, N), (W, s.sums, s.chunks, s.M, N)
    out = (*rows, H, P) if s.reduced else (*rows, R, H, P)
    angles, weight, partial = (s.B, s.S, s.angle_heads, A), (H, R, P), (W, H, s.M // 8, P)
    shapes: dict[str, dict[str, tuple[Any, ...]]] = {
        BF16: {
            "q": shared, "k": shared, "v": (*rows, H, P), "z": (*rows, H, P), "q_bias": (H, R, N), "k_bias": (H, R, N),
            "o": out, "states": (*chunk, N, P), "psiv": (*chunk, s.M, P),
            "do": out, "dqh": head, "dkh": head, "dv": (*rows, H, P), "dz": (*rows, H, P),
        },
        F16: {"cs": (*chunk, A // 4, C, 8)},
        F32: {
            "psi": weight, "zeta": weight, "phi": weight, "D": (H,), "adt": row, "dt": row, "trap": row,
            "angles": angles, "sums": (s.B, H, blocks_of(s), A),
            "lc": token, "sk": token, "gm": token, "wk": token, "wq": token, "carry": (W, H),
            "local": state, "entering": state, "final": state, "leaving": state, "first": state,
            "row_q": token, "row_k": token, "same": token, "diag": token, "dtheta": (*token, A),
            "edges": (W, H, -(-L // EDGE), 2, N), "p_psi": partial, "p_zeta": partial, "p_phi": partial,
            "p_heads": (W, 2 * H * R + -(-H // N), N),
            "dadt": row, "ddt": row, "dtrap": row, "dangles": angles,
        },
        "int32": {"reset": (s.B, s.S)},
    }  # fmt: skip
    return {name: (shape, dtype) for dtype, named in shapes.items() for name, shape in named.items()}


def there(s: ScanShape, v: Variant) -> dict[str, bool]:
    """Return name -> whether a scan has the tensor, for tensors that not every scan has."""
    parallel = v.schedule == "chunk_parallel"
    return {
        **dict.fromkeys(("z", "zeta", "dz", "p_zeta"), s.gated),
        **dict.fromkeys(("phi", "p_phi"), s.reduced),
        **dict.fromkeys(("angles", "sums", "dangles"), not s.cumulated),
        **dict.fromkeys(("wk", "wq", "carry", "local"), parallel),
        "psiv": v.psiv_cache,
        "final": not parallel,
        "first": writes_first(s, v),
    }


def writes_first(s: ScanShape, v: Variant) -> bool:
    """Return whether B3 writes the gradient of the rows' entering state. Otherwise reversed F2 does."""
    return s.started and v.schedule == "sequential"


def takes(s: ScanShape, v: Variant = ANY, **others: str) -> Callable[[Program], Program]:
    """Return a decorator that annotates a program's parameters with tensors of the table, absent ones with False.

    A parameter has its tensor's name, perhaps with a trailing underscore, or `others` maps it to its tensor. Existing
    annotations stay.
    """
    table, present = tensors(s), there(s, v)

    def declared(program: Program) -> Program:
        for name in signature(program).parameters.keys() - program.__annotations__.keys():
            tensor = others.get(name, name.rstrip("_"))
            program.__annotations__[name] = T.Tensor(*table[tensor]) if present.get(tensor, True) else False
        return program

    return declared

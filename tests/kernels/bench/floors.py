"""Least time of each kernel of ours: the bytes that it must move and its FLOPs, at the GPU's ceilings.

A tensor counts once for every kernel that reads or writes it, whatever the number of blocks. That includes B3's sums
over heads, which all heads except the first read and write again. Only matrix products count as FLOPs. Letters: see
kernels/mamba3_mimo/cuda/shape.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape

LAUNCHES = {"f2_pass_states": 2, "b4_reduce_heads": 2}
"""Kernels that a forward and backward pass launches twice: forwards and in reverse, or for q and k."""

SUMS = ("f1_local_states", "b1_local_gradients")
"""Kernels that omit one super-chunk of a row with several, whose result is not needed."""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Bytes and FLOPs of the launches of one kernel."""

    bytes: float
    flops: float

    def ms(self, ceilings: Mapping[str, float]) -> float:
        """Return the longer of the two times on a GPU with these `bytes_per_s` and `flops_per_s`."""
        return 1e3 * max(self.bytes / ceilings["bytes_per_s"], self.flops / ceilings["flops_per_s"])


def sizes(s: ScanShape) -> dict[str, int]:
    """Return the bytes of each kind of tensor."""
    tokens = s.B * s.S
    return {
        "direction": 2 * tokens * s.R * s.G * s.N,  # q, k and their gradients
        "summed": 2 * tokens * s.R * s.sums * s.N,  # gradients of q, k as B3 adds up heads
        "value": 2 * tokens * s.H * s.P,  # v, z, o and their gradients
        "psiv": 2 * tokens * s.H * s.R * s.P,
        "scalar": 4 * tokens * s.H,  # decays, step sizes, row sums
        "raw_angle": 4 * tokens * s.angle_heads * s.A,  # and its gradient
        "angle": 4 * tokens * s.H * s.A,  # gradients of the cumulated angles
        "rotation": 4 * tokens * s.H * s.A,  # cosine and sine in fp16
        "chunk_state": 2 * s.walks * s.H * s.chunks * s.N * s.P,
        "state": 4 * s.B * s.H * s.K * s.N * s.P,  # one per super-chunk
        "partial": 4 * s.B * s.K * s.H * (s.M // 8) * s.P,  # sums for the gradient of psi, zeta or phi
        "reset": 4 * tokens,
    }


MOVED: dict[str, dict[str, int]] = {
    "f0_angle_sums": {"raw_angle": 1, "scalar": 1},
    "f0_tables": {"raw_angle": 1, "scalar": 1, "rotation": 1},
    "f0_decays": {"scalar": 8, "reset": 1},
    "f1_local_states": {"direction": 1, "value": 1, "rotation": 1, "scalar": 1, "state": 1},
    "f2_pass_states": {"state": 2},
    "f3_outputs": {"direction": 2, "value": 3, "rotation": 1, "scalar": 3, "state": 1, "chunk_state": 1},
    "b1_local_gradients": {"direction": 1, "value": 2, "rotation": 1, "scalar": 1, "state": 1},
    "b3_gradients": {
        "direction": 2, "value": 5, "rotation": 1, "scalar": 7, "chunk_state": 1, "state": 1, "summed": 2, "angle": 1,
        "partial": 3,
    },
    "b4_reduce_heads": {"summed": 1, "direction": 1},
    "b5_time_gradients": {"scalar": 10, "reset": 1, "raw_angle": 2, "angle": 1},
    "b6_column_sums": {"partial": 3},
}  # fmt: skip
"""Kernel -> number of tensors of each kind that one launch reads or writes."""

PRODUCTS: dict[str, tuple[int, int, int]] = {
    "f1_local_states": (0, 0, 1),
    "f3_outputs": (1, 1, 2),
    "b1_local_gradients": (0, 0, 1),
    "b3_gradients": (3, 3, 5),
}
"""Kernel -> matrix products per chunk and head of sizes M x M x N, M x M x P and M x N x P.

f3: q k^T; scores x; q H and k^T x. b3: q k^T, dS k, dS^T q; S x for the gate, x g^T, S^T g; q H, k E, g H^T, x E^T,
q^T g.
"""


def floors(s: ScanShape, *, psiv_cache: bool = False) -> dict[str, Floor]:
    """Return the floor of every kernel for all its launches in a forward and backward pass.

    The rows start from zero and return no final state, like those of the bench.
    """
    size = sizes(s)
    rows = s.walks * s.H * s.chunks * s.M
    by_kernel = {}
    for name, kinds in MOVED.items():
        moved = sum(count * size[kind] for kind, count in kinds.items())
        moved += size["psiv"] if psiv_cache and name in ("f3_outputs", "b3_gradients") else 0
        mmn, mmp, mnp = PRODUCTS.get(name, (0, 0, 0))
        flops = 2 * rows * (s.M * (mmn * s.N + mmp * s.P) + mnp * s.N * s.P)
        times = LAUNCHES.get(name, 1) * (s.handed_on / s.K if name in SUMS else 1)
        by_kernel[name] = Floor(bytes=times * moved, flops=times * flops)
    return by_kernel


def whole_pass(s: ScanShape, *, backward: bool) -> Floor:
    """Return the floor of the operation: inputs read and results written once, in one pass or in both.

    Both passes read the inputs. The backward pass also reads the gradient of o and writes fourteen gradients. Products
    are those of the walks over all chunks. The cost of super-chunks (F1, B1) is a choice and does not count.
    """
    size = sizes(s)
    once = 2 * size["direction"] + 2 * size["value"] + 3 * size["scalar"] + size["raw_angle"]
    moved = once + size["value"]
    names = ["f3_outputs"]
    if backward:
        moved += 2 * once + size["value"]
        names += ["b3_gradients"]
    each = floors(s)
    return Floor(bytes=moved, flops=sum(each[name].flops for name in names))

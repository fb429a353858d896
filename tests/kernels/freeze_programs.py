"""`python -m tests.kernels.freeze_programs FILE`: are the kernels' programs still those of FILE? `--store` writes it.

Equal programs compile to equal code, so a change of the kernels' Python that must not change them proves itself here
without a compiler: once with `--store` before the change, once after it. FILE is JSON, problem -> kernel -> sha256 of
the program's text and its compiler options. Nine shapes times eight variants take three minutes.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from ablate.kernels.mamba3_mimo.cuda.host.compiled import needed, pass_configs, program
from ablate.kernels.mamba3_mimo.cuda.host.refusals import refusal
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant

SHAPES = {
    "B8 S8192 N64": {"B": 8, "S": 8192, "H": 16, "G": 1, "N": 64, "P": 64, "R": 4, "A": 16},
    "B1 S65536 N64": {"B": 1, "S": 65536, "H": 16, "G": 1, "N": 64, "P": 64, "R": 4, "A": 16},
    "B8 S2048 N128": {"B": 8, "S": 2048, "H": 32, "G": 1, "N": 128, "P": 64, "R": 4, "A": 32},
    "B2 S512 N32 R2 C32": {"B": 2, "S": 512, "H": 4, "G": 2, "N": 32, "P": 64, "R": 2, "A": 16, "C": 32},
    "no z, no phi": {
        "B": 2, "S": 512, "H": 4, "G": 1, "N": 64, "P": 64, "R": 4, "A": 16, "gated": False, "reduced": False,
    },
    "a state, cumulated": {
        "B": 2, "S": 512, "H": 4, "G": 2, "N": 128, "P": 64, "R": 4, "A": 64, "started": True, "cumulated": True,
    },
    "a state, shared angles, R8 C8": {
        "B": 2, "S": 512, "H": 3, "G": 1, "N": 64, "P": 64, "R": 8, "A": 16, "C": 8, "started": True,
        "shared_angles": True,
    },
    "N16 P32 R1 C64": {"B": 2, "S": 512, "H": 5, "G": 1, "N": 16, "P": 32, "R": 1, "A": 8, "C": 64},
    "N64 P128, wide": {
        "B": 2, "S": 512, "H": 2, "G": 1, "N": 64, "P": 128, "R": 2, "A": 32, "C": 32, "wide": True, "reduced": False,
    },
}  # fmt: skip
VARIANTS = {
    "default": {},
    "tma off": {"tma": False},
    "a group that copies": {"warp_specialize": True},
    "layout_2d off": {"layout_2d": False},
    "no stages": {"pipeline_stages": 0},
    "two stages": {"pipeline_stages": 2},
    "psiv_cache": {"psiv_cache": True},
    "sequential, merged": {"schedule": "sequential", "aggressive_smem_merge": True},
}


def problems() -> Iterator[tuple[str, ScanShape, Variant]]:
    """Yield the problems that the lane does not refuse, each with its name."""
    for shape_name, sizes in SHAPES.items():
        for variant_name, switches in VARIANTS.items():
            variant = Variant(chunk_size=sizes.get("C", 16), **switches)
            whole = variant.schedule == "sequential"
            shape = ScanShape(**{**sizes, "C": variant.chunk_size}, L=sizes["S"] if whole else 256)
            if refusal(variant, shape) is None:
                yield f"{shape_name}, {variant_name}", shape, variant


def programs() -> dict[str, dict[str, str]]:
    """Return the hash of every kernel's program, of every problem."""
    return {
        name: {
            kernel: sha256(f"{text(kernel, shape, variant)}{options(kernel, variant)}".encode()).hexdigest()
            for direction in ("forward", "backward")
            for kernel in needed(direction, shape, variant)
        }
        for name, shape, variant in problems()
    }


def text(kernel: str, shape: ScanShape, variant: Variant) -> str:
    """Return the text of a kernel's program."""
    return program(kernel, shape, variant).script()


def options(kernel: str, variant: Variant) -> list[str]:
    """Return the compiler options of a kernel."""
    return sorted(f"{key}={value}" for key, value in pass_configs(kernel, variant).items())


def main() -> str | None:
    """Store or compare; return what differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.freeze_programs")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--store", action="store_true", help="write FILE")
    arguments = parser.parse_args()
    current = programs()
    count = sum(map(len, current.values()))
    if arguments.store:
        arguments.file.write_text(json.dumps(current, indent=1) + "\n")
        sys.stdout.write(f"{count} programs stored in {arguments.file}\n")
        return None
    stored = json.loads(arguments.file.read_text())
    if differing := sorted(
        f"{name}: {kernel}"
        for name in current.keys() | stored.keys()
        for kernel in current.get(name, {}).keys() | stored.get(name, {}).keys()
        if current.get(name, {}).get(kernel) != stored.get(name, {}).get(kernel)
    ):
        return f"{len(differing)} of {count} programs differ:\n" + "\n".join(differing)
    sys.stdout.write(f"all {count} programs are those of {arguments.file}\n")
    return None


if __name__ == "__main__":
    sys.exit(main())

"""What a compiled kernel really is: instruction counts, registers, shared memory and hashes, read from its code.

The machine code is taken apart by `cuobjdump` (CUDA toolkit, or the package nvidia-cuda-cuobjdump). Where there is none
the generated CUDA source is read instead; a row says in `read_from` which of the two it is, and lacks what only machine
code can tell. A row costs a third of a second once and is then kept beside the compiled kernel in TileLang's cache.
This module imports neither torch nor tilelang.
"""

import json
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kernels.backends import Lane
from kernels.errors import KernelError
from kernels.facts import Fact
from kernels.mamba3_mimo.cuda.host import cuda_source
from kernels.mamba3_mimo.cuda.host.cuda_source import CALLS, chunks_ahead, chunks_walked, normalised, roles
from kernels.scan_switches import ScanFact

Row = dict[str, Fact]
"""One line of the kernel table. Counts are of instructions in the program, not of executions."""

OPCODES: dict[str, tuple[str, ...]] = {
    "tma_loads": ("UTMALDG", "UBLKCP.S.G"),
    "tma_stores": ("UTMASTG", "UTMAREDG", "UBLKCP.G.S", "UBLKRED"),
    "cp_async": ("LDGSTS",),
    "wgmma": ("HGMMA",),
    "mma": ("HMMA",),
    "mbarrier": ("SYNCS",),
    "register_reallocations": ("USETMAXREG",),
    "barriers": ("BAR",),
    "approximations": ("MUFU",),
    "spill_loads": ("LDL",),
    "spill_stores": ("STL",),
}
"""Name of a count -> opcodes of sm_90a that it adds up, with every suffix. LDL and STL reach local memory: registers
that were spilled, or an array indexed at run time."""

WALKS = ("local_states", "outputs", "local_gradients", "gradients")
"""Kernels that walk the chunks of a super-chunk: the ones that the gates change."""
PASSES = ("pass_states", "pass_gradients")
"""Kernels that hand states from one super-chunk to the next."""

SHOWN_BY: dict[str, tuple[str, ...]] = {
    "tma": WALKS,
    "layout_2d": WALKS,
    "pipeline_stages": WALKS,
    "warp_specialize": ("gradients",),
    "aggressive_smem_merge": ("gradients",),
    "fast_math": WALKS,
    "psiv_cache": ("outputs", "gradients"),
    "dtype": WALKS,
    "chunk_size": WALKS,
    "superchunk": WALKS,
}
"""Gate -> kernels that must all show it, where they are launched: see `_must_show` for what two of them cannot."""
UNPROVED = "unproved"
"""What a kernel shows of a gate that it must show and does not."""
RUN_TIME = "run time"
"""A number that is known when a kernel is launched."""

VIEW = re.compile(r"\b(\w+) = T\.Buffer\(\(([^()]*)\).*?\bdata=(\w+)")
"""A view in a TileLang program: its name, its shape, whose memory it shows."""
LOAD = re.compile(r"(?:tma|async)_copy\(T\.region\((\w+)\[.*?\], 1, ([\d, ]+)\), T\.region\((\w+)\[")
"""A load in a TileLang program: from where, how much of each dimension, and to where."""
LOADED = {"q", "k", "v", "v_", "z", "do", "d_out"}
"""Names that the programs give to the tensors of which a load takes a chunk's tokens."""

EM_CUDA = 190
ELF = b"\x7fELF"
READER = sha256(b"".join(Path(file).read_bytes() for file in (__file__, cuda_source.__file__))).hexdigest()
"""Digest of what reads: a stored row of another reader is made again."""


def table(kernels: Mapping[str, Any]) -> tuple[Row, ...]:
    """Return one row for each compiled kernel, from a mapping of its name in `compiled.KERNELS`.

    Raises KernelError when TileLang's cache is switched off, because the compiled code is read from there.
    """
    return tuple(_stored(name, kernel) for name, kernel in kernels.items())


def launched(rows: Iterable[Row], *, tokens: int, handed: int | None) -> tuple[Row, ...]:
    """Return the rows with the super-chunks of a row of `tokens` tokens: kernels are compiled for any number of them.

    For a walk as many as what its code walks goes into the row; for a kernel that hands states on the number it was
    launched with, `handed`.
    """
    return tuple(row | _super_chunks(row, tokens, handed) for row in rows)


def _super_chunks(row: Row, tokens: int, handed: int | None) -> Row:
    if row["name"] in PASSES:
        return {"super_chunks": UNPROVED if handed is None else handed}
    walked = row.get("superchunk")
    if row["name"] not in WALKS or not isinstance(walked, int):
        return {}
    return {"super_chunks": tokens // walked if tokens % walked == 0 else UNPROVED}


def facts(rows: Iterable[Row]) -> dict[str, Fact]:
    """Return what the rows of one pass (forward or backward) say about the gates, by the names of `ScanFact`.

    `rows` are those of all kernels that the pass launched. A gate is the common value of the kernels that must show it,
    "mixed" where they differ, "unproved" where one shows nothing; recording the facts of both passes under one name
    does the same across them. What no kernel can show is left out. `source_hash` is that of the generated CUDA,
    `binary_hash` that of the instructions, which alone changes with `fast_math`. Both differ between the passes.
    """
    rows = tuple(rows)
    found: dict[str, Fact] = {"attested_from": "+".join(sorted({str(row["read_from"]) for row in rows}))}
    for kind in ("source", "binary"):
        if all(f"{kind}_sha256" in row for row in rows):
            found[f"{kind}_hash"] = _digest(f"{row['name']} {row[f'{kind}_sha256']}" for row in rows)
    handed = any(row["name"] in PASSES for row in rows)
    for gate, kernels in SHOWN_BY.items():
        shown = (row for row in rows if row["name"] in kernels and _must_show(gate, row, handed=handed))
        values = {row.get(gate, UNPROVED) for row in shown}
        if values:
            found[gate] = values.pop() if len(values) == 1 else "mixed"
    if any(row["name"] in WALKS for row in rows):
        found |= {"lane": Lane.CUDA.value, "schedule": _schedule(rows)}
    return {ScanFact.of(name): value for name, value in found.items()}


def _must_show(gate: str, row: Row, *, handed: bool) -> bool:
    """Tell whether the kernel of this row would show the gate.

    Whether float instructions flush denormal numbers is not in the source; where no states are `handed` on there are no
    super-chunks; and a walk of one chunk has none ahead.
    """
    if gate == "fast_math":
        return row["read_from"] == "sass"
    if gate == "superchunk":
        return handed
    one_chunk = "superchunk" in row and row["superchunk"] == row.get("chunk_size")
    return not (gate == "pipeline_stages" and one_chunk)


def _schedule(rows: Iterable[Row]) -> str:
    """Return how time is walked: in blocks with states handed between them, or by one block of each head and row."""
    walks = {row.get("super_chunks", UNPROVED) for row in rows if row["name"] in WALKS}
    handed = {row.get("super_chunks", UNPROVED) for row in rows if row["name"] in PASSES}
    if not handed:
        return "sequential" if walks == {1} else "mixed"
    return "chunk_parallel" if walks == handed and len(walks) == 1 and UNPROVED not in walks else "mixed"


def _digest(parts: Iterable[str]) -> str:
    return sha256("\n".join(sorted(parts)).encode()).hexdigest()


def _stored(name: str, kernel: Any) -> Row:
    """Return the kernel's row from the file beside its code, made first where it is missing or out of date."""
    folder = getattr(kernel, "_tilelang_cache_path", None)
    if folder is None or not Path(folder).is_dir():
        raise KernelError(
            f"kernel '{name}' cannot be attested: its code is not in TileLang's cache; is TILELANG_DISABLE_CACHE set?"
        )
    path = Path(folder) / "attestation.json"
    if path.is_file():
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        row: Row = stored["row"]
        if stored["reader"] == READER and (row["read_from"] == "sass" or disassembler() is None):
            return {**row, "name": name}
    row = _read(name, Path(folder), kernel)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json", delete=False) as file:
        json.dump({"reader": READER, "row": row}, file, indent=1)
    Path(file.name).replace(path)
    return row


def _read(name: str, folder: Path, kernel: Any) -> Row:
    source, program = (folder / "device_kernel.cu").read_text(encoding="utf-8"), kernel.adapter.prim_func.script()
    host = (folder / "host_kernel.cu").read_text(encoding="utf-8")
    row: Row = {"name": name, **_from_source(source, host, program.count('thread="blockIdx.'))}
    tool = disassembler()
    if tool is not None:
        code = cubin((folder / "executable.so").read_bytes())
        static = _from_machine_code(_disassembled(tool, code))
        row |= {**static, "read_from": "sass", "shared_bytes": int(row["shared_bytes"]) + int(static["shared_bytes"])}
    return row | _gates(row, source, program, kernel)


def _from_source(source: str, host: str, axes: int) -> Row:
    """Read what generated CUDA source and its launch code say of a kernel whose grid has `axes` axes."""
    bounds = re.search(r"__launch_bounds__\((\d+)", source)
    launch = re.findall(r"\.v_int64\) = \(\(int64_t\)(.+)\);", host)
    if bounds is None or not launch:
        raise KernelError("no launch bounds or launch arguments in the generated source: not TileLang 0.1.15's form")
    shared = int(launch.pop()) if "extern __shared__" in source else 0
    return {
        "read_from": "source",
        "threads": int(bounds[1]),
        "shared_bytes": shared,
        "grid": " x ".join(size if size.isdigit() else RUN_TIME for size in launch[-3 - axes : -3]),
        **{count: len(re.findall(call, source)) for count, call in CALLS.items()},
        "source_sha256": sha256(normalised(source).encode()).hexdigest(),
    }


def cubin(library: bytes) -> bytes:
    """Return the GPU code inside a compiled kernel's shared library: an ELF file in an ELF file."""
    at = library.find(ELF, 1)
    while at >= 0:
        if struct.unpack_from("<H", library, at + 18)[0] == EM_CUDA:
            return library[at:]
        at = library.find(ELF, at + 1)
    raise KernelError("the compiled kernel's library holds no GPU code")


@lru_cache(maxsize=1)
def disassembler() -> str | None:
    """Return the path of `cuobjdump`, or None: on PATH, beside nvcc, or from its Python package."""
    beside_nvcc = [Path(nvcc).resolve().with_name("cuobjdump") for nvcc in [shutil.which("nvcc")] if nvcc]
    packages = find_spec("nvidia")
    folders = list(packages.submodule_search_locations or ()) if packages else []
    packaged = [path for folder in folders for path in sorted(Path(folder).glob("*/bin/cuobjdump"))]
    return shutil.which("cuobjdump") or next((str(path) for path in (*beside_nvcc, *packaged) if path.is_file()), None)


def _disassembled(tool: str, code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [tool, "-sass", "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise KernelError(f"{' '.join(command[:-1])} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _from_machine_code(text: str) -> Row:
    """Read the output of `cuobjdump -sass -res-usage` of one kernel."""
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    instructions = re.findall(r"^[ \t]+/\*[0-9a-f]{4,}\*/[ \t]+(\S.*?)[ \t]*;", text, re.MULTILINE)
    if used is None or not instructions:
        raise KernelError("cuobjdump printed no resource usage or no instructions")
    opcodes = Counter(_opcode(line) for line in instructions)
    return {
        "registers": int(used[1]),
        "stack_bytes": int(used[2]),
        "shared_bytes": int(used[3]),
        "instructions": len(instructions),
        **{count: sum(n for opcode, n in opcodes.items() if _is(opcode, names)) for count, names in OPCODES.items()},
        "flushing": sum(n for opcode, n in opcodes.items() if _is(opcode, ("FADD.FTZ", "FMUL.FTZ", "FFMA.FTZ"))),
        "arithmetic": sum(n for opcode, n in opcodes.items() if _is(opcode, ("FADD", "FMUL", "FFMA"))),
        "binary_sha256": _digest(f"{i} {line}" for i, line in enumerate(instructions)),
    }


def _opcode(instruction: str) -> str:
    words = instruction.split()
    return words[1] if words[0].startswith("@") else words[0]


def _is(opcode: str, names: tuple[str, ...]) -> bool:
    return any(opcode == name or opcode.startswith(f"{name}.") for name in names)


def _gates(row: Row, source: str, program: str, kernel: Any) -> Row:
    """Return the gates as this kernel shows them; absent where it cannot.

    Only `aggressive_smem_merge` is read from the compiler options of the kernel: nothing else tells it from the merging
    that the compiler does anyway. Whether it changed anything is for the hashes to say.
    """
    seen: Row = {
        "tma": False if row["tma_loads"] == 0 else True if row["cp_async"] == 0 else "mixed",
        "warp_specialize": roles(source) > 1,
        "psiv_cache": bool(re.search(r"__global__[^{;]*\bpsiv(?:_desc)?\b", source)),
    }
    ahead = chunks_ahead(source)
    if ahead is not None:
        seen["pipeline_stages"] = ahead
    if "arithmetic" in row:  # with fast math every float instruction flushes denormal numbers, without it none
        flushing, arithmetic = row.pop("flushing"), row.pop("arithmetic")
        seen["fast_math"] = "mixed" if 0 < int(flushing) < int(arithmetic) else flushing == arithmetic
    options = {str(key): value for key, value in (kernel.adapter.pass_configs or {}).items()}
    seen["aggressive_smem_merge"] = bool(options.get("tl.enable_aggressive_shared_memory_merge", False))
    ranks = _staging_ranks(program)
    if ranks:
        seen["layout_2d"] = ranks == {2}
    dtypes = operand_dtypes(program)
    if dtypes:
        seen["dtype"] = dtypes.pop() if len(dtypes) == 1 else "mixed"
    tokens, chunks = _tokens_loaded(program), chunks_walked(source)
    if len(tokens) == 1:
        seen["chunk_size"] = tokens.pop()
        seen |= {} if chunks is None else {"superchunk": int(seen["chunk_size"]) * chunks}
    return seen


def _loads(program: str) -> Iterator[tuple[str, int, str]]:
    """Yield (tensor, tokens, buffer) of every load of q, k, v, z or the gradient of o in a TileLang program.

    Tokens are the second dimension of a tensor, the third of a view of one by its ranks, which has five. A buffer that
    is loaded through a view is named as its memory. A view is what its last definition before the load says.
    """
    views: dict[str, tuple[str, bool]] = {}
    for line in program.splitlines():
        if view := VIEW.search(line):
            views[view[1]] = view[3], view[2].count(",") == 4
        if load := LOAD.search(line):
            tensor, by_rank = views.get(load[1], (load[1], False))
            buffer, _ = views.get(load[3], (load[3], False))
            if tensor in LOADED and (by_rank or load[1] not in views):
                yield tensor, int(load[2].split(",")[2 if by_rank else 1]), buffer


def _tokens_loaded(program: str) -> set[int]:
    """Return how many tokens one load of q, k, v, z or the gradient of o takes, in a TileLang program."""
    return {tokens for _, tokens, _ in _loads(program)}


def operand_dtypes(program: str) -> set[str]:
    """Return the dtypes of the buffers q, k, v and z of a TileLang program; its launcher refuses other tensors."""
    found = re.findall(r"\b(?:q|k|v_?|z) = T\.match_buffer\(\w+, \([^()]*\)(?:, \"(\w+)\")?", program)
    return {dtype or "float32" for dtype in found}


def _staging_ranks(program: str) -> set[int]:
    """Return the numbers of dimensions of the shared buffers that q and k are loaded into, in a TileLang program."""
    buffers = re.findall(r"\b(\w+) = T\.\w*alloc_buffer\(\(([\d, ]+)\)(?:.*?\bdata=(\w+))?", program)
    shapes = {name: shape for buffer, shape, memory in buffers for name in (buffer, memory)}
    targets = {buffer for tensor, _, buffer in _loads(program) if tensor in {"q", "k"}}
    return {len([size for size in shapes[name].split(",") if size.strip()]) for name in targets}

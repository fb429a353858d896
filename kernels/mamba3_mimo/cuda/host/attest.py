"""Properties of a compiled kernel, read from its code: instruction counts, registers, shared memory, hashes, gates.

`cuobjdump` (CUDA toolkit, or the package nvidia-cuda-cuobjdump) disassembles the machine code. Without it the generated
CUDA source is read instead, and properties of machine code are missing. A row's `read_from` names its source. A row
takes a third of a second and is then stored beside the compiled kernel in TileLang's cache. This module imports neither
torch nor tilelang.
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

from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelError
from ablate.kernels.facts import Fact
from ablate.kernels.mamba3_mimo.cuda.host import cuda_source
from ablate.kernels.mamba3_mimo.cuda.host.cuda_source import CALLS, chunks_ahead, chunks_walked, normalised, roles
from ablate.kernels.scan_switches import ScanFact

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
"""Name of a count -> opcodes of sm_90a to add up, with every suffix. LDL and STL access local memory: spilled registers
or an array with run-time indices."""

WALKS = ("local_states", "outputs", "local_gradients", "gradients")
"""Kernels that walk the chunks of a super-chunk. The gates change only these."""
PASSES = ("pass_states", "pass_gradients")
"""Kernels that pass states from one super-chunk to the next."""

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
"""Gate -> kernels that must all show it if they are launched. `_must_show` lists exceptions."""
UNPROVED = "unproved"
"""Value of a gate that a kernel must show but does not."""
RUN_TIME = "run time"
"""Grid size that only the launch sets."""

VIEW = re.compile(r"\b(\w+) = T\.Buffer\(\(([^()]*)\).*?\bdata=(\w+)")
"""A view in a TileLang program: name, shape, memory."""
LOAD = re.compile(r"(?:tma|async)_copy\(T\.region\((\w+)\[.*?\], 1, ([\d, ]+)\), T\.region\((\w+)\[")
"""A load in a TileLang program: source, extent of each dimension, target."""
LOADED = {"q", "k", "v", "v_", "z", "do", "d_out"}
"""Tensors of the programs that are loaded by the tokens of a chunk."""

EM_CUDA = 190
ELF = b"\x7fELF"
READER = sha256(b"".join(Path(file).read_bytes() for file in (__file__, cuda_source.__file__))).hexdigest()
"""Digest of the reading code. A stored row of another reader is replaced."""


def table(kernels: Mapping[str, Any]) -> tuple[Row, ...]:
    """Return one row per compiled kernel of `kernels` (name in `compiled.KERNELS` -> kernel).

    Raises KernelError if TileLang's cache is off, because the compiled code is read from it.
    """
    return tuple(_stored(name, kernel) for name, kernel in kernels.items())


def launched(rows: Iterable[Row], *, tokens: int, super_chunks: int | None) -> tuple[Row, ...]:
    """Return the rows with the super-chunks of a row of `tokens` tokens, which the compiled code does not fix.

    For a walk this is the number of its walks in a row. For a kernel that passes states on it is `super_chunks`, the
    number at its launch.
    """
    return tuple(row | _super_chunks(row, tokens, super_chunks) for row in rows)


def _super_chunks(row: Row, tokens: int, at_launch: int | None) -> Row:
    if row["name"] in PASSES:
        return {"super_chunks": UNPROVED if at_launch is None else at_launch}
    walked = row.get("superchunk")
    if row["name"] not in WALKS or not isinstance(walked, int):
        return {}
    return {"super_chunks": tokens // walked if tokens % walked == 0 else UNPROVED}


def facts(rows: Iterable[Row]) -> dict[str, Fact]:
    """Return the facts that the rows of one pass (forward or backward) prove, by the names of `ScanFact`.

    `rows` are those of all kernels of the pass. A gate is the common value of the kernels that must show it, "mixed" if
    they differ, "unproved" if one shows nothing. A gate that no kernel can show is left out. `source_hash` is the hash
    of the generated CUDA and `binary_hash` that of the instructions. Only the second changes with `fast_math`. Both
    differ between the passes.
    """
    rows = tuple(rows)
    values: dict[str, Fact] = {"attested_from": "+".join(sorted({str(row["read_from"]) for row in rows}))}
    for kind in ("source", "binary"):
        if all(f"{kind}_sha256" in row for row in rows):
            values[f"{kind}_hash"] = _digest(f"{row['name']} {row[f'{kind}_sha256']}" for row in rows)
    has_passes = any(row["name"] in PASSES for row in rows)
    for gate, kernels in SHOWN_BY.items():
        showing = (row for row in rows if row["name"] in kernels and _must_show(gate, row, has_passes=has_passes))
        shown = {row.get(gate, UNPROVED) for row in showing}
        if shown:
            values[gate] = shown.pop() if len(shown) == 1 else "mixed"
    if any(row["name"] in WALKS for row in rows):
        values |= {"lane": Lane.CUDA.value, "schedule": _schedule(rows)}
    return {ScanFact.of(name): value for name, value in values.items()}


def _must_show(gate: str, row: Row, *, has_passes: bool) -> bool:
    """Return whether the kernel of this row can show the gate.

    The source does not show whether float instructions flush denormal numbers. Without a kernel that passes states on
    there are no super-chunks. A walk of one chunk loads none ahead.
    """
    if gate == "fast_math":
        return row["read_from"] == "sass"
    if gate == "superchunk":
        return has_passes
    one_chunk = "superchunk" in row and row["superchunk"] == row.get("chunk_size")
    return not (gate == "pipeline_stages" and one_chunk)


def _schedule(rows: Iterable[Row]) -> str:
    """Return the schedule: chunk_parallel with states passed between super-chunks, sequential with one walk per row."""
    walks = {row.get("super_chunks", UNPROVED) for row in rows if row["name"] in WALKS}
    passes = {row.get("super_chunks", UNPROVED) for row in rows if row["name"] in PASSES}
    if not passes:
        return "sequential" if walks == {1} else "mixed"
    return "chunk_parallel" if walks == passes and len(walks) == 1 and UNPROVED not in walks else "mixed"


def _digest(parts: Iterable[str]) -> str:
    return sha256("\n".join(sorted(parts)).encode()).hexdigest()


def _stored(name: str, kernel: Any) -> Row:
    """Return the kernel's row from the file beside its code. Creates the file if it is absent or outdated."""
    folder = getattr(kernel, "_tilelang_cache_path", None)
    if folder is None or not Path(folder).is_dir():
        raise KernelError(
            f"kernel '{name}' cannot be attested: its code is not in TileLang's cache; is TILELANG_DISABLE_CACHE set?"
        )
    path = Path(folder) / "attestation.json"
    stored = _row_in(path)
    if stored is not None and (stored["read_from"] == "sass" or disassembler() is None):
        return {**stored, "name": name}
    row = _read(name, Path(folder), kernel)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json", delete=False, encoding="utf-8") as file:
        json.dump({"reader": READER, "row": row}, file, indent=1)
    Path(file.name).replace(path)
    return row


def _row_in(path: Path) -> Row | None:
    """Return the row that this version stored in `path`, None without one or from a damaged file."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        row: Row = stored["row"] | {"read_from": stored["row"]["read_from"]}
        return row if stored["reader"] == READER else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
    """Return a row from generated CUDA source and its launch code. The kernel's grid has `axes` axes."""
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
    """Return the path of `cuobjdump` on PATH, beside nvcc or in its Python package, or None."""
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
        process = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False, timeout=120
        )
    if process.returncode != 0:
        raise KernelError(f"{' '.join(command[:-1])} failed: {process.stderr.strip() or process.stdout.strip()}")
    return process.stdout


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
    """Return the gates that this kernel shows.

    `aggressive_smem_merge` is read from the kernel's compiler options, because its code looks like the compiler's
    ordinary merging. The hashes show whether it changed the code.
    """
    gates: Row = {
        "tma": False if row["tma_loads"] == 0 else True if row["cp_async"] == 0 else "mixed",
        "warp_specialize": roles(source) > 1,
        "psiv_cache": bool(re.search(r"__global__[^{;]*\bpsiv(?:_desc)?\b", source)),
    }
    ahead = chunks_ahead(source)
    if ahead is not None:
        gates["pipeline_stages"] = ahead
    if "arithmetic" in row:  # with fast math every float instruction flushes denormal numbers, without it none
        flushing, arithmetic = row.pop("flushing"), row.pop("arithmetic")
        gates["fast_math"] = "mixed" if 0 < int(flushing) < int(arithmetic) else flushing == arithmetic
    options = {str(key): value for key, value in (kernel.adapter.pass_configs or {}).items()}
    gates["aggressive_smem_merge"] = bool(options.get("tl.enable_aggressive_shared_memory_merge", False))
    ranks = _staging_ranks(program)
    if ranks:
        gates["layout_2d"] = ranks == {2}
    dtypes = operand_dtypes(program)
    if dtypes:
        gates["dtype"] = dtypes.pop() if len(dtypes) == 1 else "mixed"
    tokens, chunks = _tokens_loaded(program), chunks_walked(source)
    if len(tokens) == 1:
        gates["chunk_size"] = tokens.pop()
        gates |= {} if chunks is None else {"superchunk": int(gates["chunk_size"]) * chunks}
    return gates


def _loads(program: str) -> Iterator[tuple[str, int, str]]:
    """Yield (tensor, tokens, buffer) of every load of q, k, v, z or the gradient of o in a TileLang program.

    Tokens are the second dimension of a tensor, and the third of a view by ranks, which has five dimensions. A view's
    memory gives the name of its buffer. The last definition of a view before the load counts.
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
    """Return the tokens per load of q, k, v, z or the gradient of o in a TileLang program."""
    return {tokens for _, tokens, _ in _loads(program)}


def operand_dtypes(program: str) -> set[str]:
    """Return the dtypes of the buffers q, k, v and z of a TileLang program. Its launcher refuses other tensors."""
    dtypes = re.findall(r"\b(?:q|k|v_?|z) = T\.match_buffer\(\w+, \([^()]*\)(?:, \"(\w+)\")?", program)
    return {dtype or "float32" for dtype in dtypes}


def _staging_ranks(program: str) -> set[int]:
    """Return the numbers of dimensions of the shared buffers for loads of q and k in a TileLang program."""
    buffers = re.findall(r"\b(\w+) = T\.\w*alloc_buffer\(\(([\d, ]+)\)(?:.*?\bdata=(\w+))?", program)
    shapes = {name: shape for buffer, shape, memory in buffers for name in (buffer, memory)}
    targets = {buffer for tensor, _, buffer in _loads(program) if tensor in {"q", "k"}}
    return {len([size for size in shapes[name].split(",") if size.strip()]) for name in targets}

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

from kernels.errors import KernelError
from kernels.facts import Fact
from kernels.scan import ScanFact

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

CALLS: dict[str, str] = {
    "tma_loads": r"\btl::tma_load\w*",
    "tma_stores": r"\btl::tma_(?:store|reduce)\w*\((?!\))",
    "cp_async": r"\btl::cp_async_gs\w*",
    "wgmma": r"\btl::wgmma_[rs]s\b",
    "mma": r"\btl::mma_sync\b",
    "mbarrier": r"\.(?:wait|arrive\w*|expect_transaction|init)\(",
    "register_reallocations": r"\btl::warpgroup_reg_(?:alloc|dealloc)\b",
    "barriers": r"\b__syncthreads\(|\b__sync_thread_partial\b|\bbar\.sync\b",
}
"""Name of a count -> what it looks like in generated CUDA source."""

WALKS = ("local_states", "outputs", "local_gradients", "chunk_states", "gradients")
"""Kernels that walk the chunks of a super-chunk: the ones that the gates change."""

SHOWN_BY: dict[str, tuple[str, ...]] = {
    "tma": WALKS,
    "layout_2d": WALKS,
    "pipeline_stages": WALKS,
    "warp_specialize": WALKS,
    "aggressive_smem_merge": ("gradients",),
    "fast_math": WALKS,
    "psiv_cache": ("outputs", "gradients"),
}
"""Gate -> kernels that must all show it."""

LOADS = re.compile(rf"{CALLS['tma_loads']}|{CALLS['cp_async']}")
WAIT = re.compile(r"\.wait\(|\bcp_async_wait\b")
EM_CUDA = 190
ELF = b"\x7fELF"
READER = sha256(Path(__file__).read_bytes()).hexdigest()
"""Digest of this module: a stored row of another reader is made again."""


def table(kernels: Mapping[str, Any]) -> tuple[Row, ...]:
    """Return one row for each compiled kernel, from a mapping of its name in `compiled.KERNELS`.

    Raises KernelError when TileLang's cache is switched off, because the compiled code is read from there.
    """
    return tuple(_stored(name, kernel) for name, kernel in kernels.items())


def facts(rows: Iterable[Row]) -> dict[str, Fact]:
    """Return what the rows of one pass (forward or backward) say about the gates, by the names of `ScanFact`.

    A gate is taken from the kernels that can show it: their common value, or "mixed" where they differ; recording the
    facts of both passes under one name does the same across them. What no row can tell is left out. `source_hash` is
    that of the generated CUDA, `binary_hash` that of the instructions, which alone changes with `fast_math`. Both
    differ between the passes.
    """
    rows = tuple(rows)
    found: dict[str, Fact] = {"attested_from": "+".join(sorted({str(row["read_from"]) for row in rows}))}
    for kind in ("source", "binary"):
        if all(f"{kind}_sha256" in row for row in rows):
            found[f"{kind}_hash"] = _digest(f"{row['name']} {row[f'{kind}_sha256']}" for row in rows)
    for gate, kernels in SHOWN_BY.items():
        values = {row[gate] for row in rows if gate in row and row["name"] in kernels}
        if values:
            found[gate] = values.pop() if len(values) == 1 else "mixed"
    return {ScanFact.of(name): value for name, value in found.items()}


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
    source = (folder / "device_kernel.cu").read_text(encoding="utf-8")
    row: Row = {"name": name, **_from_source(source, (folder / "host_kernel.cu").read_text(encoding="utf-8"))}
    tool = disassembler()
    if tool is not None:
        code = cubin((folder / "executable.so").read_bytes())
        static = _from_machine_code(_disassembled(tool, code))
        row |= {**static, "read_from": "sass", "shared_bytes": int(row["shared_bytes"]) + int(static["shared_bytes"])}
    return row | _gates(row, source, kernel)


def _from_source(source: str, host: str) -> Row:
    """Read what generated CUDA source and its launch code say."""
    bounds = re.search(r"__launch_bounds__\((\d+)", source)
    launch = re.findall(r"\.v_int64\) = \(\(int64_t\)(\d+)\);", host)
    if bounds is None or not launch:
        raise KernelError("no launch bounds or launch arguments in the generated source: not TileLang 0.1.15's form")
    return {
        "read_from": "source",
        "threads": int(bounds[1]),
        "shared_bytes": int(launch[-1]) if "extern __shared__" in source else 0,
        **{count: len(re.findall(call, source)) for count, call in CALLS.items()},
        "source_sha256": sha256(normalised(source).encode()).hexdigest(),
    }


def normalised(source: str) -> str:
    """Return generated source without what differs between two compilations of one program: workspace numbers."""
    return re.sub(r"\bworkspace_\d+\b", "workspace", source)


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


def _gates(row: Row, source: str, kernel: Any) -> Row:
    """Return the gates as this kernel shows them; absent where it cannot.

    Only `aggressive_smem_merge` is read from the compiler options of the kernel: nothing else tells it from the merging
    that the compiler does anyway. Whether it changed anything is for the hashes to say.
    """
    seen: Row = {
        "tma": int(row["tma_loads"]) > 0,
        "warp_specialize": roles(source) > 1,
        "psiv_cache": bool(re.search(r"__global__[^{;]*\bpsiv(?:_desc)?\b", source)),
    }
    ahead = chunks_ahead(source)
    if ahead is not None:
        seen["pipeline_stages"] = ahead
    if "arithmetic" in row:  # without fast math every float instruction keeps denormal numbers
        seen["fast_math"] = 2 * int(row.pop("flushing")) > int(row.pop("arithmetic"))
    options = {str(key): value for key, value in (kernel.adapter.pass_configs or {}).items()}
    seen["aggressive_smem_merge"] = bool(options.get("tl.enable_aggressive_shared_memory_merge", False))
    ranks = _staging_ranks(kernel.adapter.prim_func.script())
    if ranks:
        seen["layout_2d"] = ranks == {2}
    return seen


def _staging_ranks(program: str) -> set[int]:
    """Return the numbers of dimensions of the shared buffers that q and k are loaded into, in a TileLang program."""
    targets = set(re.findall(r"(?:tma|async)_copy\(T\.region\([qk]\[[^\n]*?T\.region\((\w+)\[", program))
    shapes = dict(re.findall(r"\b(\w+) = T\.\w*alloc_buffer\(\(([\d, ]+)\)", program))
    return {len([size for size in shapes[name].split(",") if size.strip()]) for name in targets}


def roles(source: str) -> int:
    """Return how many warp groups do different work: branches on the thread that each wait at mbarriers; 1 for none."""
    most, open_ifs = 1, list[tuple[int, list[bool]]]()
    for line in source.splitlines():
        text = line.lstrip()
        indent = len(line) - len(text)
        open_ifs = [(at, arms) for at, arms in open_ifs if at < indent or text.startswith("} else")]
        if text.startswith("if (") and "threadIdx.x" in text:
            open_ifs.append((indent, [False]))
        elif text.startswith("} else") and open_ifs and open_ifs[-1][0] == indent:
            open_ifs[-1][1].append(False)
        elif ".wait(" in text:
            for _, arms in open_ifs:
                arms[-1] = True
        most = max([most, *(sum(arms) for _, arms in open_ifs)])
    return most


def chunks_ahead(source: str) -> int | None:
    """Return how many chunks' loads are started before a walk's loop, from generated source; None where none are.

    The loads that the loop starts for one chunk stand before it once for each chunk ahead, or in a loop of their own
    without waits. A role that only loads runs ahead by the slots of its ring, the barriers that its loads report to;
    loads that report to a barrier for each kind of tile have no single depth, which is None too.
    """
    if roles(source) > 1:
        return _ring(source)
    before = inside = 0
    for trips, lines in _outer_loops(source):
        loads = sum(len(LOADS.findall(line)) for line in lines)
        if trips is None or not any(WAIT.search(line) for line in lines):
            before += loads * (trips or 1)
        else:
            inside += loads
    return before // inside if inside else None


def _ring(source: str) -> int | None:
    sizes = {name: int(size) for name, size in re.findall(r"uint64_t (\w+)_mem\[(\d+)\]", source)}
    loads = [line for line in source.splitlines() if re.search(CALLS["tma_loads"], line)]
    reports = {pair for line in loads for pair in re.findall(r"\b(\w+)\[([^\]]*)\]", line) if pair[0] in sizes}
    found = {sizes[name] for name, index in reports if sizes[name] == 1 or not index.isdigit()}
    mixed = any(sizes[name] > 1 and index.isdigit() for name, index in reports)
    return found.pop() if len(found) == 1 and not mixed else None


def _outer_loops(source: str) -> Iterator[tuple[int | None, list[str]]]:
    """Yield the lines of every outermost loop that is not unrolled with its constant number of trips, 1 if it has none.

    Lines outside of such loops come one by one, with None. Blocks are read from the indentation.
    """
    body: list[str] = []
    trips, start, unrolled = 1, -1, False
    for line in source.splitlines():
        text = line.lstrip()
        indent = len(line) - len(text)
        if start >= 0 and text.startswith("}") and indent <= start:
            yield trips, body
            body, start = [], -1
        elif start >= 0:
            body.append(line)
        elif text.startswith("for (") and not unrolled:
            bound = re.search(r"< (\d+);", text)
            trips, start = int(bound[1]) if bound else 1, indent
        else:
            yield None, [line]
        unrolled = text.startswith("#pragma unroll")

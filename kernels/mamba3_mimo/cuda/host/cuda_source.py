"""Properties of a kernel in the CUDA source that TileLang generates: calls, roles, loops, loads.

This module imports neither torch nor tilelang.
"""

import re
from collections.abc import Iterator

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
"""Name of a count -> regular expression of one call in generated CUDA source."""

LOADS = re.compile(rf"{CALLS['tma_loads']}|{CALLS['cp_async']}")
WAIT = re.compile(r"\.wait\(|\bcp_async_wait\b")


def normalised(source: str) -> str:
    """Return generated source without workspace numbers, which differ between compilations of one program."""
    return re.sub(r"\bworkspace_\d+\b", "workspace", source)


def roles(source: str) -> int:
    """Return how many warp groups have different roles: branches on the thread that wait at mbarriers; 1 for none."""
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


def chunks_walked(source: str) -> int | None:
    """Return how many chunks a block of a walk takes, from generated source. The last block may take fewer.

    A loop over chunks waits for the loads of each chunk. None if only run time sets its trips. A walk of one chunk has
    no loop. A block with several heads in turn repeats the loop for each head.
    """
    bounds = [bound for bound, lines in _outer_loops(source) if bound and any(WAIT.search(line) for line in lines)]
    if not bounds:
        return 1 if WAIT.search(source) else None
    matches = [re.fullmatch(r"(?:min\()?(\d+)(?:,.*)?|\(?in_turn(?: \* (\d+)\))?", bound) for bound in bounds]
    return min((int(match[1] or match[2] or 1) for match in matches if match), default=None)


def chunks_ahead(source: str) -> int | None:
    """Return how many chunks are loaded ahead of a walk's loop, from generated source; None if there is no loop.

    The loads of one turn of the loop appear before it once per chunk ahead, or in a loop of their own without waits. A
    role that only loads runs ahead by the slots of its ring, the barriers of its loads. Loads with a barrier per kind
    of tile have no single depth, which is also None.
    """
    if roles(source) > 1:
        return _ring(source)
    before = inside = 0
    for bound, lines in _outer_loops(source):
        loads = sum(len(LOADS.findall(line)) for line in lines)
        if bound is None or not any(WAIT.search(line) for line in lines):
            before += loads * (int(bound) if bound and bound.isdigit() else 1)
        else:
            inside += loads
    return before // inside if inside else None


def _ring(source: str) -> int | None:
    sizes = {name: int(size) for name, size in re.findall(r"uint64_t (\w+)_mem\[(\d+)\]", source)}
    loads = [line for line in source.splitlines() if re.search(CALLS["tma_loads"], line)]
    reports = {pair for line in loads for pair in re.findall(r"\b(\w+)\[([^\]]*)\]", line) if pair[0] in sizes}
    depths = {sizes[name] for name, index in reports if sizes[name] == 1 or not index.isdigit()}
    mixed = any(sizes[name] > 1 and index.isdigit() for name, index in reports)
    return depths.pop() if len(depths) == 1 and not mixed else None


def _outer_loops(source: str) -> Iterator[tuple[str | None, list[str]]]:
    """Yield (bound, lines) of every outermost loop that is not unrolled.

    Lines outside such loops come one by one, with None. The indentation defines the blocks.
    """
    body: list[str] = []
    bound, start, unrolled = "", -1, False
    for line in source.splitlines():
        text = line.lstrip()
        indent = len(line) - len(text)
        if start >= 0 and text.startswith("}") and indent <= start:
            yield bound, body
            body, start = [], -1
        elif start >= 0:
            body.append(line)
        elif text.startswith("for (") and not unrolled:
            bound, start = text.split(" < ", 1)[-1].split(";")[0], indent
        else:
            yield None, [line]
        unrolled = text.startswith("#pragma unroll")

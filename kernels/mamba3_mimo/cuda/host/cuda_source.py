"""What the CUDA source that TileLang generates says about a kernel: its calls, its roles, its loops, its loads.

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
"""Name of a count -> what it looks like in generated CUDA source."""

LOADS = re.compile(rf"{CALLS['tma_loads']}|{CALLS['cp_async']}")
WAIT = re.compile(r"\.wait\(|\bcp_async_wait\b")


def normalised(source: str) -> str:
    """Return generated source without what differs between two compilations of one program: workspace numbers."""
    return re.sub(r"\bworkspace_\d+\b", "workspace", source)


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


def chunks_walked(source: str) -> int | None:
    """Return how many chunks the blocks of a walk take, from generated source; the last block may take fewer.

    A loop over chunks waits for the loads of each; None when its trips are known at run time only. A walk of one chunk
    has no loop. A block that takes several heads in turn goes round as often for each of them.
    """
    bounds = [bound for bound, lines in _outer_loops(source) if bound and any(WAIT.search(line) for line in lines)]
    if not bounds:
        return 1 if WAIT.search(source) else None
    found = [re.fullmatch(r"(?:min\()?(\d+)(?:,.*)?|\(?in_turn(?: \* (\d+)\))?", bound) for bound in bounds]
    return min((int(match[1] or match[2] or 1) for match in found if match), default=None)


def chunks_ahead(source: str) -> int | None:
    """Return how many chunks' loads are started before a walk's loop, from generated source; None where none are.

    The loads that the loop starts for one chunk stand before it once for each chunk ahead, or in a loop of their own
    without waits. A role that only loads runs ahead by the slots of its ring, the barriers that its loads report to;
    loads that report to a barrier for each kind of tile have no single depth, which is None too.
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
    found = {sizes[name] for name, index in reports if sizes[name] == 1 or not index.isdigit()}
    mixed = any(sizes[name] > 1 and index.isdigit() for name, index in reports)
    return found.pop() if len(found) == 1 and not mixed else None


def _outer_loops(source: str) -> Iterator[tuple[str | None, list[str]]]:
    """Yield the lines of every outermost loop that is not unrolled, with the bound of its variable.

    Lines outside of such loops come one by one, with None. Blocks are read from the indentation.
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

"""Run TileLang programs on a CPU, without compiling them: the printed program executed with numpy, in float64.

A printed TileLang program is Python. Here it is executed with another meaning of `T`: all threads of a block at once,
one per row of the first axis of every thread-dependent value; each parallel loop adds an axis; an `if` becomes a mask.
Numbers are never rounded, so a kernel can be compared with the reference far more closely than in bfloat16.

What it finds beyond wrong arithmetic and indices: reading a buffer that nothing wrote (buffers start as NaN), reading a
tile before the wait for its copy (a copy in flight leaves NaN), threads that write different values to one place,
indices out of bounds, and barriers that nobody completes. What it cannot find: anything about layouts, registers,
memory order, or missing synchronisation between threads of one role.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("greenlet", reason="threads of an interpreted kernel are greenlets, and greenlet is not installed")
from greenlet import getcurrent, greenlet

from tests.kernels.open_sizes import sizes
from tests.kernels.tile_program import executable
from tests.kernels.tile_registers import (
    Descriptor,
    Pointer,
    TensorMap,
    accumulate,
    from_registers,
    load_matrices,
    store_matrices,
)

AXES = 6
"""Of every value that is not one number: threads, then up to five nested parallel loops."""

OF_NUMPY = (
    *("exp2", "exp", "tanh", "cos", "sin", "floor", "sqrt", "log2", "fabs"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
)
MATH: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in OF_NUMPY},
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "min": np.minimum,
    "max": np.maximum,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
}
NOTHING_TO_DO = {
    "fence_proxy_async", "reads", "set_max_nreg", "writes", "warpgroup_arrive", "warpgroup_fence_operand",
    "warpgroup_commit_batch", "warpgroup_wait", "wait_wgmma", "no_set_max_nreg", "annotate_producer_reg_dealloc",
    "annotate_consumer_reg_alloc", "ptx_fence_barrier_init", "ptx_commit_group", "tma_store_arrive", "tma_store_wait",
}  # fmt: skip
"""Calls about time and registers: here every statement is finished before the next one starts."""
MAP_AXES = 5
"""Most axes of a tensor map, what the copy engine knows a tensor by unless it copies one stretch of memory."""


class ProgramError(AssertionError):
    """The program did something that has no defined result."""


class Buffer:
    """Memory of one block, or a tensor. `scope` local: one copy per thread."""

    def __init__(self, machine: "Machine", name: str, data: Any, *, local: bool = False) -> None:
        self.machine, self.name, self.data, self.local = machine, name, data, local

    def _places(self, index: Any) -> list[Any]:
        index = list(index) if isinstance(index, tuple) else [index]
        return [self.machine.lanes, *index] if self.local else index

    def __getitem__(self, index: Any) -> Any:
        places = [np.asarray(i) for i in self._places(index)]
        mask = self.machine.mask
        for place, size in zip(places, self.data.shape, strict=True):
            outside = (place < 0) | (place >= size)
            if np.any(outside if mask is None else outside & mask):
                raise ProgramError(f"{self.name}: reads index {place[outside].flat[0]} of {size}")
        values = self.data[tuple(np.clip(p, 0, n - 1) for p, n in zip(places, self.data.shape, strict=True))]
        return _same_for_all_threads(values)

    def __setitem__(self, index: Any, value: Any) -> None:
        places, value = self._written(index, value)
        self.data[places] = value
        if not np.array_equal(self.data[places], value, equal_nan=True):
            raise ProgramError(f"{self.name}: one place is written twice in one statement, with different values")

    def add(self, index: Any, value: Any) -> None:
        """Add to elements. A thread may hold several rows that it adds to one element of an accumulator."""
        if self.name == "local.fragment":
            places, value = self._written(index, value)
            np.add.at(self.data, places, value)
        else:
            self[index] = self[index] + value

    def _written(self, index: Any, value: Any) -> tuple[tuple[Any, ...], Any]:
        """Return the places and the values of those threads and iterations that execute now."""
        places, value, mask = [np.asarray(i) for i in self._places(index)], np.asarray(value), self.machine.mask
        if mask is not None and all(a.ndim == 0 or a.shape[0] == 1 for a in (*places, value)):
            mask = mask.any(axis=0, keepdims=True)
        shape = np.broadcast_shapes(*(a.shape for a in (*places, value)), () if mask is None else mask.shape)
        *places, value = (np.broadcast_to(a, shape) for a in (*places, value))
        if mask is not None:
            chosen = np.broadcast_to(mask, shape)
            *places, value = (a[chosen] for a in (*places, value))
        for place, size in zip(places, self.data.shape, strict=True):
            if np.any((place < 0) | (place >= size)):
                raise ProgramError(f"{self.name}: writes outside of {self.data.shape}")
        return tuple(places), value


def _same_for_all_threads(value: Any) -> Any:
    if value.ndim == 0:
        return value[()]
    first = value[:1]
    return first if value.shape[0] > 1 and np.array_equal(np.broadcast_to(first, value.shape), value) else value


class Handle:
    """The address of a buffer that is allocated after it was named."""

    buffer: Any = None


class Barrier:
    """An mbarrier: phases end when `count` threads have arrived; copies in flight land for whoever waits."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.phase = count, 0, 0
        self.flying: dict[int, list[Callable[[], None]]] = defaultdict(list)

    def arrive(self, threads: int) -> None:
        """Count threads in; the last one ends the phase."""
        self.arrived += threads
        if self.arrived > self.count:
            raise ProgramError(f"{self.arrived} threads arrive at a barrier for {self.count}")
        if self.arrived == self.count:
            self.arrived, self.phase = 0, self.phase + 1

    def land(self) -> None:
        """Let the copies of ended phases arrive."""
        for phase in [phase for phase in self.flying if phase < self.phase]:
            for copy in self.flying.pop(phase):
                copy()


class Machine:
    """The meaning of `T` while one program runs."""

    def __init__(self, threads: int) -> None:
        self.lanes = np.arange(threads).reshape(-1, *[1] * (AXES - 1))
        self.mask: Any = None
        """Threads (and iterations of parallel loops) that execute now; None for all."""
        self.depth = 0
        self.counts: dict[Any, Any] = {}
        self.groups: list[Callable[[], None]] = []
        """Copies by cp.async in flight, in the order of their start."""
        self.named: dict[Any, Barrier] = {}

    def __getattr__(self, name: str) -> Any:
        if name in MATH:
            return MATH[name]
        if name in NOTHING_TO_DO:
            return lambda *_, **__: None
        raise ProgramError(f"the interpreter does not know T.{name}")

    # --- programs, memory, blocks

    def prim_func(self, function: Any) -> Any:
        return function

    def match_buffer(self, handle: Any, shape: Any, dtype: str = "float32", **_: Any) -> Buffer:
        shape = shape if isinstance(shape, tuple) else (shape,)
        if handle.shape != shape:
            raise ProgramError(f"a tensor has shape {handle.shape}; the program takes {shape}")
        return Buffer(self, f"tensor{shape}", handle)

    def handle(self, *_: Any) -> Any:
        return Handle()

    def func_attr(self, _: Any) -> None:
        """Ignore what is said to the compiler."""

    evaluate = func_attr

    def assume(self, holds: Any) -> None:
        """Check what the compiler may assume."""
        if not np.all(holds):
            raise ProgramError("an assumption of the program does not hold")

    def sblock(self, *_: Any) -> Any:
        return nullcontext()

    attr = sblock

    def sblock_attr(self, attributes: dict[str, Any]) -> None:
        """Begin a block: its first statement tells the counts of its barriers."""
        self.counts = attributes.get("barrier_init", self.counts)
        self.groups, self.named = [], {}

    def Buffer(self, shape: Any, *_: Any, data: Any, strides: Any, **__: Any) -> "Buffer":  # noqa: N802
        """Return memory under another shape, its dimensions perhaps in another order."""
        whole = data.buffer.data if isinstance(data, Handle) else data
        return Buffer(self, "view", np.ndarray(shape, whole.dtype, whole, 0, [n * whole.itemsize for n in strides]))

    def launch_thread_idx(self, axis: int) -> Any:
        return self.lanes if axis == 0 else 0

    def thread_binding(self, extent: int, **_: Any) -> range:
        return range(extent)

    def sblock_alloc_buffer(
        self, shape: Any, dtype: str = "float32", *, data: Any = None, scope: str = "global"
    ) -> Any:
        shape = shape if isinstance(shape, tuple) else (shape,)
        if scope == "shared.barrier":
            return [Barrier(int(count)) for count in self.counts[data]]
        if scope == "local.descriptor.wgmma":
            return Descriptor()
        local = scope in {"local", "local.var"}
        size = (self.lanes.shape[0], *shape) if local else shape
        fresh = np.full(size, np.nan) if "float" in dtype else np.zeros(size, dtype=np.int64)
        buffer = Buffer(self, scope, fresh, local=local)
        if data is not None:
            data.buffer = buffer
        return buffer

    # --- control

    def unroll(self, *bounds: Any, **_: Any) -> Iterator[Any]:
        return self.serial(*bounds)

    def serial(self, *bounds: Any, **_: Any) -> Iterator[Any]:
        """Iterate in order; an extent that differs between threads masks those that are done."""
        start, stop = (0, bounds[0]) if len(bounds) == 1 else bounds
        for i in range(int(np.min(start)), int(np.max(stop))):
            inside = None if np.ndim(start) == np.ndim(stop) == 0 else (i >= start) & (i < stop)
            with self.only(inside):
                yield i

    def parallel(self, extent: int, **_: Any) -> Iterator[Any]:
        """Run all iterations at once, along an axis of their own."""
        self.depth += 1
        shape = [1] * AXES
        shape[self.depth] = extent
        yield np.arange(extent).reshape(shape)
        self.depth -= 1

    vectorized = parallel

    @contextmanager
    def only(self, condition: Any) -> Iterator[None]:
        """Execute the block for those of the current threads and iterations for which `condition` holds."""
        before = self.mask
        if condition is not None:
            self.mask = condition if before is None else before & condition
        yield
        self.mask = before

    def branches(self, condition: Any) -> Iterator[bool]:
        """Yield True for those for which the condition holds, then False for the others: each where there are any."""
        if np.ndim(condition) == 0:
            yield bool(condition)
            return
        for holds in (True, False):
            with self.only(condition == holds):
                if self.mask.any():
                    yield holds

    def choose(self, condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """Return the value of one of two expressions; each is computed only where it is taken."""
        if np.ndim(condition) == 0:
            return yes() if condition else no()
        with self.only(condition):
            taken = yes()
        with self.only(~condition):
            other = no()
        return np.where(condition, taken, other)

    def roles(self, condition: Any, yes: Callable[[], None], no: Callable[[], None]) -> None:
        """Run two branches that wait for each other: as threads of control that change at waits."""
        if np.ndim(condition) == 0:
            (yes if condition else no)()
            return
        outer_mask, outer_depth = self.mask, self.depth
        masks = [condition if outer_mask is None else outer_mask & condition,
                 ~condition if outer_mask is None else outer_mask & ~condition]  # fmt: skip
        alive = [_Role(self, body, mask) for body, mask in zip((yes, no), masks, strict=True) if mask.any()]
        while alive:
            ready = [role for role in alive if role.ready()]
            for role in ready:
                role.resume()
            self.mask, self.depth = outer_mask, outer_depth
            if not ready:
                self.block(partial(_any_ready, tuple(alive)))
            alive = [role for role in alive if not role.thread.dead]

    def block(self, ready: Callable[[], bool]) -> None:
        """Return when `ready()` holds, letting other roles run meanwhile."""
        if ready():
            return
        parent = getcurrent().parent
        if parent is None or not isinstance(getcurrent(), _Thread):
            raise ProgramError("deadlock: a wait that nothing can end")
        saved = self.mask, self.depth
        while not ready():
            getcurrent().waits_for = ready
            parent.switch()
            self.mask, self.depth = saved

    def active(self) -> int:
        """Return how many threads execute now."""
        return int(self._chosen().sum())

    # --- barriers and copies in flight

    def ptx_arrive_barrier(self, barrier: Barrier) -> None:
        barrier.arrive(self.active())

    def mbarrier_wait_parity(self, barrier: Barrier, parity: Any) -> None:
        self.block(lambda: barrier.phase % 2 != int(parity))
        barrier.land()

    def tvm_storage_sync(self, _: str, name: Any = None, threads: Any = None) -> None:
        """Wait for the other threads of the block, or for `threads` of them at a named barrier."""
        everyone = self.lanes.shape[0]
        if self.active() == (threads or everyone):
            return
        barrier = self.named.setdefault(name, Barrier(int(threads or everyone)))
        phase = barrier.phase
        barrier.arrive(self.active())
        self.block(lambda: barrier.phase > phase)

    def tma_copy(self, source: Any, target: Any, barrier: Any = None, **_: Any) -> None:
        if any(part.ndim > MAP_AXES and not part.flags.c_contiguous for part in (source, target)):
            raise ProgramError(
                f"a bulk copy {source.shape} -> {target.shape}: a tensor map has {MAP_AXES} axes at most"
            )
        if barrier is None:
            self.copy(source, target)
        else:
            barrier.flying[barrier.phase].append(_in_flight(source, target))

    def async_copy(self, source: Any, target: Any, **_: Any) -> None:
        self.groups.append(_in_flight(source, target))

    def ptx_wait_group(self, most: Any) -> None:
        while len(self.groups) > int(most):
            self.groups.pop(0)()

    def create_tma_descriptor(self, _: int, rank: int, tensor: Any, *rest: Any) -> TensorMap:
        """Return what names a box of a tensor; sizes are given innermost first."""
        shape, box = rest[:rank], rest[2 * rank : 3 * rank]
        if rank > MAP_AXES:
            raise ProgramError(f"a tensor map of {rank} axes: {MAP_AXES} at most")
        if tuple(reversed(shape)) != tensor.shape:
            raise ProgramError(f"a tensor map of shape {shape}, innermost first, of a tensor {tensor.shape}")
        return TensorMap(tensor, tuple(reversed(box)))

    def tma_store(self, where: TensorMap, source: Pointer, *rest: Any) -> None:
        """Add a box of a tile to one of a tensor; only the one thread that issues it counts."""
        *at, adds, _ = rest
        if self.active() != 1 or not adds:
            raise ProgramError("a bulk reduction is issued once, and adds")
        tile = source.rows(*where.box[-2:])
        self.copy(where.part(tuple(reversed(at))) + tile.reshape(where.box), where.part(tuple(reversed(at))))

    def tl_shuffle_elect(self, threads: int) -> Any:
        """Choose one of the first threads."""
        return (self.lanes == 0) & (threads > 0)

    # --- tiles

    def region(self, buffer: Buffer, start: Any, access: int, *extents: int) -> Any:
        starts = [int(np.asarray(at).reshape(())) for at in start]
        for at, extent, size in zip(starts, extents, buffer.data.shape, strict=True):
            if at < 0 or at + extent > size:
                raise ProgramError(f"{buffer.name}: a region [{at}, {at + extent}) of {size}")
        return buffer.data[tuple(slice(at, at + n) for at, n in zip(starts, extents, strict=True))]

    def copy(self, source: Any, target: Any, **_: Any) -> None:
        target[...] = source.reshape(target.shape)

    def fill(self, target: Any, value: Any) -> None:
        target[...] = value

    def gemm(self, a: Any, b: Any, c: Any, turn_a: bool, turn_b: bool, *rest: Any, **_: Any) -> None:
        clear = rest[4]  # after the three sizes and the warp policy
        a, b = (x.reshape(x.shape[-2:]) for x in (a, b))
        product = (a.T if turn_a else a) @ (b.T if turn_b else b)
        c[...] = product.reshape(c.shape) if clear else c + product.reshape(c.shape)

    wgmma_gemm = gemm

    def reduce(self, source: Any, target: Any, kind: str, axis: int, clear: bool, *_: Any, **__: Any) -> None:
        if kind != "sum":
            raise ProgramError(f"the interpreter does not know the reduction '{kind}'")
        total = source.sum(axis=axis).reshape(target.shape)
        target[...] = total if clear else target + total

    def cumsum(self, source: Any, target: Any, axis: int, reverse: bool) -> None:
        turned = np.flip(source, axis) if reverse else source
        total = np.cumsum(turned, axis=axis)
        target[...] = np.flip(total, axis) if reverse else total

    # --- registers of the matrix unit

    def access_ptr(self, buffer: Buffer, index: Any, *_: Any) -> Pointer:
        return Pointer(buffer, index)

    def type_annotation(self, _: str) -> None:
        """Ignore the type of an address."""

    def tvm_access_ptr(self, _: Any, handle: Handle, offset: int, *__: Any) -> Any:
        if offset != 0:
            raise ProgramError(f"an address {offset} behind the start of a buffer: only its start is known")
        return handle.buffer.data

    def initialize_wgmma_descriptor(self, descriptor: Descriptor, tile: Any, _: int, __: int, stride: int) -> None:
        descriptor.begin(tile, stride)

    def increase_descriptor_offset(self, descriptor: Descriptor, distance: Any) -> None:
        descriptor.offset += int(distance)

    def call_extern(self, _: str, name: str, numbers: Pointer) -> Any:
        """Return two numbers that a register holds."""
        if name != "word":
            raise ProgramError(f"the interpreter does not know the function '{name}'")
        (first,) = numbers.index
        lanes = np.arange(numbers.data.shape[0]).reshape(self.lanes.shape)
        return numbers.data[lanes, first], numbers.data[lanes, first + 1]

    def ptx_ldmatrix(self, turned: bool, count: int, source: Pointer, target: Pointer) -> None:
        load_matrices(source, target, count, turned, self._chosen())

    def ptx_stmatrix(self, turned: bool, count: int, target: Pointer, *rest: Any) -> None:
        store_matrices(target, rest[:count], turned, self._chosen())

    def ptx_wgmma_rs(self, form: str, depth_last: bool, *rest: Any) -> None:
        """Add a product to an accumulator at once; the hardware does so until the next wait."""
        a, a_first, b, offset, c, c_first, keep = rest[3:10]
        for threads, at in self._by_offsets(offset):
            product = from_registers(a, int(a_first), threads) @ b.operand(at[0], _width(form), depth_last=depth_last)
            accumulate(c, int(c_first), threads, product, keep=bool(keep))

    def ptx_wgmma_ss(self, form: str, a_depth_last: bool, b_depth_last: bool, *rest: Any) -> None:
        """Do the same with both operands in shared memory."""
        a, a_offset, b, b_offset, c, c_first, keep = rest[3:10]
        for threads, (left_at, right_at) in self._by_offsets(a_offset, b_offset):
            left = a.operand(left_at, 64, depth_last=a_depth_last).T
            product = left @ b.operand(right_at, _width(form), depth_last=b_depth_last)
            accumulate(c, int(c_first), threads, product, keep=bool(keep))

    def _by_offsets(self, *offsets: Any) -> Iterator[tuple[Any, tuple[int, ...]]]:
        """Yield the threads that execute now, those together that say where in shared memory in the same way."""
        chosen = np.flatnonzero(self._chosen())
        said = np.stack([np.broadcast_to(offset, self.lanes.shape).ravel()[chosen] for offset in offsets], axis=1)
        for at in np.unique(said, axis=0):
            yield chosen[(said == at).all(axis=1)], tuple(int(offset) for offset in at)

    def _chosen(self) -> Any:
        everyone = np.ones(self.lanes.shape, dtype=bool)
        return everyone if self.mask is None else np.broadcast_to(self.mask, self.lanes.shape)

    # --- numbers

    def Cast(self, dtype: str, value: Any) -> Any:  # noqa: N802
        return value if "float" in dtype else np.asarray(value).astype(np.int64)[()]

    def float32(self, value: Any) -> float:
        return float(value)

    float16 = bfloat16 = float64 = float32

    def int32(self, value: Any) -> int:
        return int(value)

    int64 = uint32 = int32

    def bool(self, value: Any) -> bool:
        return bool(value)

    def Select(self, condition: Any, yes: Any, no: Any) -> Any:  # noqa: N802
        return np.where(condition, yes, no)

    def shfl_xor_sync(self, _: int, value: Any, distance: int, __: int) -> Any:
        """Return the value of the thread whose number differs by `distance` in its bits.

        A value without a thread is an element of an accumulator [rows, columns] of the matrix unit, which keeps rows 1,
        2 and 4 apart in threads 4, 8 and 16 apart.
        """
        value = np.asarray(value)
        if value.ndim == 0 or value.shape[0] > 1 or self.depth == 0:
            return self._shuffled(value, lambda thread, _: thread ^ distance)
        if distance not in {4, 8, 16}:
            raise ProgramError(f"a shuffle of an accumulator by {distance}: only rows (4, 8, 16) are known")
        return value[:, np.arange(value.shape[1]) ^ (distance // 4)]

    def shfl_up_sync(self, _: int, value: Any, distance: int, width: int) -> Any:
        return self._shuffled(value, lambda t, at: np.where(at >= distance, t - distance, t), width)

    def shfl_down_sync(self, _: int, value: Any, distance: int, width: int) -> Any:
        return self._shuffled(value, lambda t, at: np.where(at < width - distance, t + distance, t), width)

    def shfl_sync(self, _: int, value: Any, source: Any, width: int) -> Any:
        source = np.broadcast_to(source, self.lanes.shape).ravel()
        return self._shuffled(value, lambda thread, at: thread - at + source % width, width)

    def _shuffled(self, value: Any, source: Callable[[Any, Any], Any], width: int = 32) -> Any:
        """Return the values of the threads `source(thread, its place among `width`)`."""
        value = np.asarray(value)
        if value.ndim == 0 or value.shape[0] == 1:
            return value
        threads = np.arange(value.shape[0])
        return value[source(threads, threads % width)]


class _Thread(greenlet):
    """One role's thread of control."""

    waits_for: Callable[[], bool] | None = None


class _Role:
    def __init__(self, machine: Machine, body: Callable[[], None], mask: Any) -> None:
        self.machine, self.mask, self.depth = machine, mask, machine.depth
        self.thread = _Thread(body)

    def ready(self) -> bool:
        return self.thread.waits_for is None or self.thread.waits_for()

    def resume(self) -> None:
        self.machine.mask, self.machine.depth = self.mask, self.depth
        self.thread.waits_for = None
        self.thread.parent = getcurrent()
        self.thread.switch()


def _any_ready(roles: Iterable[_Role]) -> bool:
    return any(role.ready() for role in roles)


def _width(form: str) -> int:
    return int(form[form.index("n") + 1 : form.index("k")])


def _in_flight(source: Any, target: Any) -> Callable[[], None]:
    """Start a copy: the target is undefined until the returned function is called."""
    landed = source.reshape(target.shape).copy()
    target[...] = np.nan

    def land() -> None:
        target[...] = landed

    return land


def run(program: Any, *arguments: torch.Tensor | int, machine: type[Machine] = Machine) -> None:
    """Run a TileLang program in place on CPU tensors of any float or integer dtype, in the order of its parameters.

    Sizes that the program leaves open are those of the tensors, as the launch code of a compiled kernel finds them.
    """
    text = re.sub(r"^ +[\w, ]+ = T\.int32\(\)(?:, T\.int32\(\))*\n", "", program.script(), flags=re.MULTILINE)
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    numbers = [argument for argument in arguments if isinstance(argument, int)]
    threads = re.search(r'"tl.launch_threads": \[(\d+), 1, 1\]', text)
    assert threads is not None
    space: dict[str, Any] = {"T": machine(int(threads[1])), "metadata": defaultdict(lambda: defaultdict(object))}
    space |= sizes(program, arguments)
    exec(executable(text), space)  # noqa: S102  (the text is our own program, printed)
    function = next(value for name, value in space.items() if isinstance(value, FunctionType))
    arrays = [(t.detach().double() if t.is_floating_point() else t.detach().long()).numpy().copy() for t in tensors]
    with np.errstate(over="ignore", invalid="ignore"):
        function(*arrays, *numbers)
    for tensor, array in zip(tensors, arrays, strict=True):
        tensor.detach().copy_(torch.from_numpy(array))

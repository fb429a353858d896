"""The scan on XLA: one graph per contract, independent of the documents.

A contract holds all that a compiled graph depends on: shapes, dtypes, the present tensors, the tensors that need
gradients, and the switches. Document ids are run-time tensors and not part of it. Both schedules run the products of
chunks.py. chunk_parallel computes all chunks at once and passes the states between them as one product. sequential is
a loop of the graph that carries the state from chunk to chunk. Shape suffixes: see inputs.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ablate.kernels import facts
from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo.inputs import DIFFERENTIABLE, ScanInputs
from ablate.kernels.mamba3_mimo.operands import handed_on
from ablate.kernels.mamba3_mimo.xla.chunks import chunk_outputs, pass_states, pass_states_from, step_state
from ablate.kernels.mamba3_mimo.xla.timeline import Timeline, pad_time, split, timeline
from ablate.kernels.scan_switches import ScanFact, ScanSwitches
from ablate.kernels.xla import device as xla_device
from ablate.kernels.xla.partition import Partition, differentiable

Tensors: TypeAlias = tuple[Tensor, ...]
Run: TypeAlias = Callable[[ScanInputs, Tensors], tuple[Tensor, Tensor]]

IN_TIME = ("q", "k", "v", "z")
"""Tensors [B,S,...] of which a chunk reads its own tokens."""
OF_HEADS = ("q_bias", "k_bias", "psi", "zeta", "phi", "D")
"""Tensors that every chunk reads whole."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Everything that one compiled graph depends on."""

    switches: ScanSwitches
    names: tuple[str, ...]
    """Present tensors, the document ids last."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    need_gradients: tuple[bool, ...]
    angles_cumulated: bool
    return_final_state: bool
    """Whether the scan returns the final state, which may then receive a gradient."""

    @classmethod
    def of(cls, inputs: ScanInputs, switches: ScanSwitches, return_final_state: bool) -> "Contract":
        """Return the contract of `inputs` and `switches`."""
        names = (*inputs.names, *(() if inputs.segment_ids is None else ("segment_ids",)))
        tensors = tuple(getattr(inputs, name) for name in names)
        return cls(
            switches=switches,
            names=names,
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            dtypes=tuple(tensor.dtype for tensor in tensors),
            need_gradients=tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors),
            angles_cumulated=inputs.angles_cumulated,
            return_final_state=return_final_state,
        )

    def inputs(self, tensors: Tensors) -> ScanInputs:
        """Return the inputs with `tensors` in the order of `names`."""
        return _inputs(dict(zip(self.names, tensors, strict=True)), self.angles_cumulated)


def scan(inputs: ScanInputs, switches: ScanSwitches, return_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """Return (o, final state [B,H,N,P] or None)."""
    contract = Contract.of(inputs, switches, return_final_state)
    if type(inputs.v) not in (Tensor, nn.Parameter):
        out, state = _inside(contract, inputs)
        return out, state if return_final_state else None
    run, partition, trips = _graph(contract)
    out, state = run(inputs, tuple(getattr(inputs, name) for name in contract.names))
    _record(contract, partition, trips if any(contract.need_gradients) else 0)
    return out, state if return_final_state else None


def _inside(contract: Contract, inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Run inside a graph that a loop over layers traces and cuts into forward and backward."""
    switches = contract.switches
    if switches.schedule != "chunk_parallel" or switches.psiv_cache:
        request = f"schedule '{switches.schedule}' and psiv_cache {str(switches.psiv_cache).lower()}"
        raise KernelUnsupported(
            f"inside a loop over layers the scan runs chunk_parallel without psiv_cache, not {request}"
        )
    _record_graph(contract)
    return _whole(contract)(*(getattr(inputs, name) for name in contract.names))


def _record_graph(contract: Contract) -> None:
    """Record the facts of a traced graph."""
    facts.record(ScanFact.LANE, Lane.XLA.value)
    facts.record(ScanFact.SCHEDULE, contract.switches.schedule)
    facts.record(ScanFact.CHUNK_SIZE, contract.switches.chunk_size)
    for name, dtype in zip(contract.names, contract.dtypes, strict=True):
        if name in IN_TIME:
            facts.record(ScanFact.DTYPE, str(dtype).removeprefix("torch."))


def _record(contract: Contract, partition: Partition, trips: int) -> None:
    """Record the facts of a run. `trips` are those of the graph's backward pass, 0 without one."""
    switches = contract.switches
    _record_graph(contract)
    if trips:
        facts.record(ScanFact.REMAT, partition.recomputed > 0)
        if switches.schedule == "chunk_parallel":
            facts.add(ScanFact.HANDED_BYTES, partition.handed_bytes)
        if partition.psiv_saved_bytes:
            facts.add(ScanFact.PSIV_SAVED_BYTES, partition.psiv_saved_bytes * trips)
        if partition.psiv_recomputed:
            facts.add(ScanFact.PSIV_RECOMPUTES, 1)


@lru_cache(maxsize=256)
def _graph(contract: Contract) -> tuple[Run, Partition, int]:
    """Return (function that runs `contract`, its partition, runs of its backward graph per pass)."""
    parallel = contract.switches.schedule == "chunk_parallel"
    return _parallel(contract) if parallel else _sequential(contract)


def _whole(contract: Contract) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the scan of all chunks at once as a function of the contract's tensors."""
    chunk_size = contract.switches.chunk_size

    def whole(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        inputs = contract.inputs(tensors)
        length = inputs.v.shape[1]
        line = timeline(inputs, chunk_size)
        present = [name for name in IN_TIME if getattr(inputs, name) is not None]
        padded = {name: pad_time(getattr(inputs, name), chunk_size, axis=1) for name in present}
        before_B1 = torch.zeros_like(line.run_BT[:, :1])
        enter = pass_states if inputs.entering is None else pass_states_from(_accumulated(inputs), before_B1)
        out, state = chunk_outputs(_replaced(inputs, padded), line, before_B1, chunk_size, enter)
        return out[:, :length], _final(contract, state, line, length)

    return whole


def _parallel(contract: Contract) -> tuple[Run, Partition, int]:
    whole, partition = _whole(contract), _partition(contract, contract.names)
    traced = differentiable(whole, partition)
    run = traced if any(contract.need_gradients) else whole
    return lambda _, tensors: run(*tensors), partition, 1


def _sequential(contract: Contract) -> tuple[Run, Partition, int]:
    chunk_size = contract.switches.chunk_size
    kept = [name for name in OF_HEADS if name in contract.names]
    sliced = [name for name in IN_TIME if name in contract.names]
    batch, length = contract.shapes[contract.names.index("v")][:2]

    def one_chunk(carry: Tensors, x: Tensors) -> tuple[Tensors, Tensor]:
        state_BHNP, *of_heads = carry
        before_B1, *line = x[: 1 + _TIMELINE]
        tensors = dict(zip([*kept, *sliced], [*of_heads, *x[1 + _TIMELINE :]], strict=True))
        out, state_BHNP = chunk_outputs(
            _inputs(tensors, contract.angles_cumulated),
            Timeline.of(tuple(line)),
            before_B1,
            chunk_size,
            step_state(state_BHNP, before_B1),
        )
        return (state_BHNP, *of_heads), out

    partition = _partition(contract, ["state", *kept, "before", *["line"] * _TIMELINE, *sliced])

    def run(inputs: ScanInputs, _: Tensors) -> tuple[Tensor, Tensor]:
        line = timeline(inputs, chunk_size)
        heads, width, state_size = *inputs.v.shape[2:], inputs.state_size
        if inputs.entering is None:
            state = torch.zeros(batch, heads, state_size, width, dtype=inputs.accumulate_dtype, device=inputs.v.device)
        else:
            state = _accumulated(inputs)
        ends_BK = line.run_BT[:, chunk_size - 1 :: chunk_size]
        before_KB1 = torch.cat((torch.zeros_like(ends_BK[:, :1]), ends_BK[:, :-1]), dim=1).T.unsqueeze(-1)
        xs = [_by_chunk(pad_time(getattr(inputs, name), chunk_size, axis=1), chunk_size, axis=1) for name in sliced]
        times = [_by_chunk(t, chunk_size, axis=axis) for t, axis in zip(line.tensors(), Timeline.AXES, strict=True)]
        init = (state, *(getattr(inputs, name) for name in kept))
        (last, *_rest), out_KBC = xla_device.loop(one_chunk, init, (before_KB1, *times, *xs), partition)
        return out_KBC.transpose(0, 1).flatten(1, 2)[:, :length], _final(contract, last, line, length)

    return run, partition, -(-length // chunk_size)


def _accumulated(inputs: ScanInputs) -> Tensor:
    """Return the state that enters the rows, in the dtype of states. The inputs must have one."""
    state: Tensor = inputs.entering.to(inputs.accumulate_dtype)  # type: ignore[union-attr]
    return state


def _final(contract: Contract, state_BHNP: Tensor, line: Timeline, length: int) -> Tensor:
    """Return the final state after `length` tokens in ScanState's form; detached unless the contract returns it."""
    if not contract.return_final_state:
        return state_BHNP.detach()
    return handed_on(state_BHNP, None if contract.angles_cumulated else line.angle_BHTA[:, :, length - 1])


def _partition(contract: Contract, names: Sequence[str]) -> Partition:
    switches, order = contract.switches, list(names)
    return Partition(v=order.index("v"), psi=order.index("psi"), psiv_cache=switches.psiv_cache, remat=switches.remat)


_TIMELINE = len(Timeline.AXES)


def _by_chunk(t: Tensor, chunk_size: int, *, axis: int) -> Tensor:
    """Return [K,...,C,...]: `t` by chunks along `axis`."""
    return split(t, axis, -1, chunk_size).movedim(axis, 0)


def _replaced(inputs: ScanInputs, tensors: dict[str, Tensor]) -> ScanInputs:
    return ScanInputs.unchecked(**{**vars(inputs), **tensors})


def _inputs(tensors: dict[str, Tensor], angles_cumulated: bool) -> ScanInputs:
    """Return inputs with None for absent tensors, unchecked: the original inputs were checked."""
    absent = dict.fromkeys((*DIFFERENTIABLE, "segment_ids"))
    return ScanInputs.unchecked(**{**absent, **tensors}, angles_cumulated=angles_cumulated)

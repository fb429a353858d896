"""The graph of a training step on lane xla, read after it was traced: what the code said of itself is held against it.

Loops over layers, values that are made again and kernels are put into the graph by Python code that says so. Whether
they arrived is read from the lowered module, which is what the compiler is given: a fact that the module contradicts
is replaced by what the module shows, so that the gate behind it is not live.
"""

from collections.abc import Iterator, Mapping

from kernels import facts, xla_attention
from kernels.facts import Fact
from kernels.scan_switches import ScanFact
from kernels.xla_graph import Graph
from model.config import TrainConfig
from model.facts import ModelFact


def attest(graph: Graph, observed: facts.Facts, config: TrainConfig) -> None:
    """Correct what was `observed` while one training step was traced, both passes, by its lowered module."""
    if graph.custom_calls:
        observed[ModelFact.KERNELS] = ", ".join(f"{count} {name}" for name, count in graph.custom_calls.items())
    observed.update(dict(_corrections(graph, observed, config)))


def _corrections(graph: Graph, observed: Mapping[str, Fact], config: TrainConfig) -> Iterator[tuple[str, Fact]]:
    yield from _handed(graph, observed)
    if observed.get(ScanFact.SCHEDULE) != "sequential":  # whose loops are those over chunks
        yield from _looped(graph, observed)
    problem = xla_attention.calls_problem(
        str(observed.get(ModelFact.ATTENTION)), graph.custom_calls, layers=config.model.pattern.count("A")
    )
    if problem is not None:
        yield ModelFact.ATTENTION, problem


def _handed(graph: Graph, observed: Mapping[str, Fact]) -> Iterator[tuple[str, Fact]]:
    """Compare the bytes that the partitions hand to backward passes with those that pass the module's barriers."""
    claimed = observed.get(ScanFact.HANDED_BYTES, 0)
    if graph.barrier_bytes == claimed:
        return
    said = f"not in the graph: {claimed} bytes for backward passes, {graph.barrier_bytes} behind barriers"
    for fact in (ScanFact.REMAT, ScanFact.PSIV_CACHE):
        yield fact, said


def _looped(graph: Graph, observed: Mapping[str, Fact]) -> Iterator[tuple[str, Fact]]:
    """Count the blocks in loops: each loop over layers is there twice, for both passes."""
    trips = sum(length * number for length, number in graph.loops.items())
    if trips != 2 * int(observed.get(ModelFact.LAYERS_IN_LOOPS, 0)):
        yield ModelFact.LAYERS_IN_LOOPS, trips // 2

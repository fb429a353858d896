"""Measurements in the process of a lane: errors, times, peak memory, kernel times."""

import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from ablate.kernels import facts
from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo import peer
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.scan_switches import ScanSwitches
from tests.kernels import criterion
from tests.kernels.accuracy import Errors, compare, compare_rows, poisoned_buffers
from tests.kernels.bench import chain, runs, timing
from tests.kernels.bench.chain import ChainCase
from tests.kernels.bench.runs import Passes, Timed
from tests.kernels.criterion import Results, Yardstick
from tests.kernels.exact import reference, yardstick
from tests.kernels.problem import Case, make_grad, make_inputs, outputs, scanned

WARM_UP = 3
SAMPLES = (2, criterion.SAMPLES, criterion.SAMPLES_IN_DOUBT)
"""Samples of the noise of rounding: few for the many rows here, more if they call a result wrong."""
OFFICIAL_TOLERANCE = 0.1
"""Largest error of the official tests, as a share of the largest value."""


class Judged(TypedDict):
    """Errors of results, by name."""

    errors: Errors
    """The worst row of the batch."""
    shares: dict[str, tuple[float, float]]
    """Our lane only: errors of the whole and of the worst row as multiples of the noise, see criterion.py."""
    wrong: list[str]
    """Results with an error above the lane's limit."""


class _Exact:
    """Exact results of a problem and their noise."""

    def __init__(self, inputs: ScanInputs, grad_out: Tensor, *, gradients: bool) -> None:
        self._inputs, self._grad_out, self._gradients = inputs, grad_out, gradients
        self._by: dict[int, Yardstick] = {}

    @cached_property
    def exact(self) -> Results:
        """Results in float64."""
        return reference(self._inputs, self._grad_out if self._gradients else None)

    def by(self, samples: int) -> Yardstick:
        """Return the yardstick from this many samples of the noise."""
        if samples not in self._by:
            self._by[samples] = yardstick(self._inputs, self._grad_out, gradients=self._gradients, samples=samples)
        return self._by[samples]


class Worker:
    """One lane in this process. Its answers are plain numbers, texts and mappings."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._timed: dict[str, Timed] = {}
        self._graphs: dict[tuple[str, Passes], timing.Captured] = {}

    def versions(self) -> dict[str, str]:
        """Return the versions of what computes here."""
        names = ["torch", "tilelang", "apache-tvm-ffi", "triton", "nvidia-cutlass-dsl"] + ["mamba-ssm"] * (
            self._lane == Lane.PEER
        )
        return {name: _version(name) for name in names} | {"cuda": str(torch.version.cuda)}

    def ready(self, peer_site: Path | None = None) -> None:
        """Raise KernelUnsupported with the reason when this lane cannot run here.

        `peer_site` is the folder with the official kernels; without it they are expected on the import path.
        """
        if not torch.cuda.is_available():
            raise KernelUnsupported("this machine has no GPU that torch can use; needed: an H100 or H200")
        if self._lane == Lane.PEER and peer_site is not None:
            peer.use_site(peer_site)
        reason = peer.import_refusal() if self._lane == Lane.PEER else None
        if reason is not None:
            raise KernelUnsupported(reason)

    def ceilings(self) -> dict[str, float]:
        """Return the bytes and FLOPs per second that this GPU reaches."""
        measured = timing.ceilings()
        torch.cuda.empty_cache()
        return measured

    def errors(self, case: Case, options: Mapping[str, Any]) -> Judged:
        """Return the errors of output, state and gradients against the float64 reference."""
        inputs = make_inputs(case)
        grad_out = make_grad(inputs, case.seed + 1)
        scan, grad = self._scan(options), grad_out if case.gradients else None
        got: Results = self._unaided(lambda: outputs(scan, inputs, grad))
        return self._judged(got, _Exact(inputs, grad_out, gradients=case.gradients))

    def compile_s(self, case: Case, options: Mapping[str, Any]) -> float:
        """Run the scan once, which compiles its kernels into the disk cache; return the seconds."""
        begin = time.perf_counter()
        inputs = make_inputs(case)
        outputs(self._scan(options), inputs, make_grad(inputs, case.seed + 1) if case.gradients else None)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def compile_timed_s(self, case: Case, options: Mapping[str, Any]) -> float:
        """Run the timed functions of `prepare` once, which compiles them; return the seconds."""
        begin = time.perf_counter()
        with facts.collect():
            runs.scan(self._lane, case, options).both()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def forget(self, name: str | None = None) -> None:
        """Drop one prepared problem and its memory, or all of them."""
        for prepared in [name] if name else list(self._timed):
            del self._timed[prepared]
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] in self._timed}
        torch.cuda.empty_cache()

    def prepare(self, name: str, case: Case, options: Mapping[str, Any]) -> dict[str, Any]:
        """Prepare a problem for `sample_ms` under `name`; return its peak memory in GiB and the scan's facts."""
        before = torch.cuda.memory_allocated()
        timed = self._warm(name, runs.scan(self._lane, case, options))
        torch.cuda.reset_peak_memory_stats()
        with facts.collect() as recorded:
            timed.both()
        torch.cuda.synchronize()
        return {"peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30, "facts": dict(recorded)}

    def prepare_attention(self, backend: str, case: Case) -> None:
        """Prepare causal attention with the heads and tokens of `case` for `sample_ms` under the backend's name."""
        self._warm(backend, runs.attention(backend, case))

    def prepare_chain(self, variant: str, case: ChainCase) -> tuple[float, float]:
        """Prepare a chain of products for `sample_ms` under the variant's name; return its errors, see chain.errors.

        Raises KernelUnsupported if the variant cannot compute it here.
        """
        left, rights = chain.make_operands(case)
        errors = chain.errors(chain.result_of(variant, left, rights), chain.exact(left, rights))
        run = chain.runner(variant, left, rights)
        self._warm(variant, Timed(forward=lambda: (run(),), both=lambda: (run(),), names=("out",)))
        return errors

    def check(self, name: str) -> Judged:
        """Return the errors of a prepared problem, the one to be timed, against the float64 reference."""
        timed = self._timed[name]
        if timed.inputs is None or timed.grad_out is None:
            raise ValueError(f"'{name}' is attention; checked are scans")
        return self._judged(self._results(name), _Exact(timed.inputs, timed.grad_out, gradients=True))

    def capture(self, name: str, passes: Passes) -> str | None:
        """Capture a prepared problem as a CUDA graph for `sample_ms`; return why that is impossible, or None."""
        timed = self._timed[name]
        want = timed.run(passes)
        try:
            graph = timing.captured(partial(timed.run, passes))
        except RuntimeError as error:
            torch.cuda.synchronize()
            return str(error).splitlines()[0]
        graph.replay()
        exact = {key: tensor.detach().double() for key, tensor in zip(timed.names, want, strict=False)}
        errors = compare(dict(zip(timed.names, graph.results, strict=False)), exact)
        different = [key for key, (overall, _) in errors.items() if not overall < 1e-3]
        if different:
            return f"a replay gives other results: {', '.join(different)}"
        self._graphs[name, passes] = graph
        return None

    def sample_ms(self, name: str, passes: Passes, way: str, repeats: int, calls: int = 1) -> list[float]:
        """Return `repeats` times in ms of a prepared problem, `way` "eager" or "graph", each the mean of `calls`."""
        run = self._graphs[name, passes].replay if way == "graph" else partial(self._timed[name].run, passes)
        return [ms / calls for ms in timing.by_events(lambda: [run() for _ in range(calls)], repeats)]

    def kernels_ms(self, name: str, passes: Passes, repeats: int) -> dict[str, float]:
        """Return the milliseconds of every GPU kernel of a prepared problem, slowest first."""
        return timing.by_kernel(partial(self._timed[name].run, passes), repeats)

    def _judged(self, got: Results, exact: _Exact) -> Judged:
        """Return errors and verdict: our lane by criterion.py, the official one by the tolerance of its own tests."""
        shares: dict[str, criterion.Share] = {}
        if self._lane == Lane.PEER:
            results = exact.exact
        else:
            (results, *_), shares = criterion.judged(got, exact.by, SAMPLES)
        errors = compare_rows(got, {name: results[name] for name in got})
        if self._lane == Lane.PEER:
            wrong = [name for name, (overall, _) in errors.items() if not overall < OFFICIAL_TOLERANCE]
        else:
            wrong = [name for name, share in shares.items() if not share.right]
        torch.cuda.empty_cache()
        return {
            "errors": errors,
            "shares": {name: (share.whole, share.row) for name, share in shares.items()},
            "wrong": wrong,
        }

    def _warm(self, name: str, timed: Timed) -> Timed:
        for _ in range(WARM_UP):
            timed.forward()
            timed.both()
        self._timed[name] = timed
        return timed

    def _results(self, name: str) -> dict[str, Tensor]:
        timed = self._timed[name]
        return {key: t.detach() for key, t in zip(timed.names, self._unaided(timed.both), strict=True)}

    def _unaided(self, run: Callable[[], Any]) -> Any:
        """Return the results of `run` with NaN in all new buffers of our lane. The official kernels rely on zeros."""
        if self._lane == Lane.PEER:
            return run()
        with poisoned_buffers():
            return run()

    def _scan(self, options: Mapping[str, Any]) -> Callable[[ScanInputs], tuple[Tensor, Tensor]]:
        return scanned(ScanSwitches(lane=self._lane, **options))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"

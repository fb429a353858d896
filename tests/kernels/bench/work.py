"""What the process of a lane can be asked: errors, times, peak memory, kernel times, what its binaries show."""

import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict
from unittest.mock import patch

import torch
from torch import Tensor

from kernels import facts
from kernels.backends import Lane
from kernels.errors import KernelUnsupported
from kernels.mamba3_mimo import criterion, peer
from kernels.mamba3_mimo.criterion import Results, Yardstick
from kernels.mamba3_mimo.inputs import ScanInputs
from kernels.mamba3_mimo.problem import Case, make_grad, make_inputs, outputs, scanned
from kernels.scan_switches import ScanSwitches
from tests.kernels.accuracy import Errors, compare, compare_rows, poisoned_buffers
from tests.kernels.bench import runs, timing
from tests.kernels.bench.runs import Passes, Timed
from tests.kernels.exact import reference, yardstick

WARM_UP = 3
SAMPLES = (2, criterion.SAMPLES, criterion.SAMPLES_IN_DOUBT)
"""Of the noise of rounding: few for the many rows here, more where those call a result wrong."""
OFFICIAL_TOLERANCE = 0.1
"""Share of the largest value by which the official tests let a result be off."""


def _open_sizes() -> Any:
    """Compile the official kernels for open sizes: slower kernels of the same arithmetic, but one for all sizes."""
    return patch.object(peer, "_sizes_of", lambda *_: {})


class Judged(TypedDict):
    """How near results are to the exact ones, by name."""

    errors: Errors
    """The worst row of the batch."""
    shares: dict[str, tuple[float, float]]
    """Ours: errors of the whole and of the worst row as multiples of the noise; see fuzz/criterion.py."""
    wrong: list[str]
    """What is further off than the lane is allowed."""


class _Exactly:
    """What the results of a problem are compared with."""

    def __init__(self, inputs: ScanInputs, grad_out: Tensor, *, gradients: bool) -> None:
        self._inputs, self._grad_out, self._gradients = inputs, grad_out, gradients
        self._by: dict[int, Yardstick] = {}

    @cached_property
    def exact(self) -> Results:
        """The results in float64."""
        return reference(self._inputs, self._grad_out if self._gradients else None)

    def by(self, samples: int) -> Yardstick:
        """Return the same with the noise of rounding, from this many samples."""
        if samples not in self._by:
            self._by[samples] = yardstick(self._inputs, self._grad_out, gradients=self._gradients, samples=samples)
        return self._by[samples]


class Worker:
    """One lane in this process. Answers are plain numbers, texts and mappings."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._timed: dict[str, Timed] = {}
        self._graphs: dict[tuple[str, Passes], timing.Captured] = {}
        self._exactly: dict[str, _Exactly] = {}

    def versions(self) -> dict[str, str]:
        """Return the versions of what computes here."""
        names = ["torch", "tilelang", "apache-tvm-ffi", "triton"] + ["mamba-ssm"] * (self._lane == Lane.PEER)
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
        found = timing.ceilings()
        torch.cuda.empty_cache()
        return found

    def errors(self, case: Case, options: Mapping[str, Any]) -> Judged:
        """Return how near output, state and gradients are to the float64 reference.

        The official kernels are compiled for open sizes: minutes less, and the same arithmetic.
        """
        inputs = make_inputs(case)
        grad_out = make_grad(inputs, case.seed + 1)
        with _open_sizes():
            scan, wanted = self._scan(options), grad_out if case.gradients else None
            got: Results = self._unaided(lambda: outputs(scan, inputs, wanted))
        return self._judged(got, _Exactly(inputs, grad_out, gradients=case.gradients))

    def compile_s(self, case: Case, options: Mapping[str, Any]) -> float:
        """Run the scan once, so that its kernels are compiled and in the disk cache; return the seconds it took."""
        begin = time.perf_counter()
        inputs = make_inputs(case)
        with _open_sizes():
            outputs(self._scan(options), inputs, make_grad(inputs, case.seed + 1) if case.gradients else None)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def compile_timed_s(self, case: Case, options: Mapping[str, Any]) -> float:
        """Run once what `prepare` would time, so that it is compiled and its code read; return the seconds it took."""
        begin = time.perf_counter()
        with facts.collect():
            runs.scan(self._lane, case, options).both()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def forget(self, name: str | None = None) -> None:
        """Drop one prepared problem and its memory, or all."""
        for prepared in [name] if name else list(self._timed):
            del self._timed[prepared]
            self._exactly.pop(prepared, None)
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] in self._timed}
        torch.cuda.empty_cache()

    def prepare(self, name: str, case: Case, options: Mapping[str, Any]) -> dict[str, Any]:
        """Make a problem ready for `sample_ms` under `name`; return its peak memory in GiB and the scan's facts."""
        held = torch.cuda.memory_allocated()
        timed = self._warm(name, runs.scan(self._lane, case, options))
        torch.cuda.reset_peak_memory_stats()
        with facts.collect() as said:
            timed.both()
        torch.cuda.synchronize()
        return {"peak_gib": (torch.cuda.max_memory_allocated() - held) / 2**30, "facts": dict(said)}

    def prepare_attention(self, backend: str, case: Case) -> None:
        """Make causal attention with the heads and tokens of `case` ready for `sample_ms` under the backend's name."""
        self._warm(backend, runs.attention(backend, case))

    def check(self, name: str) -> Judged:
        """Return how near a prepared problem itself, what is timed, is to the float64 reference."""
        timed = self._timed[name]
        if timed.inputs is None or timed.grad_out is None:
            raise ValueError(f"'{name}' is attention; checked are scans")
        self._exactly[name] = _Exactly(timed.inputs, timed.grad_out, gradients=True)
        return self._judged(self._results(name), self._exactly[name])

    def check_like(self, name: str, checked: str) -> Judged:
        """Return the same of a prepared problem whose inputs are those of `checked`, which was checked before."""
        return self._judged(self._results(name), self._exactly[checked])

    def capture(self, name: str, passes: Passes) -> str | None:
        """Make a CUDA graph of a prepared problem ready for `sample_ms`; return why there is none, or None."""
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

    def sample_ms(self, name: str, passes: Passes, way: str, repeats: int) -> list[float]:
        """Return `repeats` times in ms of a prepared problem, `way` "eager" or "graph"."""
        if way == "graph":
            return timing.by_events(self._graphs[name, passes].replay, repeats)
        return timing.by_events(partial(self._timed[name].run, passes), repeats)

    def kernels_ms(self, name: str, passes: Passes, repeats: int = 5) -> dict[str, float]:
        """Return the milliseconds of every GPU kernel of a prepared problem, slowest first."""
        return timing.by_kernel(partial(self._timed[name].run, passes), repeats)

    def binaries(self, case: Case, options: Mapping[str, Any]) -> list[dict[str, facts.Fact]]:
        """Return what the compiled kernels of the cuda lane that walk chunks are, one row for each that is launched."""
        from kernels.mamba3_mimo.cuda.host import attest
        from kernels.mamba3_mimo.cuda.host.compiled import kernel, needed
        from kernels.mamba3_mimo.cuda.host.scan import Scan
        from kernels.mamba3_mimo.cuda.shape import Variant

        scan = Scan(make_inputs(case), Variant(**options))
        problem = scan.shape, scan.variant
        launched = (*needed("forward", *problem), *needed("backward", *problem))
        made = {name: kernel(name, *problem) for name in attest.WALKS if name in launched}
        return list(attest.table(made))

    def _judged(self, got: Results, exactly: _Exactly) -> Judged:
        """Return errors and verdict: ours by the criterion of the fuzz, the official one by that of its own tests."""
        shares: dict[str, criterion.Share] = {}
        if self._lane == Lane.PEER:
            exact = exactly.exact
        else:
            (exact, *_), shares = criterion.judged(got, exactly.by, SAMPLES)
        errors = compare_rows(got, {name: exact[name] for name in got})
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
        """Return what `run` returns, no buffer of ours holding anything before; the official ones rely on zeros."""
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

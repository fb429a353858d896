"""What the process of a lane can be asked: errors, times, peak memory, kernel times, what its binaries show."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import facts
from kernels.backends import Lane
from kernels.errors import KernelUnsupported
from kernels.mamba3_mimo import mamba3_mimo, peer
from kernels.mamba3_mimo.accuracy import (
    Case,
    Errors,
    compare,
    compare_rows,
    make_grad,
    make_inputs,
    outputs,
    poisoned_buffers,
)
from kernels.mamba3_mimo.bench import runs, timing
from kernels.mamba3_mimo.bench.runs import Passes, Timed
from kernels.mamba3_mimo.exact import reference
from kernels.mamba3_mimo.inputs import ScanInputs
from kernels.scan import ScanSwitches

WARM_UP = 3


class Worker:
    """One lane in this process. Answers are plain numbers, texts and mappings."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._timed: dict[str, Timed] = {}
        self._graphs: dict[tuple[str, Passes], timing.Captured] = {}

    def versions(self) -> dict[str, str]:
        """Return the versions of what computes here."""
        names = ["torch", "tilelang", "apache-tvm-ffi", "triton"] + ["mamba-ssm"] * (self._lane == Lane.PEER)
        return {name: _version(name) for name in names} | {"cuda": str(torch.version.cuda)}

    def ready(self, peer_site: Path | None = None) -> None:
        """Raise KernelUnsupported with the reason when this lane cannot run here.

        `peer_site` is the folder with the official kernels; without it they are expected on the import path.
        """
        if not torch.cuda.is_available():
            raise KernelUnsupported("this machine has no GPU that torch can use; needed: an H200")
        if self._lane == Lane.PEER and peer_site is not None:
            peer.use_site(peer_site)
        reason = peer.missing() if self._lane == Lane.PEER else None
        if reason is not None:
            raise KernelUnsupported(reason)

    def ceilings(self) -> dict[str, float]:
        """Return the bytes and FLOPs per second that this GPU reaches."""
        found = timing.ceilings()
        torch.cuda.empty_cache()
        return found

    def open_errors(self, case: Case, options: Mapping[str, Any]) -> Errors:
        """Return the errors, the official kernels compiled for open sizes: minutes less, and the same arithmetic."""
        with peer.open_sizes():
            return self.errors(case, options)

    def errors(self, case: Case, options: Mapping[str, Any]) -> Errors:
        """Return the errors of output, state and gradients against the float64 reference."""
        inputs = make_inputs(case)
        grad_out = make_grad(inputs, case.seed + 1) if case.gradients else None
        got = self._unaided(lambda: outputs(self._scan(options), inputs, grad_out))
        errors = compare(got, reference(inputs, grad_out))
        torch.cuda.empty_cache()
        return errors

    def compile_s(self, case: Case, options: Mapping[str, Any]) -> float:
        """Run the scan once, so that its kernels are compiled and in the disk cache; return the seconds it took."""
        begin = time.perf_counter()
        inputs = make_inputs(case)
        with peer.open_sizes():
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

    def check(self, name: str) -> Errors:
        """Return the errors of a prepared problem itself, what is timed, against the float64 reference, row by row."""
        timed = self._timed[name]
        if timed.inputs is None:
            raise ValueError(f"'{name}' is attention; checked are scans")
        got, want = self._results(name), reference(timed.inputs, timed.grad_out)
        errors = compare_rows(got, {key: want[key] for key in got})
        torch.cuda.empty_cache()
        return errors

    def check_beside(self, name: str, checked: str) -> Errors:
        """Return the differences of a prepared problem from another one that was checked, measured like errors."""
        want = {key: tensor.double() for key, tensor in self._results(checked).items()}
        errors = compare_rows(self._results(name), want)
        torch.cuda.empty_cache()
        return errors

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
        """Return what the compiled kernels of the cuda lane that walk chunks are, one row each."""
        from kernels.mamba3_mimo.cuda import attest
        from kernels.mamba3_mimo.cuda.compiled import kernel
        from kernels.mamba3_mimo.cuda.scan import Scan
        from kernels.mamba3_mimo.cuda.variant import Variant

        scan = Scan(make_inputs(case), Variant(**options))
        walks = [name for name in attest.WALKS if name != "chunk_states" or not scan.variant.save_states]
        return list(attest.table({name: kernel(name, scan.shape, scan.variant, scan.tokens) for name in walks}))

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
        chosen = ScanSwitches(lane=self._lane, **options)

        def run(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
            result = mamba3_mimo(inputs, chosen)
            return result.out, result.final_state

        return run


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"

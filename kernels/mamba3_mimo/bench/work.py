"""What the process of a lane can be asked: errors, times, peak memory, kernel times, what its binaries show."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import facts
from kernels.backends import Lane
from kernels.errors import KernelUnsupported
from kernels.mamba3_mimo import mamba3_mimo, peer
from kernels.mamba3_mimo.accuracy import Case, Errors, compare, make_grad, make_inputs, outputs, poisoned_buffers
from kernels.mamba3_mimo.accuracy import reference as float64_reference
from kernels.mamba3_mimo.inputs import ScanInputs
from kernels.scan import ScanSwitches

WARM_UP = 3
ATTENTION_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """One problem, ready to be run again and again."""

    forward: Run
    both: Run


class Worker:
    """One lane in this process. Answers are plain numbers, texts and mappings."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._timed: dict[str, _Timed] = {}

    def versions(self) -> dict[str, str]:
        """Return the versions of what computes here."""
        names = ["torch", "tilelang", "apache-tvm-ffi", "triton"] + ["mamba-ssm"] * (self._lane == Lane.PEER)
        return {name: _version(name) for name in names} | {"cuda": str(torch.version.cuda)}

    def open_errors(self, case: Case, options: Mapping[str, Any]) -> Errors:
        """Return the errors, the official kernels compiled for open sizes: minutes less, and the same arithmetic."""
        with peer.open_sizes():
            return self.errors(case, options)

    def errors(self, case: Case, options: Mapping[str, Any]) -> Errors:
        """Return the errors of output, state and gradients against the float64 reference."""
        inputs = make_inputs(case)
        grad_out = make_grad(inputs, case.seed + 1) if case.gradients else None
        run = self._scan(options)
        if self._lane == Lane.PEER:
            got = outputs(run, inputs, grad_out)
        else:
            with poisoned_buffers():
                got = outputs(run, inputs, grad_out)
        errors = compare(got, float64_reference(inputs, grad_out))
        torch.cuda.empty_cache()
        return errors

    def errors_beside(self, case: Case, options: Mapping[str, Any], checked: Mapping[str, Any]) -> Errors:
        """Return the differences from the results of this lane with the options `checked`, measured like errors."""
        inputs = make_inputs(case)
        grad_out = make_grad(inputs, case.seed + 1)
        want = outputs(self._scan(checked), inputs, grad_out)
        with poisoned_buffers():
            got = outputs(self._scan(options), inputs, grad_out)
        errors = compare(got, {name: tensor.double() for name, tensor in want.items()})
        torch.cuda.empty_cache()
        return errors

    def open_compile_s(self, case: Case, options: Mapping[str, Any]) -> float:
        """Compile as `open_errors` does."""
        with peer.open_sizes():
            return self.compile_s(case, options)

    def compile_s(self, case: Case, options: Mapping[str, Any]) -> float:
        """Run the problem once, so that its kernels are compiled and in the disk cache; return the seconds it took."""
        begin = time.perf_counter()
        inputs = make_inputs(case)
        outputs(self._scan(options), inputs, make_grad(inputs, case.seed + 1) if case.gradients else None)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

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

    def forget(self, name: str | None = None) -> None:
        """Drop one prepared problem and its memory, or all."""
        for prepared in [name] if name else list(self._timed):
            del self._timed[prepared]
        torch.cuda.empty_cache()

    def prepare(self, name: str, case: Case, options: Mapping[str, Any]) -> dict[str, Any]:
        """Make a problem ready for `sample_ms` under `name`; return its peak memory in GiB and the scan's facts."""
        held = torch.cuda.memory_allocated()
        run, inputs = self._scan(options), make_inputs(case)
        leaves = tuple(t.requires_grad_() for t in inputs.tensors())
        grad_out = make_grad(inputs, case.seed + 1)

        def forward() -> object:
            with torch.no_grad():
                return run(inputs)

        def both() -> object:
            return torch.autograd.grad(run(inputs)[0], leaves, grad_out)

        for _ in range(WARM_UP):
            forward()
            both()
        torch.cuda.reset_peak_memory_stats()
        with facts.collect() as said:
            both()
        torch.cuda.synchronize()
        self._timed[name] = _Timed(forward=forward, both=both)
        return {"peak_gib": (torch.cuda.max_memory_allocated() - held) / 2**30, "facts": dict(said)}

    def prepare_attention(self, backend: str, case: Case) -> None:
        """Make causal attention with the heads and tokens of `case` ready for `sample_ms` under the backend's name."""
        size = (case.B, case.H, case.S, case.P)
        q, k, v, grad_out = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        leaves = tuple(t.requires_grad_() for t in (q, k, v))

        def attend() -> Tensor:
            with sdpa_kernel(ATTENTION_BACKENDS[backend]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def forward() -> object:
            with torch.no_grad():
                return attend()

        def both() -> object:
            return torch.autograd.grad(attend(), leaves, grad_out)

        for _ in range(WARM_UP):
            both()
        self._timed[backend] = _Timed(forward=forward, both=both)

    def sample_ms(self, name: str, passes: str, repeats: int) -> list[float]:
        """Return `repeats` times in ms of the forward pass or of "both", by CUDA events on a busy stream."""
        run = self._timed[name].forward if passes == "forward" else self._timed[name].both
        marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 2)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairwise(marks[1:])]

    def kernels_ms(self, name: str, repeats: int = 5) -> dict[str, float]:
        """Return the milliseconds of every GPU kernel of one forward and backward pass, slowest first."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            for _ in range(repeats):
                self._timed[name].both()
            torch.cuda.synchronize()
        total = {event.key: event.device_time_total / 1000 / repeats for event in profile.key_averages()}
        return {kernel: ms for kernel, ms in sorted(total.items(), key=lambda item: -item[1]) if ms > 0}

    def binaries(self, case: Case, options: Mapping[str, Any]) -> list[dict[str, facts.Fact]]:
        """Return what the compiled kernels of the cuda lane that walk chunks are, one row each."""
        from kernels.mamba3_mimo.cuda import attest
        from kernels.mamba3_mimo.cuda.compiled import kernel
        from kernels.mamba3_mimo.cuda.scan import Scan
        from kernels.mamba3_mimo.cuda.variant import Variant

        scan = Scan(make_inputs(case), Variant(**options))
        walks = [name for name in attest.WALKS if name != "chunk_states" or not scan.variant.save_states]
        return list(attest.table({name: kernel(name, scan.shape, scan.variant, scan.tokens) for name in walks}))

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

"""pytest's plugin that runs GPU tests without a GPU, to see which kernels they launch; see test_compile_first.py.

Usage: python -O -m pytest -p tests.kernels.launches_recorded -m gpu ... With -O a test runs to its end, whatever its
assertions would say. "cuda" is torch's device without data, `meta`, where the real host code runs and every launch is
noted instead of done; where training needs numbers it is the CPU, and they may be any. A test fails here that
launches a kernel which its mark `scans` does not name; the last lines tell which kernels are named by marks alone.
"""

import contextlib
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

import kernels.mamba3_mimo
from kernels.backends import Lane
from kernels.mamba3_mimo import accuracy, exact, support
from kernels.mamba3_mimo.cuda.host import compiled, op, scan
from model import attention, train
from tests.kernels import compile_first, kernel_tasks

launched: set[kernel_tasks.Key] = set()
"""By the test that runs."""
ever: dict[str, set[kernel_tasks.Key]] = {"launched": set(), "named": set()}
"""By all tests."""


def note(name, shape, variant) -> None:
    """Note a launch."""
    launched.add(compiled.for_any_size(name, shape, variant))


class _Launches:
    """Notes instead of launching."""

    def __init__(self, *problem) -> None:
        self._problem = problem

    def __getitem__(self, name):
        return lambda *_: note(name, *self._problem)


class _Elsewhere(TorchFunctionMode):
    """Torch with another device for "cuda"."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {name: self._moved(value) for name, value in (kwargs or {}).items()}
        if function is torch.Tensor.cuda:
            return args[0].to(self._device)
        return function(*map(self._moved, args), **kwargs)

    def _moved(self, value):
        return self._device if isinstance(value, str) and value == "cuda" else value


def _nothing(inputs, _, return_final_state):
    """Stand for the reference lane: what has its shapes."""
    state = inputs.v.new_zeros(inputs.v.shape[0], inputs.num_heads, inputs.state_size, inputs.v.shape[3])
    return inputs.v * 1, state if return_final_state else None


def _one_step(train_all, config, **told):
    """Train a step of each kind: the others launch the same."""
    return train_all(replace(config, steps=replace(config.steps, warmup=0, timed=1)), **told)


def _called(operator, arguments, **_) -> None:
    """Stand for torch's checks of an operator: both passes."""
    out = operator(*arguments)[0]
    torch.autograd.grad(out.float().sum(), [t for t in arguments if isinstance(t, torch.Tensor)], allow_unused=True)


def pytest_configure():
    """Replace what needs a GPU or numbers, before the tests are imported."""
    compile_first.gpu_is_here = lambda: True
    exact.reference = lambda *_, **__: {}
    support.LANES[Lane.REFERENCE] = replace(support.LANES[Lane.REFERENCE], run=_nothing)
    accuracy.compare = lambda *_: {}
    kernels.mamba3_mimo.supports = op.supports = lambda *_: None
    op.build = lambda direction, *problem: [note(name, *problem) for name in compiled.needed(direction, *problem)]
    op._attested = lambda *_: ((), {})
    op._Shapes.run = lambda self, name, *_: note(name, self.shape, self.variant)
    scan.launches = _Launches
    torch.Generator = lambda device=None, made=torch.Generator: made()
    torch.library.opcheck = _called
    torch.compile = lambda function, **_: function
    torch.cuda.CUDAGraph = mock.MagicMock
    torch.cuda.graph = lambda _: contextlib.nullcontext()
    torch.cuda.reset_peak_memory_stats = lambda: None
    torch.set_num_threads(1)
    train._check_finite = lambda _: None
    train.train = partial(_one_step, train.train)
    attention.ATTEND["flash"] = attention.ATTEND["sdpa"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Run the test on no GPU; fail it when it launches what its marks do not name."""
    launched.clear()
    named = set(kernel_tasks.tasks(compile_first.problems_of(item)))
    with _Elsewhere("cpu" if "train" in item.nodeid.partition("::")[0] else "meta"):
        yield
    ever["launched"] |= launched
    ever["named"] |= named
    missing = launched - named
    if missing:
        pytest.fail(f"launched and not named: {missing}", pytrace=False)


def pytest_terminal_summary(terminalreporter):
    """Tell how many kernels there are, and how many that nobody launches."""
    idle = ever["named"] - ever["launched"]
    terminalreporter.write_line(f"{len(ever['named'])} kernels named, {len(ever['launched'])} launched, {len(idle)} idle")
    for name, shape, variant in sorted(idle, key=str):
        terminalreporter.write_line(f"idle: {name} {shape} {variant}")

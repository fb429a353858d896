"""pytest's plugin that runs GPU tests without a GPU, to see which kernels they launch; see test_compile_first.py.

Usage: python -m pytest -p tests.kernels.launches_recorded --assert=plain -m gpu ... Test files are compiled without
their assertions, so a test runs to its end whatever it would say of the results. "cuda" is torch's device without data,
`meta`, where the real host code runs and every launch is noted instead of done; where training needs numbers it is the
CPU, and they may be any. A test fails here that launches a kernel which its mark `scans` does not name; the last lines
tell which kernels are named and launched by none.
"""

import contextlib
import sys
from dataclasses import replace
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

import kernels.mamba3_mimo
from kernels.backends import Lane
from kernels.mamba3_mimo import criterion, support
from kernels.mamba3_mimo.cuda.host import compiled, op, scan
from model.layers import attention
from model.training import train
from tests.kernels import compile_first, kernel_tasks
from tests.kernels.fuzz import planning

launched: set[kernel_tasks.Key] = set()
"""By the test that runs."""
ever: dict[str, set[kernel_tasks.Key]] = {"launched": set(), "named": set()}
"""By all tests."""


def note(name, shape, variant) -> None:
    """Note a launch."""
    launched.add(compiled.for_any_size(name, shape, variant))


class _Unasserted(SourceFileLoader):
    """Loads a file without its assertions, and without a cache that others would read."""

    def get_code(self, fullname):
        return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True, optimize=1)


class _TestFiles:
    """Finds test files."""

    @staticmethod
    def find_spec(name, path=None, _target=None):
        places = [Path(folder, name.rpartition(".")[2] + ".py") for folder in path or ()]
        found = next((str(place) for place in places if place.name.startswith("test_") and place.exists()), None)
        return found and spec_from_file_location(name, found, loader=_Unasserted(name, found))


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
    sys.meta_path.insert(0, _TestFiles)
    compile_first.gpu_is_here = lambda: True
    criterion.shares = lambda *_: {}
    support.LANES[Lane.REFERENCE] = replace(support.LANES[Lane.REFERENCE], run=_nothing)
    kernels.mamba3_mimo.supports = op.refusal_on = lambda *_: None
    op.build = lambda direction, *problem: [note(name, *problem) for name in compiled.needed(direction, *problem)]
    op._attested = lambda *_: ((), {})
    op._Shapes.run = lambda self, name, *_: note(name, self.shape, self.variant)
    scan.launches = _Launches
    scan.Scan.empty = lambda self, *size, dtype=torch.float32: torch.zeros(size, dtype=dtype, device=self.device)
    torch.Generator = lambda device=None, made=torch.Generator: made()
    torch.library.opcheck = _called
    torch.compile = lambda function, **_: function
    torch.cuda.CUDAGraph = mock.MagicMock
    torch.cuda.graph = lambda _: contextlib.nullcontext()
    torch.cuda.mem_get_info = lambda: (2**50, 2**50)
    torch.cuda.reset_peak_memory_stats = lambda: None
    torch.set_num_threads(1)
    train._check_finite = lambda _: None
    train.train = partial(_one_step, train.train)
    attention.ATTEND["flash"] = attention.ATTEND["sdpa"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Run the test on no GPU; fail it when it launches what its marks do not name."""
    launched.clear()
    named = {key for problem in compile_first.problems_of(item) for key in planning.kernels(problem)}
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
    named, done = len(ever["named"]), len(ever["launched"])
    terminalreporter.write_line(f"{named} kernels named, {done} launched, {len(idle)} idle")
    for key in sorted(idle, key=str):
        terminalreporter.write_line(f"idle: {key}")

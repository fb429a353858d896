"""Budgets of the host work of a pass, counted on CPU tensors with kernels that do nothing."""

import sys
from collections.abc import Callable

import pytest

pytest.importorskip("tilelang")

from ablate.kernels.mamba3_mimo.cuda.host import compiled, sizes
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from tests.kernels.host_time import CASE, passes, unlaunched
from tests.kernels.problem import make_inputs

LOOKUPS = 4
"""Hash look-ups of a training pass per key: sizes and refusal, forward and backward."""


@pytest.fixture(autouse=True)
def nan_filled_buffers():
    """Replace the fixture of this folder, which fills buffers."""
    return


@pytest.fixture
def run():
    inputs = make_inputs(CASE, "cpu")
    with unlaunched():
        yield passes(inputs.with_tensors(tuple(t.requires_grad_() for t in inputs.tensors())))


@pytest.mark.parametrize("key", [ScanShape, Variant])
def test_a_training_pass_looks_its_kernels_up_within_the_budget(run, monkeypatch, key):
    run["forward+backward"]()
    lookups = []
    plain = key.__hash__
    monkeypatch.setattr(key, "__hash__", lambda self: lookups.append(1) or plain(self))
    run["forward+backward"]()
    assert len(lookups) <= LOOKUPS, f"{len(lookups)} look-ups with {key.__name__}, budget {LOOKUPS}"


def calls(run: Callable[[], object]) -> int:
    """Return the number of Python and C function calls of a run, which other processes cannot change."""
    run()
    events = []
    sys.setprofile(lambda _frame, event, _arg: events.append(event))
    try:
        run()
    finally:
        sys.setprofile(None)
    return sum(event in {"call", "c_call"} for event in events)


def test_autograd_at_most_doubles_the_calls(run):
    inside, whole = (calls(run[f"forward+backward{name}"]) for name in (" without autograd", ""))
    assert inside < whole < 2 * inside


def test_a_pass_keeps_the_plan_of_its_sizes(run, monkeypatch):
    run["forward+backward"]()
    for name in ("resolve", "shape_of"):
        monkeypatch.setattr(sizes, name, lambda *_: pytest.fail("computed again"))
    run["forward+backward"]()


def test_a_launch_is_looked_up_once(monkeypatch):
    looked_up = []

    class Executable:
        def __getitem__(self, name):
            looked_up.append(name)
            return lambda *tensors: tensors

    class Adapter:
        get_exportable_executable = staticmethod(Executable)

    class Kernel:
        adapter = Adapter

    monkeypatch.setattr(compiled, "kernel", lambda *problem: Kernel)
    shape = ScanShape(B=7, S=64, H=1, G=1, N=64, P=64, R=4, A=16)
    for _ in range(3):
        assert compiled.launches(shape, Variant())["decays"](1, 2) == (1, 2)
    assert looked_up == ["main"]

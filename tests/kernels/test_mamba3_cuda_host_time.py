"""What the host does per pass, counted on CPU tensors with kernels that do nothing."""

import sys
from collections.abc import Callable

import pytest

pytest.importorskip("tilelang")

from kernels.mamba3_mimo.cuda.host import compiled, sizes
from kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from kernels.mamba3_mimo.problem import make_inputs
from tests.kernels.host_time import CASE, passes, unlaunched


@pytest.fixture(autouse=True)
def nan_filled_buffers():
    """Replace the folder's fixture: filling buffers would be most of the time."""
    return


@pytest.fixture
def run():
    inputs = make_inputs(CASE, "cpu")
    with unlaunched():
        yield passes(inputs.with_tensors(tuple(t.requires_grad_() for t in inputs.tensors())))


@pytest.mark.parametrize("key", [ScanShape, Variant])
def test_a_pass_asks_for_its_kernels_once_not_at_every_launch(run, monkeypatch, key):
    run["forward+backward"]()
    asked = []
    plain = key.__hash__
    monkeypatch.setattr(key, "__hash__", lambda self: asked.append(1) or plain(self))
    run["forward+backward"]()
    assert 2 <= len(asked) <= 4  # what the sizes decide, and the refusal, in each of two passes


def calls(run: Callable[[], object]) -> int:
    """Return how many functions of Python and of C a run calls; unlike a time, no other process adds any."""
    run()
    seen = []
    sys.setprofile(lambda _frame, event, _arg: seen.append(event))
    try:
        run()
    finally:
        sys.setprofile(None)
    return sum(event in {"call", "c_call"} for event in seen)


def test_autograd_takes_at_most_as_many_calls_as_what_it_does(run):
    inside, whole = (calls(run[f"forward+backward{name}"]) for name in (" without autograd", ""))
    assert inside < whole < 2 * inside


def test_a_pass_takes_what_its_sizes_decide_from_the_one_before(run, monkeypatch):
    run["forward+backward"]()
    for name in ("resolve", "shape_of"):
        monkeypatch.setattr(sizes, name, lambda *_: pytest.fail("made again"))
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

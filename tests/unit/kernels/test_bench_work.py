"""What a lane's process answers about a prepared problem: the reference lane on a CPU, with wrong results planted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.backends import Lane
from kernels.mamba3_mimo.problem import Case, make_inputs
from tests.kernels.bench import runs
from tests.kernels.bench.work import Worker

CASE = Case(B=2, S=40, H=2, N=16, P=32, R=2)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(runs, "make_inputs", lambda case: make_inputs(case, "cpu"))
    made = Worker(Lane.REFERENCE)
    made._timed["right"] = runs.scan(Lane.REFERENCE, CASE, {})
    return made


def changed(timed: runs.Timed, name: str, change: Callable[[torch.Tensor], object]) -> runs.Timed:
    """Return what is timed, with one of its results changed in place."""

    def both() -> tuple[torch.Tensor, ...]:
        results = [result.detach() for result in timed.both()]
        change(results[timed.names.index(name)])
        return tuple(results)

    return replace(timed, both=both)


def test_check_compares_every_result_of_what_is_timed(worker: Worker) -> None:
    judged = worker.check("right")
    assert list(judged["errors"]) == list(judged["shares"]) == [*worker._timed["right"].names]
    assert judged["wrong"] == []
    assert 0 < max(whole for whole, _ in judged["shares"].values()) < 8


def last_number(result: torch.Tensor) -> None:
    result[(-1,) * result.dim()] += result.abs().max()


def not_a_number(result: torch.Tensor) -> None:
    result[(0,) * result.dim()] = float("nan")


@pytest.mark.parametrize("name", ["out", "q", "psi", "D", "dt"])
@pytest.mark.parametrize("change", [last_number, not_a_number])
def test_check_finds_one_wrong_place(worker: Worker, name: str, change: Any) -> None:
    worker._timed["wrong"] = changed(worker._timed["right"], name, change)
    assert worker.check("wrong")["wrong"] == [name]


def test_check_of_the_official_lane_takes_the_tolerance_of_its_own_tests(worker: Worker) -> None:
    worker._lane = Lane.PEER
    worker._timed["wrong"] = changed(worker._timed["right"], "psi", last_number)
    assert (worker.check("right")["wrong"], worker.check("wrong")["wrong"]) == ([], ["psi"])
    assert worker.check("right")["shares"] == {}


def test_check_of_attention_is_refused(worker: Worker) -> None:
    worker._timed["attention"] = replace(worker._timed["right"], inputs=None)
    with pytest.raises(ValueError, match="'attention' is attention; checked are scans"):
        worker.check("attention")


def test_what_is_timed_leaves_no_graph_for_autograd(worker: Worker) -> None:
    """Its nodes belong to the stream they were made on: a CUDA graph, captured on another one, must not meet them."""
    timed = worker._timed["right"]
    assert all(result.grad_fn is None for result in (*timed.both(), *timed.forward()))

"""The small problems of back ends: what works, is refused, is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ablate.experiments.design.gates import BACK_ENDS
from ablate.model import back_ends
from ablate.model.layers import attention
from ablate.model.training import loss

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def choice_of_kernels() -> Any:
    yield
    torch.use_deterministic_algorithms(False)


def test_every_back_end_that_a_worker_tries_has_a_problem() -> None:
    assert {name.partition("=")[0] for name in BACK_ENDS} == set(back_ends.PROBLEMS)
    assert {"attention=fa4", "loss=quack", "projections=fp8", "cuda_graph=true"} < set(BACK_ENDS)


@pytest.mark.parametrize("name", ["attention=sdpa", "loss=dense", "loss=chunked", "loss=torch_linear_ce"])
def test_what_a_cpu_computes_works(name: str) -> None:
    assert back_ends.problem(name, CPU) is None


@pytest.mark.parametrize("name", [name for name in BACK_ENDS if name not in {"loss=compiled", "loss=torch_linear_ce"}])
def test_what_needs_a_gpu_is_refused_with_the_reason(name: str) -> None:
    reason = back_ends.problem(name, CPU)
    assert reason is not None
    assert reason.startswith("refused: ")
    assert "NVIDIA GPU" in reason


def spoiled(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """Return the function with a gradient that is wrong by a factor and a result that is right."""

    def lie(*given: Any, **named: Any) -> Any:
        right = function(*given, **named)
        return right.detach() + factor * (right - right.detach())

    return lie


@pytest.mark.parametrize("factor", [-1.0, 0.0, 0.97, 1.03, 2.0, float("nan")])
def test_wrong_gradients_behind_right_results_are_found(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    monkeypatch.setitem(attention.ATTEND, "sdpa", spoiled(attention.ATTEND["sdpa"], factor))
    monkeypatch.setitem(loss.KINDS, "dense", spoiled(loss.KINDS["dense"], factor))
    for name in ("attention=sdpa", "loss=dense"):
        reason = back_ends.problem(name, CPU)
        assert reason is not None
        assert reason.startswith("wrong: relative error ")


def test_a_mask_that_lets_documents_see_each_other_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attention.ATTEND["sdpa"]
    monkeypatch.setitem(attention.ATTEND, "sdpa", lambda q, k, v, ids, cap: plain(q, k, v, torch.zeros_like(ids), cap))
    assert str(back_ends.problem("attention=sdpa", CPU)).startswith("wrong: ")

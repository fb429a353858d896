from pathlib import Path

import pytest
import torch

from experiments.outcomes import FailureClass
from model.facts import ModelFact
from tests.integration.worker_service import config_json, corpus
from workers.errors import DeviceMissing
from workers.paths import WorkPaths
from workers.processes import trial
from workers.processes.failures import classify
from workers.processes.result import TrialOrder


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialOrder:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    return TrialOrder(
        trial_id="trl_1",
        config=config_json(corpus(tmp_path / "corpus")),
        paths=WorkPaths(home=tmp_path).trial("att_1", "trl_1"),
        data_dir=tmp_path / "data",
        device_type="cpu",
    )


def test_a_trial_of_a_cpu_node_trains_on_the_cpu_even_where_a_gpu_is(
    order: TrialOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert trial._train(order).facts[ModelFact.DEVICE] == "cpu"


def test_a_device_that_torch_cannot_use_breaks_the_node_and_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceMissing, match="this node trains on devices of type 'cuda'") as caught:
        trial.find_device("cuda", 1)
    assert classify(caught.value) is FailureClass.INFRA_NODE
    assert trial.find_device("cpu", 1) == torch.device("cpu")

from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.design.arms import read_config
from ablate.experiments.design.kinds.built_in import BuiltInArm
from ablate.model.config import DataConfig
from ablate.workers.paths import TrialPaths
from ablate.workers.trials.result import TrialOrder, TrialResult, read_result, read_steps

_CONFIG = BuiltInArm(micro_batch=2, data=DataConfig(seq_len=64), seed=7)
_JSON = _CONFIG.values_with_seed
_MODEL = _JSON["model"]


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({**_JSON, "micro_batch": 0}, "micro_batch"),
        ({**_JSON, "micro_batch": "2"}, "micro_batch"),
        ({**_JSON, "model": {**_MODEL, "scan": {**_MODEL["scan"], "turbo": True}}}, r"model\.scan\.turbo"),
        ({"micro_batch": 2}, "package, command, model"),
    ],
    ids=["illegal value", "text", "unknown field", "no kind"],
)
def test_read_config_names_the_wrong_field(document: dict[str, Any], field: str) -> None:
    assert read_config(_JSON) == _CONFIG
    with pytest.raises(ValueError, match=field):
        read_config(document)


def test_read_steps_ignores_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert read_steps(path) == ()
    times = '"seconds": 1, "began_s": 0, "ended_s": 1'
    line = f'{{"index": 0, "phase": "compile", {times}, "tokens": 8, "loss": NaN, "grad_norm": Infinity}}'
    path.write_text(line + "\n" + line[:20])
    (step,) = read_steps(path)
    assert step.loss != step.loss
    assert step.grad_norm == float("inf")


def test_read_result_keeps_non_finite_numbers(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(TrialResult.partial(loss_val=float("inf"), facts={"a": 1}).model_dump_json())
    result = read_result(path)
    assert result is not None
    assert result.loss_val == float("inf")


@pytest.mark.parametrize("device", ["cpu", "cuda", "xla"])
def test_only_trials_on_cuda_may_name_threads_of_other_processes(tmp_path: Path, device: str) -> None:
    order = TrialOrder(
        trial_id="t", config=_CONFIG, paths=TrialPaths(folder=tmp_path), data_dir=tmp_path, device_type=device
    )
    isolation = order.isolated(()).isolation
    assert isolation is not None
    assert isolation.programs == (device == "cuda"), "torch compiles in processes that start CUDA"
    assert isolation.sockets == (device == "xla")

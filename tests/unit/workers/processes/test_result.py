from pathlib import Path

import pytest
from pydantic import TypeAdapter

from experiments.design.config_fields import read_config
from model.config import DataConfig, TrainConfig
from model.errors import ConfigError
from workers.processes.result import TrialResult, read_result, read_steps

_CONFIG = TrainConfig(micro_batch=2, data=DataConfig(seq_len=64), seed=7)
_JSON = TypeAdapter(TrainConfig).dump_python(_CONFIG, mode="json")


def test_read_config_round_trip() -> None:
    assert read_config(_JSON) == _CONFIG


def test_read_config_illegal_value() -> None:
    with pytest.raises(ConfigError, match="micro_batch"):
        read_config({**_JSON, "micro_batch": 0})


def test_read_config_unknown_field_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.scan\.turbo"):
        read_config({**_JSON, "model": {**_JSON["model"], "scan": {**_JSON["model"]["scan"], "turbo": True}}})


def test_read_config_missing_field_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed"):
        read_config({key: value for key, value in _JSON.items() if key != "seed"})


def test_read_steps_ignores_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    line = (
        '{"index": 0, "phase": "compile", "seconds": 1, "ended_s": 1, "tokens": 8, "loss": NaN, "grad_norm": Infinity}'
    )
    path.write_text(line + "\n" + line[:20])
    (step,) = read_steps(path)
    assert step.loss != step.loss
    assert step.grad_norm == float("inf")


def test_read_steps_without_file(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "none") == ()


def test_read_result_keeps_non_finite_numbers(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(TrialResult.partial(loss_val=float("inf"), facts={"a": 1}).model_dump_json())
    result = read_result(path)
    assert result is not None
    assert result.loss_val == float("inf")

import gc
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ablate.experiments.design.gate import Gate, GateValue, show
from ablate.experiments.design.gates import GATES, with_gates
from ablate.experiments.design.kinds.gate_readings import read_gates
from ablate.kernels.backends import NODE_CLASSES, Lane
from ablate.kernels.scan_switches import ScanFact, ScanSwitches
from ablate.model.config import (
    AttentionConfig,
    ExpertsConfig,
    HybridConfig,
    MambaConfig,
    OptimConfig,
    StepsConfig,
    TrainConfig,
)
from ablate.model.data.dataset import Dataset, prepare
from ablate.model.data.packing import Batch
from ablate.model.errors import ConfigError, DataError, NonFiniteLoss, StillCompiling
from ablate.model.facts import ModelFact
from ablate.model.measurements import ProfiledStep, Step
from ablate.model.training import train as training
from ablate.model.training.train import TrainResult, train
from ablate.workers.built_in.training import profile_step
from tests.corpora import small_config
from tests.waiting import LIMIT_S

TINY = TrainConfig(
    model=HybridConfig(
        vocab_size=512,
        d_model=32,
        pattern="MFAE",
        mamba=MambaConfig(d_state=8, headdim=16, mimo_rank=2),
        attention=AttentionConfig(num_heads=2),
        experts=ExpertsConfig(num_experts=4, width=16, shared_width=8),
    ),
    optim=OptimConfig(learning_rate=1e-2),
    steps=StepsConfig(warmup=3, timed=11, val_rows=4),
    micro_batch=4,
    loss_chunk_tokens=48,
    threads=1,
    seed=11,
)

TRAIN_ELSEWHERE = """
import json, sys
from pathlib import Path
from ablate.model.data.dataset import prepare
from ablate.model.training.train import train
from tests.unit.model.test_train import config_for
config = config_for(Path(sys.argv[1]))
dataset = prepare(config.data, 512, cache_dir=Path(sys.argv[1]) / "cache", report=print)
result = train(config, dataset=dataset, on_step=lambda step: None)
print(json.dumps([step.loss.hex() for step in result.steps] + [result.loss_val.hex()]))
"""


def config_for(home: Path, **changes: Any) -> TrainConfig:
    return replace(TINY, data=small_config(home / "corpus"), **changes)


@pytest.fixture(scope="module")
def baseline(home: Path, dataset: Dataset) -> TrainResult:
    return run(config_for(home), dataset)


def run(config: TrainConfig, dataset: Dataset) -> TrainResult:
    return train(config, dataset=dataset, on_step=lambda _: None)


def losses(result: TrainResult) -> list[float]:
    assert result.loss_val is not None
    return [*(step.loss for step in result.steps), result.loss_val]


def scan(config: TrainConfig, **changes: Any) -> TrainConfig:
    return replace(config, model=replace(config.model, scan=ScanSwitches(**changes)))


def test_a_profiled_step_comes_after_every_measurement_and_changes_none(home: Path, dataset: Dataset) -> None:
    config = config_for(home)
    calls: list[str] = []

    def profile(step: Callable[[], None]) -> ProfiledStep:
        calls.append("profile")
        return profile_step(step, traced=True)

    def on_step(step: Step) -> None:
        calls.append(step.phase)

    plain = run(config, dataset)
    profiled = train(config, dataset=dataset, on_step=on_step, profile=profile)
    assert [(step.loss, step.grad_norm) for step in profiled.steps] == [(s.loss, s.grad_norm) for s in plain.steps]
    alike = ("loss_val", "peak_allocated_bytes", "facts", "parameters", "flops_per_step")
    assert [getattr(profiled, name) for name in alike] == [getattr(plain, name) for name in alike]
    assert calls[-1] == "profile"
    assert calls.count("profile") == 1
    assert plain.step_kernels is None
    assert "step_kernels" not in plain.model_dump(mode="json")
    rows = profiled.step_kernels
    assert rows is not None
    assert sum(count for name, count, _us in rows if "mm" in name) > 3
    assert profiled.kernel_facts == {}, "operators of a processor have no launches"
    assert all(count > 0 and spent > 0 for _name, count, spent in rows)
    assert len({name for name, _count, _spent in rows}) == len(rows)
    trace = profiled.step_trace
    assert plain.step_trace is None
    assert trace is not None
    shown = [trace.names[name] for name, _track, _start, _us in trace.events]
    assert [start for _name, _track, start, _us in trace.events] == sorted(start for _, _, start, _ in trace.events)
    assert sum("mm" in name for name in shown) > 3
    assert max(num_bytes for _moment, num_bytes in trace.memory) > 2**16
    assert all(0 <= moment <= 1e9 for moment, _bytes in trace.memory)


def test_a_validation_loss_that_is_no_number_ends_the_training(
    home: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    before: list[int] = []

    def validate(_: Any) -> float:
        before.append(len(seen))
        return math.inf

    monkeypatch.setattr(training._Trainer, "validate", validate)
    config = config_for(home, steps=StepsConfig(warmup=0, timed=3, val_rows=2, val_every=2))
    with pytest.raises(NonFiniteLoss, match="validation loss after step 2 is inf"):
        train(config, dataset=dataset, on_step=lambda step: seen.append(step.index))
    assert before == [1, 3], "one before the window, so that the later ones compile nothing, and that of the schedule"


@pytest.mark.parametrize(
    ("steps", "after"),
    [
        ({"warmup": 0, "timed": 1, "val_every": 1}, (1,)),
        ({"warmup": 3, "timed": 11, "val_every": 11}, (14,)),
        ({"warmup": 2, "timed": 7, "val_every": 3}, (5, 8, 9)),
        ({"warmup": 2, "timed": 4, "val_every": 1}, (3, 4, 5, 6)),
        ({"warmup": 2, "timed": 4}, ()),
    ],
)
def test_a_schedule_counts_timed_steps_and_ends_with_the_last_one(steps: dict[str, int], after: tuple[int]) -> None:
    assert StepsConfig(**steps).validated == after


@pytest.mark.parametrize("steps", [{"val_every": 11}, {"val_every": 2, "val_rows": 0}, {"val_every": 1, "slice": 1}])
def test_a_schedule_that_cannot_hold_is_refused(steps: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"steps\.val_every"):
        StepsConfig(**steps)


def test_train_learns(baseline: TrainResult) -> None:
    curve = [step.loss for step in baseline.steps]
    assert curve[0] == pytest.approx(math.log(512), abs=0.2)
    assert curve[-1] < curve[0] - 0.5
    assert baseline.loss_val is not None
    assert baseline.loss_val < curve[0] - 0.5


def test_train_marks_the_phases_in_order_and_a_schedule_of_validations_changes_no_step(
    home: Path, dataset: Dataset, baseline: TrainResult
) -> None:
    seen: list[Step] = []
    config = config_for(home, steps=replace(TINY.steps, val_every=4))
    result = train(config, dataset=dataset, on_step=seen.append)
    assert tuple(seen) == result.steps
    assert [step.index for step in seen] == list(range(15))
    assert [step.phase for step in seen] == ["compile"] + ["warmup"] * 3 + ["timed"] * 11
    assert {step.tokens for step in seen} == {4 * 64}
    assert all(step.seconds > 0 and step.grad_norm > 0 for step in seen)
    assert losses(result) == losses(baseline)
    assert result.peak_allocated_bytes == baseline.peak_allocated_bytes
    curve = result.validations
    assert curve is not None
    assert [one.step for one in curve] == [7, 11, 14]
    assert curve[0].loss > curve[-1].loss == result.loss_val
    for one in curve:
        after = next((step for step in seen if step.index == one.step + 1), None)
        assert seen[one.step].ended_s <= one.began_s < one.ended_s
        assert after is None or one.ended_s <= after.began_s
    assert baseline.validations is None
    assert "validations" not in baseline.model_dump(mode="json")


def test_train_gives_the_same_bits_in_fresh_processes(home: Path, dataset: Dataset, baseline: TrainResult) -> None:
    command = [sys.executable, "-c", TRAIN_ELSEWHERE, str(home)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    expected = [loss.hex() for loss in losses(baseline)]
    assert [json.loads(output) for output in outputs] == [expected, expected]


def test_train_differs_between_seeds(home: Path, dataset: Dataset, baseline: TrainResult) -> None:
    other = run(config_for(home, seed=12, steps=StepsConfig(warmup=0, timed=1, val_rows=1)), dataset)
    assert other.steps[0].loss != baseline.steps[0].loss


def test_train_reports_what_ran(baseline: TrainResult) -> None:
    assert baseline.facts[ScanFact.LANE] == "reference"
    assert baseline.facts[ScanFact.SCHEDULE] == "chunk_parallel"
    assert baseline.facts[ScanFact.CHUNK_SIZE] == 16
    assert baseline.facts[ScanFact.PSIV_RECOMPUTES] == 1
    assert ScanFact.PSIV_SAVED_BYTES not in baseline.facts
    assert baseline.facts[ModelFact.ATTENTION] == "sdpa"
    assert baseline.facts[ModelFact.LOSS] == "dense"
    assert ModelFact.COMPILED_GRAPHS not in baseline.facts
    assert (baseline.compile_s, baseline.compile_cache_hit) == (0.0, None)


ON_CPU = [
    pytest.param(gate, value, id=f"{gate.name}={show(value)}")
    for gate in GATES.values()
    for value in gate.values
    if gate.supports(NODE_CLASSES["cpu"], Lane.REFERENCE, value) is None
    if (gate.name, value) not in {("compile", True), ("loss", "compiled")}  # take their own test below
    if not gate.path.startswith("mesh.")  # several processes: test_ranked_training.py
]


@pytest.mark.parametrize(("gate", "value"), ON_CPU)
def test_every_gate_value_that_a_cpu_can_run_says_that_it_ran(
    gate: Gate, value: GateValue, home: Path, dataset: Dataset
) -> None:
    chosen = {**gate.needs(value), gate.name: value}
    pattern = TINY.model.pattern + (gate.block or "")
    plain = config_for(
        home, model=replace(TINY.model, pattern=pattern), steps=StepsConfig(warmup=0, timed=1, val_rows=0)
    )
    config = with_gates(plain, chosen)
    gates = {name: known.read(config) for name, known in GATES.items()}
    reading = read_gates(gates, run(config, dataset).facts)[gate.name]
    assert reading.live, reading
    assert reading.observed == value or gate.unused_because(gates), reading


def test_compiled_updates_are_compiled_before_step_0(home: Path, dataset: Dataset) -> None:
    config = config_for(home, steps=StepsConfig(warmup=0, timed=2, val_rows=0))
    eager = run(config, dataset)
    result = run(replace(config, optim=replace(config.optim, update="compiled")), dataset)
    assert result.facts[ModelFact.ADAMW_UPDATE] == "compiled"
    assert result.compile_s > 0 == eager.compile_s
    assert [step.compilations for step in result.steps] == [0, 0, 0]
    losses_of_it, others = ([step.loss for step in one.steps] for one in (result, eager))
    assert losses_of_it[0] == others[0], "compiling the update changes no weight"
    assert losses_of_it == pytest.approx(others, rel=1e-6)


def test_train_measures_itself(baseline: TrainResult) -> None:
    assert baseline.parameters > 512 * 32 * 2
    assert baseline.flops_per_step > 6 * 512 * 32 * 256
    assert 0 < baseline.peak_allocated_bytes < baseline.peak_reserved_bytes
    assert sum(step.seconds for step in baseline.steps) < baseline.training_s < 60


def test_pass_that_compiles_kernels_changes_no_step(
    home: Path, dataset: Dataset, baseline: TrainResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "generates_code", lambda _: True)  # an eager lane with kernels needs a GPU
    result = run(config_for(home), dataset)
    assert losses(result) == losses(baseline)
    assert result.facts == baseline.facts
    assert result.compile_s > 0
    assert result.compile_cache_hit is None


def test_train_with_another_schedule_starts_at_the_same_loss_and_says_what_ran(
    home: Path, dataset: Dataset, baseline: TrainResult
) -> None:
    short = config_for(home, steps=StepsConfig(warmup=0, timed=1, val_rows=0))
    result = run(scan(short, schedule="sequential", psiv_cache=True), dataset)
    assert result.steps[0].loss == pytest.approx(baseline.steps[0].loss, abs=1e-4)
    assert result.facts[ScanFact.SCHEDULE] == "sequential"
    assert int(result.facts[ScanFact.PSIV_SAVED_BYTES]) > 0
    assert ScanFact.PSIV_RECOMPUTES not in result.facts
    assert result.loss_val is None


@pytest.mark.parametrize("changes", [{"loss": "chunked"}, {"dtype": "bfloat16"}])
def test_train_in_another_form_stays_near_the_baseline(
    home: Path, dataset: Dataset, baseline: TrainResult, changes: dict[str, Any]
) -> None:
    result = run(config_for(home, **changes), dataset)
    np.testing.assert_allclose(losses(result), losses(baseline), rtol=0, atol=0.05)
    assert losses(result) != losses(baseline)
    assert result.facts[ModelFact.LOSS] == changes.get("loss", "dense")


def test_train_ignores_masked_targets(home: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(home, steps=StepsConfig(warmup=0, timed=2, val_rows=4))
    expected = losses(run(config, dataset))
    original = type(dataset.train).batch

    def scrambled(rows: Any, indices: Any) -> Batch:
        batch = original(rows, indices)
        return batch._replace(targets=np.where(batch.valid, batch.targets, 3))

    monkeypatch.setattr(type(dataset.train), "batch", scrambled)
    assert losses(run(config, dataset)) == expected


def test_validate_weighs_rows_by_their_valid_tokens(home: Path, dataset: Dataset) -> None:
    together = config_for(home, micro_batch=4, steps=StepsConfig(warmup=0, timed=1, val_rows=4))
    trainer = training._Trainer(together, dataset, torch.device("cpu"), started=0.0)
    one_by_one = training._Trainer(replace(together, micro_batch=1), dataset, torch.device("cpu"), started=0.0)
    assert trainer.validate() == pytest.approx(one_by_one.validate(), rel=1e-5)


def test_train_stops_at_a_loss_that_is_not_finite(home: Path, dataset: Dataset) -> None:
    config = config_for(home, optim=OptimConfig(learning_rate=1.0, warmup_steps=0, grad_clip=1e6, weight_decay=10.0))
    seen: list[Step] = []
    explosive = replace(config, steps=StepsConfig(warmup=0, timed=400, val_rows=0))
    with pytest.raises(NonFiniteLoss, match=r"of step \d+ \(timed\) is (nan|inf)"):
        train(explosive, dataset=dataset, on_step=seen.append)
    assert all(math.isfinite(step.loss) for step in seen)


def test_train_collects_garbage_before_the_warm_up_and_not_again_until_the_window_ends(
    home: Path, dataset: Dataset
) -> None:
    enabled: dict[str, set[bool]] = {}
    config = config_for(home, steps=StepsConfig(warmup=2, timed=2, val_rows=0))
    train(config, dataset=dataset, on_step=lambda step: enabled.setdefault(step.phase, set()).add(gc.isenabled()))
    assert enabled == {"compile": {True}, "warmup": {False}, "timed": {False}}
    assert gc.isenabled()


def test_load_before_the_warm_up_takes_its_seconds_and_changes_no_loss(
    home: Path, dataset: Dataset, baseline: TrainResult
) -> None:
    steps = replace(config_for(home).steps, warmup_s=0.4)
    result = run(config_for(home, steps=steps), dataset)
    assert losses(result) == losses(baseline)
    assert [step.grad_norm for step in result.steps] == [step.grad_norm for step in baseline.steps]
    assert result.facts == baseline.facts
    assert sum(result.warmup_passes) > 0.3
    first, second = result.steps[:2]
    assert second.ended_s - second.seconds - first.ended_s >= 0.4
    assert baseline.warmup_passes == ()


def test_steps_carry_a_clock_that_fits_their_seconds(baseline: TrainResult) -> None:
    for earlier, later in pairwise(baseline.steps):
        assert later.ended_s - earlier.ended_s >= later.seconds
    assert baseline.steps[0].ended_s >= baseline.steps[0].seconds
    assert baseline.steps[-1].ended_s <= baseline.training_s


def test_a_compilation_in_the_warm_up_is_followed_by_passes_until_one_compiles_nothing(
    home: Path, dataset: Dataset, baseline: TrainResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([0] * 7 + [3] + [3, 5] + [5] * 1000)  # a step or pass asks twice: the last warm-up step, then a pass
    monkeypatch.setattr(training, "compilations", lambda: next(counts))
    result = run(config_for(home), dataset)
    assert losses(result) == losses(baseline)
    assert len(result.warmup_passes) == 2
    assert sum(step.compilations for step in result.steps if step.phase == "timed") == 0


def test_a_warm_up_that_compiles_for_ever_is_an_error(
    home: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = count()
    monkeypatch.setattr(training, "compilations", lambda: next(counter))
    with pytest.raises(StillCompiling, match="20 passes in a row"):
        run(config_for(home), dataset)


def test_a_recompilation_inside_the_window_is_counted_at_its_step(
    home: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that another batch shape compiles again, in the middle of the window."""
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager", dynamic=False)
    original = type(dataset.train).batch

    def batch(rows: Any, indices: Any) -> Batch:
        compiled(torch.ones(calls[0] // 6 + 1))
        calls[0] += 1
        return original(rows, indices)

    calls = [0]
    monkeypatch.setattr(type(dataset.train), "batch", batch)
    result = run(config_for(home), dataset)
    assert [step.index for step in result.steps if step.compilations] == [0, 6, 12]


def test_train_leaves_torch_as_it_was(home: Path, dataset: Dataset) -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    run(config_for(home, threads=2, steps=StepsConfig(warmup=0, timed=1, val_rows=0)), dataset)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_validation_has_equal_rows_whatever_the_training_has(home: Path, dataset: Dataset) -> None:
    """With a learning rate of almost nothing, equal rows have equal losses."""
    still, one = OptimConfig(learning_rate=1e-8), StepsConfig(warmup=0, timed=1, val_rows=2)
    config = config_for(home, micro_batch=24, optim=still, steps=one)
    config = replace(config, model=replace(config.model, pattern="A"))
    half = replace(config, data=replace(config.data, seq_len=32, val_seq_len=64))
    joined = replace(config, data=replace(config.data, documents="joined"))
    halves = prepare(half.data, 512, cache_dir=home / "cache", report=lambda _: None)
    assert (halves.val_digest, halves.seq_len, halves.val_row) == (dataset.val_digest, 32, 64)
    assert halves.digest != dataset.digest
    plain, shorter, crossing = run(config, dataset), run(half, halves), run(joined, dataset)
    assert [step.tokens for step in shorter.steps] == [768, 768]
    assert plain.loss_val == pytest.approx(shorter.loss_val, abs=1e-4)
    assert plain.loss_val == pytest.approx(crossing.loss_val, abs=1e-4)
    assert [step.loss for step in plain.steps] != [step.loss for step in crossing.steps]
    with pytest.raises(DataError, match="validation rows have 64 tokens; the dataset's have 32"):
        run(half, replace(halves, val_row=32))


def test_train_refuses_a_dataset_of_another_row_length(home: Path, dataset: Dataset) -> None:
    config = replace(config_for(home), data=small_config(home / "corpus", seq_len=32))
    with pytest.raises(DataError, match=r"data.seq_len is 32; the dataset was packed for 64"):
        run(config, dataset)


def test_train_refuses_a_vocabulary_below_the_tokenizer(home: Path, dataset: Dataset) -> None:
    config = config_for(home)
    with pytest.raises(DataError, match=r"model.vocab_size is 300; the dataset's tokenizer needs 512"):
        run(replace(config, model=replace(config.model, vocab_size=300)), dataset)


def test_train_refuses_more_validation_rows_than_held_out_before_the_first_step(home: Path, dataset: Dataset) -> None:
    seen: list[Step] = []
    config = config_for(home, steps=StepsConfig(val_rows=60_000))
    with pytest.raises(DataError, match=r"steps.val_rows is 60000; allowed: 0 to"):
        train(config, dataset=dataset, on_step=seen.append)
    assert seen == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_train_compiled_follows_the_eager_curve_and_tells_its_compilation(
    home: Path, dataset: Dataset, baseline: TrainResult
) -> None:
    config = config_for(home, compile=True, loss="compiled")
    result = run(replace(config, model=replace(config.model, pattern="F")), dataset)
    eager = run(replace(config, compile=False, loss="dense", model=replace(config.model, pattern="F")), dataset)
    assert (result.facts[ModelFact.LOSS], eager.facts[ModelFact.LOSS]) == ("compiled", "dense")
    np.testing.assert_allclose(losses(result), losses(eager), rtol=0, atol=1e-3)
    assert int(result.facts[ModelFact.COMPILED_GRAPHS]) >= 1
    assert result.compile_s > 0
    assert result.compile_cache_hit in (True, False)
    assert all(later.index == earlier.index + 1 for earlier, later in pairwise(result.steps))

"""Slices inside of training: which steps run in one go, what is waited for, and that nothing else changes."""

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ablate.model.config import StepsConfig
from ablate.model.errors import ConfigError
from ablate.model.measurements import Step
from ablate.model.training.train import train
from tests.corpora import small_dataset
from tests.unit.model.test_train import TINY, config_for

WAIT_S = 0.02


def test_slices_cut_the_window_and_nothing_else_whatever_is_drawn() -> None:
    chance = random.Random(11)  # noqa: S311 - reproducible by design
    for _ in range(200):
        size, number, warmup = chance.randint(1, 20), 2 * chance.randint(1, 20), chance.randint(0, 9)
        steps = StepsConfig(warmup=warmup, timed=size * number, slice=size)
        assert [index for part in steps.slices for index in part] == list(range(1 + warmup, steps.total))
        assert [len(part) for part in steps.slices] == [size] * number
        (whole,) = StepsConfig(warmup=warmup, timed=size * number).slices
        assert whole == range(1 + warmup, steps.total)


@pytest.mark.parametrize(("timed", "size"), [(10, 3), (10, 10), (9, 3), (10, -1), (4, 8)])
def test_slices_that_are_no_even_number_of_equal_ones_are_refused(timed: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"is {size}; allowed: 0, or a size that cuts {timed} timed steps"):
        StepsConfig(timed=timed, slice=size)


def test_a_trial_yields_before_every_slice_and_after_the_last_and_trains_as_ever(tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path)
    config = config_for(tmp_path, steps=StepsConfig(warmup=2, timed=8, slice=2, val_rows=4))
    seen: list[int] = []
    yielded: list[list[int]] = []

    def note(step: Step) -> None:
        seen.append(step.index)

    def others() -> None:
        yielded.append(list(seen))
        time.sleep(WAIT_S)

    sliced = train(config, dataset=dataset, on_step=note, yield_to_others=others)
    assert yielded == [list(range(number)) for number in (3, 5, 7, 9, 11)]
    assert sliced.waited_s is not None
    assert sliced.waited_s >= 5 * WAIT_S
    starts = [step.began_s for step in sliced.steps if step.index in (3, 5, 7, 9)]
    ends = [step.ended_s for step in sliced.steps if step.index in (2, 4, 6, 8)]
    assert all(began - ended >= WAIT_S for began, ended in zip(starts, ends, strict=True))
    whole = train(replace(config, steps=replace(config.steps, slice=0)), dataset=dataset, on_step=note)
    assert [step.loss for step in whole.steps] == [step.loss for step in sliced.steps]
    assert (whole.loss_val, whole.waited_s) == (sliced.loss_val, None)
    assert whole.training_began_s > sliced.training_began_s + sliced.training_s + sliced.waited_s


def test_slices_without_anybody_to_yield_to_are_an_error(tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path)
    sliced = config_for(tmp_path, steps=StepsConfig(timed=8, slice=2))
    with pytest.raises(ValueError, match=r"steps.slice is 2, but yield_to_others is absent"):
        train(sliced, dataset=dataset, on_step=lambda _: None)
    with pytest.raises(ValueError, match=r"steps.slice is 0, but yield_to_others is present"):
        train(config_for(tmp_path), dataset=dataset, on_step=lambda _: None, yield_to_others=lambda: None)
    assert TINY.steps.slice == 0

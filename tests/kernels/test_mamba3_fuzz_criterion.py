"""The criterion finds planted mistakes, and finds none in an honest bfloat16 implementation: the reference lane."""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("tilelang")

from kernels.mamba3_mimo import mamba3_mimo
from kernels.mamba3_mimo.accuracy import outputs, scanned
from kernels.mamba3_mimo.fuzz import criterion
from kernels.mamba3_mimo.fuzz.problems import ScanProblem
from kernels.mamba3_mimo.fuzz.tensors import made
from kernels.scan import ScanSwitches

DECAYS = ("initial", "benchmark", "weak", "strong", "mixed")
LENGTHS = (5, 64, 97)
PROBLEMS = [
    ScanProblem(B=2, S=length, H=4, G=2, N=16, P=32, R=2, decay=decay, documents=2, cumulated=True, seed=seed)
    for seed, (decay, length) in enumerate((decay, length) for decay in DECAYS for length in LENGTHS)
]
AT = 3
"""Token at which a mistake is made."""


def computed(inputs, grad_out):
    """Return what the reference lane makes of the inputs in their own dtypes."""
    return outputs(scanned(ScanSwitches()), inputs, grad_out)


def one_token_turned_a_twentieth_too_far(inputs, grad_out):
    angles = inputs.angles.clone()
    angles[:, AT] += math.tau / 20
    return computed(replace(inputs, angles=angles), grad_out)


def angles_of_one_head_drift_away(inputs, grad_out):
    angles = inputs.angles.clone()
    angles[:, :, 1] += torch.linspace(0, 0.1, angles.shape[1]).view(1, -1, 1)
    return computed(replace(inputs, angles=angles), grad_out)


def dropped_token(inputs, grad_out):
    v = inputs.v.clone()
    v[:, AT] = 0
    return computed(replace(inputs, v=v), grad_out)


def dropped_chunk_in_one_head(inputs, grad_out):
    v = inputs.v.clone()
    v[:, :16, 2] = 0
    return computed(replace(inputs, v=v), grad_out)


def missing_document_reset(inputs, grad_out):
    return computed(replace(inputs, segment_ids=None), grad_out)


def reset_one_token_late(inputs, grad_out):
    ids = inputs.segment_ids.roll(1, 1)
    ids[:, 0] = ids[:, 1]
    return computed(replace(inputs, segment_ids=ids), grad_out)


def neighbour_s_group(inputs, grad_out):
    return computed(replace(inputs, q=inputs.q.flip(3)), grad_out)


def skip_left_out_in_one_head(inputs, grad_out):
    D = inputs.D.clone()
    D[1] = 0
    return computed(replace(inputs, D=D), grad_out)


def shifted(name, axis):
    def mistake(inputs, grad_out):
        got = computed(inputs, grad_out)
        return got | {name: got[name].roll(1, axis)}

    mistake.__name__ = f"{name}_shifted_by_one_token"
    return mistake


def last_token_missing(name, axis):
    def mistake(inputs, grad_out):
        got = computed(inputs, grad_out)
        kept = torch.ones(got[name].shape[axis])
        kept[-1] = 0
        return got | {name: got[name] * kept.view([-1 if at == axis else 1 for at in range(got[name].dim())])}

    mistake.__name__ = f"{name}_of_the_last_token_missing"
    return mistake


def off(name, percent):
    def mistake(inputs, grad_out):
        got = computed(inputs, grad_out)
        return got | {name: got[name] * (1 + percent / 100)}

    mistake.__name__ = f"{name}_{percent}_percent_off"
    return mistake


def state_before_the_last_token(inputs, grad_out):
    got = computed(inputs, grad_out)
    short = {name: getattr(inputs, name)[:, :-1] for name in ("q", "k", "v", "z", "angles", "segment_ids")}
    short |= {name: getattr(inputs, name)[..., :-1] for name in ("adt", "dt", "trap")}
    before = mamba3_mimo(replace(inputs, **short), return_final_state=True).final_state
    return got | {"state": before.state}


def bias_gradient_without_one_token(inputs, grad_out):
    got = computed(inputs, grad_out)
    seen = grad_out.clone()
    seen[:, AT] = 0
    return got | {"k_bias": computed(inputs, seen)["k_bias"]}


TIME_AXIS = {"q": 1, "k": 1, "v": 1, "z": 1, "angles": 1, "adt": 2, "dt": 2, "trap": 2}
MISTAKES = [
    one_token_turned_a_twentieth_too_far, angles_of_one_head_drift_away, dropped_token, dropped_chunk_in_one_head,
    missing_document_reset, reset_one_token_late, neighbour_s_group, skip_left_out_in_one_head,
    state_before_the_last_token, bias_gradient_without_one_token,
    *(shifted(name, axis) for name, axis in TIME_AXIS.items()),
    *(last_token_missing(name, axis) for name, axis in TIME_AXIS.items()),
    *(off(name, 3) for name in ("out", "state", *TIME_AXIS, "psi", "q_bias") if name != "angles"), off("angles", 8),
]  # fmt: skip


@pytest.fixture(autouse=True)
def nan_filled_buffers():
    """Replace the folder's fixture: nothing here writes buffers of its own."""
    return


@pytest.fixture(scope="module")
def yardsticks():
    torch.set_num_threads(1)
    found = []
    for problem in PROBLEMS:
        inputs, grad_out = made(problem)
        found.append((problem, inputs, grad_out, criterion.yardstick(inputs, grad_out)))
    return found


def wrong(got, exact, noise):
    return [name for name, share in criterion.measured(got, exact, noise).items() if not share.right]


def test_honest_rounding_is_right_on_every_problem(yardsticks):
    bad = {p.line: wrong(computed(inputs, grad_out), *measure) for p, inputs, grad_out, measure in yardsticks}
    assert {line: names for line, names in bad.items() if names} == {}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_planted_mistake_is_found_on_most_problems(mistake, yardsticks):
    missed = [p.line for p, inputs, grad_out, measure in yardsticks if not wrong(mistake(inputs, grad_out), *measure)]
    assert len(missed) <= len(yardsticks) // 5, missed

"""The criterion finds planted mistakes, and finds none in an honest bfloat16 implementation: the reference lane."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("tilelang")

from ablate.kernels.mamba3_mimo import mamba3_mimo, reference
from ablate.kernels.mamba3_mimo.cuda.pieces.positions import EDGE
from ablate.kernels.scan_switches import ScanSwitches
from tests.kernels import criterion
from tests.kernels.fuzz.problems import ScanProblem
from tests.kernels.fuzz.tensors import made
from tests.kernels.problem import outputs, scanned

DECAYS = ("initial", "benchmark", "weak", "strong", "mixed")
LENGTHS = (5, 64, 97)
PROBLEMS = [
    ScanProblem(B=2, S=length, H=4, G=2, N=16, P=32, R=2, decay=decay, documents=2, cumulated=True, seed=seed)
    for seed, (decay, length) in enumerate((decay, length) for decay in DECAYS for length in LENGTHS)
]
AT = 3
"""Token at which a mistake is made."""
JUDGED_BY = criterion.SAMPLES_IN_DOUBT
"""What says the last word about a mistake."""


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


def write_of_the_next_step_dropped(inputs, grad_out):
    """The halo: what a token's successor adds of its write, as at the end of a chunk that does not look ahead."""
    look_ahead = reference._sigma

    def dropped(parts):
        kept = torch.ones(parts.gamma_BHS.shape[-1])
        kept[AT] = 0
        return look_ahead(parts) * kept

    with mock.patch.object(reference, "_sigma", dropped):
        return computed(inputs, grad_out)


def half_too_much_in_the_loudest_row(name):
    def mistake(inputs, grad_out):
        got = computed(inputs, grad_out)
        rows = got[name].clone().flatten()
        rows[rows.abs().argmax()] *= 1.5
        return got | {name: rows.view(got[name].shape)}

    mistake.__name__ = f"{name}_half_too_much_in_the_loudest_row"
    return mistake


def one_term_of_the_sums_missing(inputs, grad_out):
    """In the gradient of the decay, from the start of a block of tokens up to the token whose term is lost."""
    got = computed(inputs, grad_out)
    terms = (got["out"] * grad_out).double().sum(-1) - (got["v"] * inputs.v).double().sum(-1)
    adt = got["adt"].clone()
    at = int(terms[0, :, 0].abs().argmax())
    adt[0, 0, : at + 1] -= terms[0, at, 0]
    return got | {"adt": adt}


TIME_AXIS = {"q": 1, "k": 1, "v": 1, "z": 1, "angles": 1, "adt": 2, "dt": 2, "trap": 2}
MISTAKES = [
    one_token_turned_a_twentieth_too_far, angles_of_one_head_drift_away, dropped_token, dropped_chunk_in_one_head,
    missing_document_reset, reset_one_token_late, neighbour_s_group, skip_left_out_in_one_head,
    state_before_the_last_token, bias_gradient_without_one_token, write_of_the_next_step_dropped,
    one_term_of_the_sums_missing, *(half_too_much_in_the_loudest_row(name) for name in ("adt", "dt", "trap")),
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
    cases = []
    for problem in PROBLEMS:
        inputs, grad_out = made(problem)
        cases.append((problem, inputs, grad_out, criterion.yardstick(inputs, grad_out, samples=JUDGED_BY)))
    return cases


def wrong(got, measure):
    return [name for name, share in criterion.measured(got, measure).items() if not share.right]


def test_honest_rounding_is_right_on_every_problem(yardsticks):
    bad = {p.line: wrong(computed(inputs, grad_out), measure) for p, inputs, grad_out, measure in yardsticks}
    assert {line: names for line, names in bad.items() if names} == {}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_planted_mistake_is_found_on_most_problems(mistake, yardsticks):
    missed = [p.line for p, inputs, grad_out, measure in yardsticks if not wrong(mistake(inputs, grad_out), measure)]
    assert len(missed) <= len(yardsticks) // 5, missed


def test_what_few_samples_call_wrong_is_judged_by_many_and_what_they_call_right_is_not(monkeypatch):
    inputs, grad_out = made(PROBLEMS[0])
    measured, asked = criterion.yardstick, []

    def yardstick(*given, samples, **options):
        asked.append(samples)
        measure = measured(*given, samples=samples, **options)
        few = {"adt": measure.noise["adt"] * 1e-9} if samples == criterion.SAMPLES else {}
        return measure._replace(
            noise=measure.noise | few, carried={"adt": 0 * measure.carried["adt"]} if few else measure.carried
        )

    got = computed(inputs, grad_out)
    assert criterion.wrong(got, inputs, grad_out) == {}
    monkeypatch.setattr(criterion, "yardstick", yardstick)
    assert criterion.wrong(got, inputs, grad_out) == {}
    assert asked == [criterion.SAMPLES, criterion.SAMPLES_IN_DOUBT]
    asked.clear()
    assert criterion.wrong({name: got[name] for name in got if name != "adt"}, inputs, grad_out) == {}
    assert asked == [criterion.SAMPLES]
    assert set(criterion.wrong(got | {"out": 2 * got["out"]}, inputs, grad_out)) == {"out"}


def test_a_row_of_a_sum_has_the_noise_of_its_document_up_to_an_edge_away():
    assert criterion.SUMMED == EDGE
    problem = ScanProblem(S=200, H=1, N=16, P=32, R=1, documents=2)
    inputs, grad_out = made(problem)
    ids = torch.zeros(1, 200, dtype=torch.int64)
    ids[:, 120:] = 5
    inputs = replace(inputs, segment_ids=ids)
    exact = {"out": torch.zeros(1, 200, 1, 32).double(), "v": torch.zeros(1, 200, 1, 32).double()}
    noise = torch.zeros(1, 200, 1).double()
    noise[0, 100] = 1
    (carried,) = criterion.carried(exact, {"adt": noise}, inputs, grad_out).values()
    assert carried.flatten().nonzero().flatten().tolist() == [*range(100 - EDGE + 1, 100), *range(101, 120)]


def test_the_rounding_of_a_loud_row_is_right_in_the_sums_before_it_and_wrong_in_another_document():
    inputs, grad_out = made(ScanProblem(S=128, H=1, N=16, P=32, R=1, decay="strong", seed=3))
    ids, adt = torch.zeros(1, 128, dtype=torch.int64), inputs.adt.clone()
    ids[:, 100:], adt[..., 100:] = 5, -20.0  # nothing survives a token of the second document
    measure = criterion.yardstick(replace(inputs, segment_ids=ids, adt=adt), grad_out)
    loud = measure.exact["adt"][0, 0].abs()
    error = criterion.HALF_A_PLACE / 2 * loud[:64].max()
    low = int(loud[:64].argmin())
    assert error > 20 * measure.noise["adt"][0, low, 0].sqrt()
    for token, right in ((low, True), (110, False)):
        adt = measure.exact["adt"].clone()
        adt[0, 0, token] += error
        assert (criterion.measured({"adt": adt}, measure)["adt"].row <= criterion.SUM_LIMIT) == right, token


def test_sums_that_cancel_below_float32_are_right_and_a_little_above_are_wrong():
    """A head in which nothing survives a token: its gradients of decay are far below the rounding of their terms."""
    inputs, grad_out = made(ScanProblem(S=6, H=1, N=16, P=32, R=1, decay="strong", seed=1))
    inputs = replace(inputs, adt=torch.full_like(inputs.adt, -40.0))
    measure = criterion.yardstick(inputs, grad_out)
    terms = (measure.exact["out"] * grad_out.double()).abs().sum(-1).max()
    for off, right in ((2.0**-24, True), (2.0**-15, False)):
        adt = measure.exact["adt"] + off * terms
        assert (criterion.measured({"adt": adt}, measure)["adt"].row <= criterion.SUM_LIMIT) == right

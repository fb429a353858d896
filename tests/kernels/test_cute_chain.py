"""Chains of products in CuTe DSL are right for random sizes, and the bench times only what its check accepts."""

import random
from importlib.util import find_spec

import pytest
import torch

from kernels.errors import KernelError, KernelUnsupported
from tests.kernels.bench import chain, parts, render
from tests.kernels.bench.chain import BMM, ONE_LAUNCH, THREE_LAUNCHES, ChainCase
from tests.kernels.bench.parts import BenchRun
from tests.kernels.bench.report import ChainRow, Machine, TablePart, Times, sorted_rows, store, stored

SMALL = ChainCase(name="small", batch=3, rows=64, width=64)
needs_cutlass = pytest.mark.skipif(find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed")


def drawn_case(seed: int) -> ChainCase:
    """Return a chain of random sizes, with batches around the number of multiprocessors and edges of the tiles."""
    draw = random.Random(seed)  # noqa: S311
    batch = draw.choice((1, 2, 131, 132, 133, draw.randint(3, 700)))
    return ChainCase(
        name=str(seed), batch=batch, rows=64 * draw.choice((1, 2, 3, draw.randint(4, 9))),
        width=draw.choice(chain.WIDTHS), products=draw.choice((1, 2, 3, 3, 4)), seed=seed,
    )  # fmt: skip


def is_right(result: torch.Tensor, want: torch.Tensor) -> bool:
    return not chain.wrong(*chain.errors(result, want))


@pytest.mark.gpu
@needs_cutlass
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("variant", [ONE_LAUNCH, THREE_LAUNCHES])
def test_chain_of_random_sizes_is_right(variant, seed):
    left, rights = chain.make_operands(drawn_case(seed))
    result = chain.result_of(variant, left, rights)
    assert is_right(result.cpu(), chain.exact(left.cpu(), [right.cpu() for right in rights]))


@pytest.mark.gpu
@needs_cutlass
def test_one_launch_equals_three_launches_bit_for_bit():
    left, rights = chain.make_operands(ChainCase(name="", batch=133, rows=128, width=128))
    one, three = (chain.result_of(variant, left, rights) for variant in (ONE_LAUNCH, THREE_LAUNCHES))
    assert torch.equal(one, three)


@pytest.mark.gpu
@needs_cutlass
def test_kernel_without_the_second_product_is_caught():
    left, (B, C, D) = chain.make_operands(SMALL)
    result = chain.result_of(ONE_LAUNCH, left, (B, D)).cpu()
    left, B, C, D = (tensor.cpu() for tensor in (left, B, C, D))
    assert is_right(result, chain.exact(left, (B, D)))
    assert not is_right(result, chain.exact(left, (B, C, D)))


@pytest.mark.gpu
@needs_cutlass
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_extreme_values_stay_in_their_item(value):
    left, rights = chain.make_operands(SMALL)
    left[1, 5, 7] = value
    result = chain.result_of(ONE_LAUNCH, left, rights).cpu()
    want = chain.exact(left.cpu(), [right.cpu() for right in rights])
    assert is_right(result[[0, 2]], want[[0, 2]])
    assert torch.equal(result[1].isfinite().all(-1), want[1].isfinite().all(-1))


@pytest.mark.gpu
@needs_cutlass
def test_empty_batch_has_an_empty_result():
    left = torch.empty(0, 64, 64, device="cuda", dtype=torch.bfloat16)
    assert chain.result_of(ONE_LAUNCH, left, (left,) * 3).shape == (0, 64, 64)


def test_chain_rounds_every_product_by_hand():
    left = torch.tensor([[[1.0, 1 / 256]]], dtype=torch.bfloat16)  # 1 + 1/256 rounds to 1 in bfloat16
    sums = torch.tensor([[[1.0, 0.0], [1.0, 1.0]]], dtype=torch.bfloat16)
    less = torch.tensor([[[256.0, 0.0], [0.0, 1.0]]], dtype=torch.bfloat16)
    assert chain.exact(left, (sums,)).tolist() == [[[1.0, 1 / 256]]]
    assert chain.exact(left, (sums, less)).tolist() == [[[256.0, 1 / 256]]]


def test_torch_bmm_is_right_on_the_processor_and_makes_three_products():
    left, rights = chain.make_operands(SMALL, "cpu")
    assert is_right(chain.result_of(BMM, left, rights), chain.exact(left, rights))


LIES = {
    "the second product is left out": lambda left, B, C, D: chain.exact(left, (B, D)),
    "products are in another order": lambda left, B, C, D: chain.exact(left, (C, B, D)),
    "a right operand is transposed": lambda left, B, C, D: chain.exact(left, (B, C.mT, D)),
    "intermediate results are not rounded": lambda left, B, C, D: (
        left.double() @ B.double() @ C.double() @ D.double()
    ).bfloat16(),
    "the last item is not written": lambda left, B, C, D: torch.cat(
        (chain.exact(left, (B, C, D))[:-1], torch.full_like(left[-1:], float("nan")))
    ),
    "one item has the operands of another": lambda left, B, C, D: chain.exact(left, (B, C[[0, 0, 2]], D)),
    "one column is zero": lambda left, B, C, D: chain.exact(left, (B, C, D)) * (torch.arange(64) != 7),
}


@pytest.mark.parametrize("lie", LIES)
def test_planted_lie_is_caught(lie):
    left, rights = chain.make_operands(SMALL, "cpu")
    want = chain.exact(left, rights)
    assert is_right(want, want)
    assert not is_right(LIES[lie](left, *rights), want)


def operands(batch=2, rows=64, width=64, **options):
    return torch.zeros(batch, rows, width, **{"dtype": torch.bfloat16} | options)


@pytest.mark.parametrize(
    ("left", "right", "reason"),
    [
        (operands(dtype=torch.float16), operands(), "dtypes are torch.float16, torch.bfloat16; supported"),
        (operands(), operands(dtype=torch.float32), "supported: torch.bfloat16"),
        (operands(rows=65), operands(), r"A is \(2, 65, 64\); supported: \(batch, a multiple of 64"),
        (operands(rows=0), operands(), "a multiple of 64"),
        (operands(width=96), operands(96, 96), r"one of \(64, 128\)"),
        (operands()[0], operands(), r"A is \(64, 64\)"),
        (operands(), operands(rows=128, width=128), r"supported: one or more \(2, 64, 64\)"),
        (operands(), operands(batch=3), r"right operands are \(3, 64, 64\)"),
        (operands(), operands().mT, "not contiguous"),
        (operands(), operands(width=65)[..., 1:], "not contiguous"),
        (torch.zeros(2 * 64 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 64, 64), operands(), "aligned to 16 bytes"),
        (operands(), operands(device="meta"), "on cpu, meta; supported: one device"),
        (operands(), operands(), "on cpu; supported: a GPU of compute capability 9.0"),
    ],
)
@pytest.mark.parametrize("variant", [ONE_LAUNCH, THREE_LAUNCHES])
def test_kernel_refuses_what_it_does_not_support(variant, left, right, reason):
    with pytest.raises(KernelUnsupported, match=reason):
        chain.runner(variant, left, (right,))


def test_kernel_refuses_a_chain_without_right_operands():
    with pytest.raises(KernelUnsupported, match="right operands are none"):
        chain.runner(ONE_LAUNCH, operands(), ())


class FakeLane:
    """Answers like a lane whose chains have these errors, or that refuses these variants."""

    lane = "cuda"

    def __init__(self, errors, refused):
        self.errors, self.refused, self.calls = errors, refused, []

    def ask(self, function, *arguments):
        self.calls.append((function, *arguments))
        if function == "prepare_chain":
            if arguments[0] in self.refused:
                raise KernelError(self.refused[arguments[0]])
            return self.errors.get(arguments[0], (0.001, 0.0001))
        return {"sample_ms": [0.03] * 2, "kernels_ms": {"one": 0.01, "two": 0.02}}.get(function)


def test_a_variant_is_timed_only_if_it_is_right():
    lane = FakeLane({THREE_LAUNCHES: (0.001, 0.0032)}, {ONE_LAUNCH: "nvidia-cutlass-dsl is not installed"})
    bench = BenchRun(lanes=(lane,), rounds=2, repeats=2, ceilings={})
    rows = {row.variant: row for row in parts.chain(bench, [SMALL])}
    assert rows[BMM].times == Times(kernels_ms=0.03, graph_ms=[0.03] * 4, eager_ms=[0.03] * 4)
    assert (rows[BMM].refused, rows[BMM].largest, rows[BMM].norm) == (None, 0.001, 0.0001)
    assert rows[THREE_LAUNCHES].refused == "the check failed; no speed is measured"
    assert rows[ONE_LAUNCH].refused == "nvidia-cutlass-dsl is not installed"
    assert rows[THREE_LAUNCHES].times == rows[ONE_LAUNCH].times == Times()
    assert {call[1] for call in lane.calls if call[0] in ("capture", "sample_ms", "kernels_ms")} == {BMM}


def test_nan_is_wrong():
    assert chain.wrong(float("nan"), 0.0)
    assert chain.wrong(0.0, float("nan"))


def test_part_is_stored_and_shown_with_ratios_and_refusals(tmp_path):
    machine = Machine(
        date="2026-11-27T10:00:00+00:00", device="NVIDIA H100", driver="580", clocks_before="1", clocks_after="1",
        versions={"cuda": {"nvidia-cutlass-dsl": "4.8.1"}},
    )  # fmt: skip
    rows = [
        ChainRow(
            name="small", variant=BMM, largest=0.001, norm=0.0001,
            times=Times(kernels_ms=0.036, graph_ms=[0.04], eager_ms=[0.05]),
        ),
        ChainRow(
            name="small", variant=ONE_LAUNCH, largest=0.002, norm=0.0002,
            times=Times(kernels_ms=0.018, eager_ms=[0.04], no_graph="not capturable"),
        ),
        ChainRow(name="small", variant=THREE_LAUNCHES, refused="nvidia-cutlass-dsl is not installed"),
    ]  # fmt: skip
    part = TablePart(part="chain", machine=machine, **sorted_rows(rows))
    store(part, tmp_path)
    assert stored(tmp_path, ("chain",)) == [part]
    text = render.page([part])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "| small" in line]
    assert lines == [
        ["small", BMM, "0.00100", "0.00010", "36.0", "40.0", "50.0", "1.00", "1.00", "1.00", "-"],
        ["small", ONE_LAUNCH, "0.00200", "0.00020", "18.0", "-", "40.0", "0.50", "-", "0.80", "not capturable"],
        ["small", THREE_LAUNCHES, *"--------", "nvidia-cutlass-dsl is not installed"],
    ]
    assert "does not name its sizes" in text

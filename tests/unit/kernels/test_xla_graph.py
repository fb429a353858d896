import random

import pytest

from ablate.kernels.xla.graph import barrier_bytes, count_collectives, count_custom_calls, count_loops, matmul_flops


def _shape(dims: list[int]) -> str:
    return f"bf16[{','.join(map(str, dims))}]{{{','.join(map(str, reversed(range(len(dims)))))}}}"


def _dot(name: str, batch: list[int], m: int, k: int, n: int) -> tuple[str, int]:
    """Write one batched matrix product as XLA prints it; return it with its FLOPs."""
    left, right, result = [*batch, m, k], [*batch, k, n], [*batch, m, n]
    axes = ",".join(map(str, range(len(batch))))
    batches = f"lhs_batch_dims={{{axes}}}, rhs_batch_dims={{{axes}}}, " if batch else ""
    text = (
        f"  %{name} = {_shape(result)} dot({_shape(left)} %a, {_shape(right)} %b), {batches}"
        f"lhs_contracting_dims={{{len(batch) + 1}}}, rhs_contracting_dims={{{len(batch)}}}"
    )
    flops = 2 * m * k * n
    for size in batch:
        flops *= size
    return text, flops


def _computation(name: str, lines: list[str], *, entry: bool = False) -> str:
    head = f"ENTRY %{name} (p: f32[]) -> f32[] {{" if entry else f"%{name} (p: f32[]) -> f32[] {{"
    return "\n".join((head, *lines, "}", ""))


def _condition(name: str, limit: str) -> str:
    lines = [
        "  %i = s64[] get-tuple-element((s64[], f32[]) %p), index=0",
        f"  %limit = s64[] {limit}",
        "  ROOT %less = pred[] compare(s64[] %i, s64[] %limit), direction=LT",
    ]
    return _computation(name, lines)


def _loop(body: str, condition: str) -> str:
    return f"  %loop.{body} = (s64[], f32[]) while((s64[], f32[]) %t), condition=%{condition}, body=%{body}"


@pytest.mark.parametrize("seed", range(20))
def test_products_are_counted_with_the_trips_of_every_loop_around_them(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    outer, inner = draw.randint(1, 50), draw.randint(1, 50)
    dots = [
        _dot(f"d{i}", [draw.randint(1, 9) for _ in range(draw.randint(0, 2))], *(draw.randint(1, 300) for _ in "mkn"))
        for i in range(4)
    ]
    (alone, once), (called, by_call), (middle, of_outer), (deep, of_inner) = dots
    text = "\n".join(
        (
            "HloModule step, entry_computation_layout={()->f32[]}\n",
            _condition("inner_cond", f"constant({inner})"),
            _computation("inner_body", [deep]),
            _condition("outer_cond", f"constant({outer})"),
            _computation("outer_body", [middle, _loop("inner_body", "inner_cond")]),
            _computation("helper", [called]),
            _computation(
                "main",
                [
                    alone,
                    _loop("outer_body", "outer_cond"),
                    "  %c = f32[] call(f32[] %p), to_apply=%helper",
                    "  %again = f32[] call(f32[] %p), to_apply=%helper",
                ],
                entry=True,
            ),
        )
    )
    assert matmul_flops(text) == once + 2 * by_call + outer * (of_outer + inner * of_inner)


def test_products_in_a_loop_of_unknown_length_are_not_guessed() -> None:
    body, _ = _dot("d", [], 2, 3, 4)
    condition = _condition("cond", "parameter(0)")
    text = condition + _computation("body", [body]) + _computation("main", [_loop("body", "cond")], entry=True)
    assert matmul_flops(text) is None
    without = condition + _computation("body", ["  %x = f32[] add(f32[] %p, f32[] %p)"])
    assert matmul_flops(without + _computation("main", [_loop("body", "cond")], entry=True)) == 0


def test_kernels_are_counted_by_their_names_and_others_by_their_targets() -> None:
    call = '  %c = f32[2]{0} custom-call(), custom_call_target="tpu_custom_call", backend_config={"body": "K"}'
    other = '  %o = f32[2]{0} custom-call(f32[2]{0} %p), custom_call_target="TopK"'
    names = {"one": "_flash_attention_kernel", "two": "_flash_attention_dq_kernel"}
    text = "\n".join((call.replace("K", "one"), call.replace("K", "two"), call.replace("K", "one"), other))
    assert count_custom_calls(text, names) == {
        "TopK": 1,
        "_flash_attention_dq_kernel": 1,
        "_flash_attention_kernel": 2,
    }


def test_an_asynchronous_collective_counts_once() -> None:
    text = "\n".join(
        (
            "  %s = (f32[2], f32[8]) all-gather-start(f32[2] %p), dimensions={0}",
            "  %d = f32[8] all-gather-done((f32[2], f32[8]) %s)",
            "  %r = f32[2] all-reduce(f32[2] %p), to_apply=%add",
        )
    )
    counted = count_collectives(text)
    assert (counted["all-gather"], counted["all-reduce"], counted["reduce-scatter"]) == (1, 1, 0)


@pytest.mark.parametrize("seed", range(20))
def test_loops_are_counted_by_their_trips_inside_others_and_in_calls(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    outer, inner, alone = draw.randint(1, 9), draw.randint(10, 19), draw.randint(20, 29)
    text = "\n".join(
        (
            "HloModule step\n",
            _condition("inner_cond", f"constant({inner})"),
            _computation("inner_body", []),
            _condition("outer_cond", f"constant({outer})"),
            _computation("outer_body", [_loop("inner_body", "inner_cond")]),
            _condition("alone_cond", f"constant({alone})"),
            _computation("alone_body", []),
            _computation("helper", [_loop("alone_body", "alone_cond")]),
            _computation(
                "main",
                [
                    _loop("outer_body", "outer_cond"),
                    *(f"  %c{i} = f32[] call(f32[] %p), to_apply=%helper" for i in range(3)),
                ],
                entry=True,
            ),
        )
    )
    assert count_loops(text) == {outer: 1, inner: outer, alone: 3}


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("  %b = (f32[2,3]{1,0}, bf16[5]{0}) opt-barrier((f32[2,3]{1,0}, bf16[5]{0}) %t)", 34),
        ("  %b = (pred[7]{0}, s64[]) opt-barrier((pred[7]{0}, s64[]) %t)", 15),
        ("  ROOT %b = f32[10]{0} opt-barrier(f32[10]{0} %t)", 40),
        ("  %g = f32[10]{0} get-tuple-element((f32[10]{0}) %opt-barrier.1), index=0", 0),
    ],
)
def test_what_passes_a_barrier_is_counted_in_bytes(line: str, size: int) -> None:
    assert barrier_bytes(_computation("main", [line], entry=True)) == size


def test_layouts_are_no_kernels() -> None:
    lines = ['  %s = f32[8]{0} custom-call(f32[8]{0} %p), custom_call_target="Sharding", sharding={devices=[4]<=[4]}']
    assert count_custom_calls(_computation("main", lines, entry=True), {}) == {}

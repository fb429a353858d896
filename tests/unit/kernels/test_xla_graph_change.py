import random

from ablate.kernels.xla.graph import LINE_LIMIT, SHOWN, describe_change


def module(lines: list[str]) -> str:
    return "\n".join(["HloModule step", "ENTRY %main {", *(f"  {line}" for line in lines), "}"])


def instruction(number: int, opcode: str, source: int, *, tail: str = "") -> str:
    named = f'metadata={{op_name="s{number}"}}'
    return f"%{opcode}.{number} = f32[4,64]{{1,0}} {opcode}(f32[4,64]{{1,0}} %x.{source}){tail}, {named}"


def test_numbers_of_instructions_and_metadata_are_no_difference() -> None:
    draw = random.Random(1)  # noqa: S311
    opcodes = [draw.choice(["add", "exponential", "negate"]) for _ in range(50)]
    one, other = (
        module([instruction(start + i, op, start + i - 1) for i, op in enumerate(opcodes)]) for start in (1, 700)
    )
    assert describe_change(one, other) == "the same instructions, joined in another way"


def test_a_moved_boundary_is_quoted_first_and_all_are_counted() -> None:
    plain = [instruction(i, "add", i - 1) for i in range(20)]
    cut = [instruction(30, "slice", 3, tail=f", slice={{[0:4], [{at}:64]}}") for at in (9, 50)]
    said = describe_change(module([*plain, cut[0]]), module([*plain, cut[1], instruction(31, "abs", 30)]))
    assert said.startswith("2 of its 22 instructions are new, 1 of 21 are gone; new: %slice = ")
    assert "[50:64]" in said.partition("gone: ")[0]
    assert "[9:64]" in said.partition("gone: ")[2]


def test_a_sentence_stays_short_however_much_changed() -> None:
    one = module([instruction(i, f"old{'x' * 300}", i) for i in range(100)])
    other = module([instruction(i, f"new{i}{'y' * 300}", i) for i in range(100)])
    assert len(describe_change(one, other)) < 2 * (SHOWN + 1) * (LINE_LIMIT + 20)

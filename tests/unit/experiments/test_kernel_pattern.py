"""Patterns of kernel names find what Python's own expressions find, in bounded time."""

import random
import re
import time

import pytest

from ablate.experiments.kernel_pattern import MAX_PATTERN, KernelPattern, PatternError, nearest_names

LETTERS = "ab_1"


def some_pattern(rng: random.Random, depth: int = 0) -> str:
    def item() -> str:
        kind = rng.random()
        if depth < 3 and kind < 0.3:
            return rng.choice(["({})", "(?:{})"]).format(some_pattern(rng, depth + 1))
        if kind < 0.75:
            return rng.choice([*LETTERS, r"\.", r"\\", "-"])
        return rng.choice([".", "[ab]", "[^a_]", "[a-z0-9]", r"\d", r"\w", r"\W", r"[\d_]", "[]a]", r"[^\]b]", r"\s"])

    def counted() -> str:
        count = rng.choice(["", "", "", "*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?", "??"])
        return item() + count

    branches = ["".join(counted() for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.3:
        branches[0] = "^" + branches[0]
    if rng.random() < 0.3:
        branches[-1] += "$"
    return "|".join(branches)


@pytest.mark.parametrize("seed", range(40))
def test_it_finds_what_python_finds(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311  # reproducible by design
    compared, refused = 0, []
    for _ in range(100):
        text = some_pattern(rng)
        try:
            pattern = KernelPattern(text)
        except PatternError as error:
            refused.append((text, str(error)))
            continue
        for _ in range(20):
            name = "".join(rng.choice(LETTERS + ".\\- Z") for _ in range(rng.randrange(1, 12)))
            assert pattern.search(name) is (re.search(text, name, re.ASCII) is not None), (text, name)
            compared += 1
    assert compared > 300
    assert all("allowed: 1 to" in why or re.search(text, "", re.ASCII) for text, why in refused), refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 characters"),
        ("a" * (MAX_PATTERN + 1), "characters"),
        ("((((a{50}){50}){50}){50}){50}", "repetition size"),
        ("a*", "empty text"),
        ("(a", "missing )"),
        ("a)", "unexpected )"),
        ("[a", "missing ]"),
        ("[z-a]", "class range"),
        ("*a", "no argument"),
        ("a++", "repetition operator"),
        (r"(a)\1", "escape sequence"),
        ("(?=a)b", "(?="),
    ],
)
def test_other_patterns_are_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(PatternError, match=re.escape(words)):
        KernelPattern(text)


def test_a_name_with_half_a_character_is_searched() -> None:
    assert KernelPattern("gemm").search("\udc80gemm")


@pytest.mark.parametrize(
    "text", ["(a+)+$", "(a|a)*c", "(a|aa)+$", "a*a*a*a*a*a*c", "(.*)(.*)(.*)(.*)x$", "(a|b)*a(a|b){40}c"]
)
def test_no_pattern_takes_long(text: str) -> None:
    rng = random.Random(0)  # noqa: S311  # reproducible by design
    pattern = KernelPattern(text)
    names = ["a" * 299, *("".join(rng.choice("ab") for _ in range(299)) for _ in range(100))]
    began = time.process_time()
    assert not any(pattern.search(f"{name}!") for name in names)
    assert time.process_time() - began < 2


def test_only_the_beginning_of_a_long_name_is_read() -> None:
    assert KernelPattern("x").search("a" * 299 + "x")
    assert not KernelPattern("x").search("a" * 300 + "x")


def test_the_nearest_names_share_letters() -> None:
    names = ["void at::native::vectorized", "ampere_sgemm_128", "_liger_cross_entropy_kernel", "liger"]
    assert nearest_names("liger_rms_norm.*", names, most=2) == ["_liger_cross_entropy_kernel", "liger"]

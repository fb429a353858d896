from tests.golden.freeze_verdicts import GOLDEN, text


def test_the_judge_says_of_fixed_receipts_what_it_said_before() -> None:
    assert text().splitlines() == GOLDEN.read_text().splitlines()

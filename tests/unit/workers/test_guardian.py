from workers.guardian import left_behind


def test_left_behind_keeps_trials_that_were_not_forgotten() -> None:
    assert left_behind(["+10 a\n", "+11 b\n", "-10 a\n", "+12 c\n", "-99 x\n"]) == {(11, "b"), (12, "c")}


def test_left_behind_of_nothing() -> None:
    assert left_behind([]) == set()

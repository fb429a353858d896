from kernels import facts


def test_record_outside_collect_does_nothing():
    facts.record("a", 1)
    with facts.collect() as seen:
        pass
    assert seen == {}


def test_record_two_values_become_mixed():
    with facts.collect() as seen:
        facts.record("chunk", 8)
        facts.record("chunk", 8)
        assert seen["chunk"] == 8
        facts.record("chunk", 16)
    assert seen["chunk"] == "mixed"


def test_record_mixed_stays_mixed():
    with facts.collect() as seen:
        for value in (8, 16, 8):
            facts.record("chunk", value)
    assert seen["chunk"] == "mixed"


def test_add_counts():
    with facts.collect() as seen:
        facts.add("bytes", 3)
        facts.add("bytes", 4)
    assert seen == {"bytes": 7}


def test_collect_nested_keeps_apart():
    with facts.collect() as outer:
        facts.record("a", 1)
        with facts.collect() as inner:
            facts.record("b", 2)
        facts.record("c", 3)
    assert outer == {"a": 1, "c": 3}
    assert inner == {"b": 2}

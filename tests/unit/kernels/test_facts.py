import threading

from ablate.kernels import facts


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


def test_describe_keeps_one_row_per_kernel_beside_the_facts():
    facts.describe("outputs", {"registers": 1})
    with facts.collect() as seen:
        facts.describe("outputs", {"registers": 168})
        facts.describe("outputs", {"registers": 168})
    assert seen == {}
    assert seen.kernels == {"outputs": {"registers": 168}}


def test_record_from_another_thread_reaches_the_collector():
    with facts.collect() as seen:
        thread = threading.Thread(target=facts.record, args=("a", 1))
        thread.start()
        thread.join()
    assert seen == {"a": 1}


def test_collecting_tells_whether_anybody_listens():
    assert not facts.collecting()
    with facts.collect():
        assert facts.collecting()
    assert not facts.collecting()

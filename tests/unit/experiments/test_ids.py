import re

from experiments.ids import id_pattern, new_id, new_ids


def test_new_ids_grow_are_distinct_and_match_the_pattern() -> None:
    ids = [*new_ids("blk", 500), new_id("blk"), *new_ids("blk", 3)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)
    assert all(re.match(id_pattern("blk"), one) for one in ids)
    assert not re.match(id_pattern("trl"), ids[0])


def test_new_id_sorts_by_time() -> None:
    moments = [new_id("abl") for _ in range(1000)]
    assert moments == sorted(moments)

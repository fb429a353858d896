import re

import pytest

from ablate.experiments.ids import RULES, id_pattern, new_id, new_ids, node_name_problem, own_node_name


def test_new_ids_grow_are_distinct_and_match_the_pattern() -> None:
    ids = [*new_ids("blk", 500), new_id("blk"), *new_ids("blk", 3)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)
    assert all(re.match(id_pattern("blk"), one) for one in ids)
    assert not re.match(id_pattern("trl"), ids[0])


def test_new_id_sorts_by_time() -> None:
    moments = [new_id("abl") for _ in range(1000)]
    assert moments == sorted(moments)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("gpu-7.rack", "gpu-7.rack"),
        ("_dmz7", "dmz7-DIGEST"),
        ("a b", "a-b-DIGEST"),
        ("\N{LATIN CAPITAL LETTER L WITH STROKE}\xf3d\u017a", "odz-DIGEST"),
        ("\u4e3b\u673a", "node-DIGEST"),
        ("", "node-DIGEST"),
        ("h" * 300, "h" * 100 + "-DIGEST"),
        ("bad\udcff", "bad-DIGEST"),
    ],
)
def test_own_node_name_is_the_host_name_or_near_it(monkeypatch: pytest.MonkeyPatch, host: str, name: str) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    own = own_node_name()
    assert re.fullmatch(name.replace("DIGEST", "[0-9a-f]{6}"), own), own
    assert node_name_problem(own) is None


def test_hosts_that_look_alike_get_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for host in ("dmz7", "_dmz7", "-dmz7", "dmz7_ "):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        names.add(own_node_name())
    assert len(names) == 4


def test_every_rule_in_words_fits_its_pattern() -> None:
    for pattern in RULES:
        assert re.match(pattern, "a")
        assert not re.match(pattern, "")

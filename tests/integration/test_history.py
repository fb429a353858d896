"""The history of a recipe over REST and in the terminal."""

import json
from pathlib import Path

import pytest

from tests.api_stack import running_api, served_api
from tests.cli import ablate, speaking_to


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_history_holds_a_point_for_every_ended_ablation(tmp_path: Path, kind: str) -> None:
    with running_api(kind, tmp_path) as api:
        node = api.register()
        made = [api.submit(), api.submit()]
        api.finish(node)
        api.cancel(api.submit()["id"])
        (series,) = api.get("/v1/history/hybrid-tiny").json()
        assert [point["ablation"] for point in series["points"]] == [one["id"] for one in made]
        assert [point["trials"] for point in series["points"]] == [6, 6]
        assert series["since_anchor"] is None
        assert api.get("/v1/history/hybrid-tiny?node_class=h200").json() == []
        for wrong, where in (("hybrid-tin", "#/recipe"), ("hybrid-tiny?metric=speed", "#/metric")):
            answer = api.get(f"/v1/history/{wrong}")
            assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, where)


def test_history_in_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served_api("sqlite", tmp_path) as api, speaking_to(api, monkeypatch):
        assert "no finished ablation of hybrid-tiny" in ablate("history", "hybrid-tiny").out
        made = api.submit()
        api.finish(api.register())
        shown = ablate("history", "hybrid-tiny")
        assert shown.code == 0, shown.err
        assert "of the baseline of factory on cpu" in " ".join(shown.out.split())
        assert "version 1" in shown.out
        assert "sha256" not in shown.out
        assert "8 are needed" in shown.out
        histories = json.loads(ablate("history", "hybrid-tiny", "--json").out)
        assert histories[0]["points"][0]["ablation"] == made["id"]

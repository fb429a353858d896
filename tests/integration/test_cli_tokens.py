"""`ablate admin tokens` and `ablate nodes` against a real service: secrets work until they are ended."""

import json
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from ablate.experiments.outcomes import ExitCode
from ablate.service.client.api import Client, Refused
from tests.api_stack import Api, served_api
from tests.cli import ablate, speaking_to


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with served_api("sqlite", tmp_path) as running, speaking_to(running, monkeypatch):
        yield running


def name_of(api: Api, secret: str) -> str | None:
    with Client(str(api.client.base_url), secret) as client:
        try:
            return client.tokens.identity().name
        except Refused as refused:
            if refused.problem.status != 401:
                raise
            return None


def test_an_enrolment_token_is_made_listed_and_revoked(api: Api) -> None:
    code, secret, remark = ablate("nodes", "enrol", "cpu", "--uses", 3, "--for", "2d")
    assert (code, "for 3 workers, shown only once" in " ".join(remark.split())) == (0, True)
    assert name_of(api, secret.strip()) is not None
    (row,) = json.loads(ablate("nodes", "enrolments", "--json")[1])
    assert (row["node_class"], row["uses_left"], row["scope"]) == ("cpu", 3, "enrol")
    assert " until 20" in ablate("nodes", "enrolments")[1]
    assert ablate("nodes", "revoke-enrolment", row["name"].removeprefix("enrol/"), "--reason", "leaked")[0] == 0
    assert name_of(api, secret.strip()) is None
    assert ": leaked" in ablate("nodes", "enrolments")[1]
    assert secret.strip() not in ablate("nodes", "enrolments", "--json")[1]


@pytest.mark.parametrize("lasts", ["7", "0d", "1w", "d", "-1h", "1.5h", "9999999d"])
def test_a_wrong_duration_is_refused_with_what_is_allowed(api: Api, lasts: str) -> None:
    code, _, text = ablate("nodes", "enrol", "cpu", f"--for={lasts}")
    assert code != 0
    assert f"--for is '{lasts}'; allowed: a whole number and s, m, h or d" in " ".join(text.replace("│", "").split())
    assert json.loads(ablate("nodes", "enrolments", "--json")[1]) == []


def test_a_token_is_created_limited_replaced_and_revoked(api: Api) -> None:
    code, secret, remark = ablate("admin", "tokens", "create", "ada", "--scope", "submit", "--device-minutes", "90")
    assert (code, "shown only once" in remark) == (0, True)
    first = secret.strip()
    assert secret == first + "\n", "nothing but the secret, so that it can go into a file"
    assert name_of(api, first) == "ada"
    second = json.loads(ablate("admin", "tokens", "rotate", "ada", "--grace-hours", "2", "--json")[1])["secret"]
    assert (name_of(api, first), name_of(api, second)) == ("ada", "ada")
    assert "2, one until " in ablate("admin", "tokens", "list")[1]
    assert ablate("admin", "tokens", "end-old", "ada")[0] == 0
    assert (name_of(api, first), name_of(api, second)) == (None, "ada")
    assert "0.0 of 120" in ablate("admin", "tokens", "quota", "ada", "--device-minutes", "120")[1]
    assert json.loads(ablate("admin", "tokens", "quota", "ada", "--json")[1])["device_minutes"] is None
    assert ablate("admin", "tokens", "revoke", "ada", "--reason", "left")[0] == 0
    assert name_of(api, second) is None
    shown = {row["name"]: row for row in json.loads(ablate("admin", "tokens", "list", "--json")[1])["items"]}
    assert (shown["ada"]["reason"], shown["ada"]["secrets"]) == ("left", [])
    assert not {first, second} & set(json.dumps(shown).split('"'))
    assert "admin with scope admin" in ablate("admin", "tokens", "whoami")[1]


def test_what_is_refused_exits_with_5_and_says_why(api: Api) -> None:
    assert ablate("admin", "tokens", "create", "ada", "--scope", "worker")[0] == ExitCode.USAGE
    assert ablate("admin", "tokens", "create", "ada", "--scope", "read")[0] == 0
    for words, message in (
        (("admin", "tokens", "create", "ada", "--scope", "read"), "there is a token 'ada' already"),
        (("admin", "tokens", "rotate", "bob"), "there is no token 'bob'"),
        (("admin", "tokens", "revoke", "admin", "--reason", "x"), "comes from the service's settings"),
        (("nodes", "add", "gpu-7", "--class", "cpuu"), "did you mean 'cpu'?"),
        (("nodes", "revoke-key", "gpu-7", "--reason", "x"), "has no key; it gets one by: ablate nodes add gpu-7"),
    ):
        code, _out, err = ablate(*words)
        assert (code, message in " ".join(err.split())) == (5, True), err


def test_a_node_gets_a_key_that_can_be_replaced_and_revoked(api: Api) -> None:
    code, secret, remark = ablate("nodes", "add", "gpu-7", "--class", "h200")
    assert (code, "ABLATE_NODE_NAME=gpu-7" in remark, "any node class" in remark) == (0, True, False)
    assert name_of(api, secret.strip()) == "node/gpu-7"
    fresh = ablate("nodes", "rotate-key", "gpu-7")[1].strip()
    assert (name_of(api, secret.strip()), name_of(api, fresh)) == ("node/gpu-7", "node/gpu-7")
    assert ablate("nodes", "end-old-keys", "gpu-7")[0] == 0
    assert (name_of(api, secret.strip()), name_of(api, fresh)) == (None, "node/gpu-7")
    assert ablate("nodes", "revoke-key", "gpu-7", "--reason", "stolen")[0] == 0
    assert name_of(api, fresh) is None
    code, secret, remark = ablate("nodes", "add", "gpu-7")
    assert (code, len(secret.split()), "may register gpu-7 as any node class" in remark) == (0, 1, True)


def test_the_key_of_a_node_can_be_called_as_the_list_of_tokens_shows_it(api: Api) -> None:
    allowed = string.ascii_letters + string.digits
    for name in (allowed, f"{allowed}._-{allowed[:53]}", "a.._-..", "9"):
        first = ablate("nodes", "add", name)[1].strip()
        taken = " ".join(ablate("nodes", "add", name)[2].split())
        assert f"replace its secret (ablate nodes rotate-key {name}), or end it first" in taken
        code, second, remark = ablate("admin", "tokens", "rotate", f"node/{name}")
        assert (code, f"ABLATE_NODE_NAME={name}" in "".join(remark.split("\n"))) == (0, True)
        assert ablate("admin", "tokens", "end-old", f"node/{name}")[0] == 0
        assert (name_of(api, first), name_of(api, second.strip())) == (None, f"node/{name}")
        assert ablate("admin", "tokens", "revoke", f"node/{name}", "--reason", "x")[0] == 0
        assert name_of(api, second.strip()) is None
        assert "has no key" in ablate("nodes", "rotate-key", name)[2]
    for sign in string.punctuation.replace(".", "").replace("-", "").replace("_", ""):
        for words in (("admin", "tokens", "rotate", f"a{sign}b"), ("nodes", "rotate-key", f"a{sign}b")):
            code, _out, err = ablate(*words)
            assert (code, "is not allowed; allowed: 1 to" in " ".join(err.split())) == (5, True), (words, err)


def test_a_node_that_is_taken_down_shows_that_its_key_is_revoked(api: Api) -> None:
    for word in ("remove", "delete", "rm"):
        code, _out, err = ablate("nodes", word, "gpu-7")
        text = " ".join(err.replace("│", " ").split())
        assert (code, "resume" in text) == (ExitCode.USAGE, False)
        assert "ablate nodes drain NODE" in text
        assert "ablate nodes revoke-key NODE --reason" in text
    api.register("gpu-7")
    assert ablate("nodes", "drain", "gpu-7")[0] == 0
    assert ablate("nodes", "revoke-key", "gpu-7", "--reason", "sold")[0] == 0
    assert "no, its key is revoked; ablate nodes add gpu-7" in ablate("nodes")[1]
    assert ablate("nodes", "add", "gpu-7")[0] == 0
    assert "no, drained; ablate nodes resume gpu-7" in ablate("nodes")[1]


def test_bare_nodes_lists_as_before(api: Api) -> None:
    api.register("shown-node")
    assert "shown-node" in ablate("nodes")[1]
    assert [row["name"] for row in json.loads(ablate("nodes", "--json")[1])] == ["shown-node"]

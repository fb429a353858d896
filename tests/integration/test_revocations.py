"""A restore does not bring revoked keys back to life if asked so, on both databases; and says so if not."""

import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import delete, insert, select, update

from ablate.service.app import create_app
from ablate.service.errors import StackError
from ablate.service.stack.backup import back_up, restore
from ablate.service.stack.layout import StackFiles
from ablate.service.store.access import revocations
from ablate.service.store.session import Store
from ablate.service.store.tables import node_keys, share_links, token_secrets, tokens
from tests.api_stack import ADMIN, SIGNER, Api, api_fixture, bearer, running_api, settings_for

api = api_fixture()


def post(api: Api, path: str, **body: object) -> httpx.Response:
    answer = api.client.post(path, headers=bearer(ADMIN), json=body)
    assert answer.is_success, answer.text
    return answer


def change(api: Api) -> None:
    """Revoke and replace what `fill` made."""
    post(api, "/v1/tokens/revoked:revoke", reason="left")
    post(api, "/v1/tokens/replaced:rotate", grace_s=0)
    post(api, "/v1/nodes/gpu-7:revoke-key", reason="sold")
    post(api, f"/v1/keys/{SIGNER.key}:revoke", reason="stolen")
    ablation = api.get("/v1/ablations").json()["items"][0]["id"]
    (link,) = api.get(f"/v1/ablations/{ablation}/shares").json()["items"]
    post(api, f"/v1/ablations/{ablation}/shares/{link['id']}:revoke")


def fill(api: Api) -> dict[str, dict[str, str]]:
    """Make tokens and keys; return the headers of each."""
    made = {name: api.token(name, "read") for name in ("revoked", "replaced", "kept")}
    api.register("gpu-7")
    post(api, f"/v1/ablations/{api.submit()['id']}:share")
    return {**made, "node": api.worker_of("gpu-7")}


def valid(api: Api, headers: dict[str, dict[str, str]]) -> set[str]:
    names = {name for name, own in headers.items() if api.client.get("/v1/identity", headers=own).status_code == 200}
    keys = api.get("/v1/keys").json()["items"]
    asked = [one["id"] for one in api.get("/v1/ablations").json()["items"]]
    links = [link for one in asked for link in api.get(f"/v1/ablations/{one}/shares").json()["items"]]
    names |= {"signing" for key in keys if key["revoked_at"] is None}
    return names | {"link" for link in links if link["is_valid"]}


EVERYTHING = {"revoked", "replaced", "kept", "node", "signing", "link"}
REVIVED = {
    "share link ID of ID, revoked",
    "token revoked, revoked: left",
    "a secret of token replaced, replaced",
    "token node/gpu-7, revoked: sold",
    "signing key of node gpu-7, revoked: stolen",
}


def without_ids(lines: Iterable[str]) -> set[str]:
    return {re.sub("(shr|abl)_[0-9A-Z]+", "ID", line) for line in lines}


@contextmanager
def restored_api(url: str, folder: Path) -> Iterator[Api]:
    """Run the API on an existing database."""
    store = Store(url)
    settings = settings_for(url, folder / "again")
    with TestClient(create_app(settings, store), raise_server_exceptions=False) as client:
        yield Api(client, store)


@pytest.mark.parametrize("keep", [False, True])
def test_a_restore_lists_what_had_ended_and_ends_it_again_if_asked(tmp_path: Path, keep: bool) -> None:
    with running_api("sqlite", tmp_path / "api") as running:
        headers, url = fill(running), running.store.url
        back_up(url, tmp_path / "backup.db")
        change(running)
        assert valid(running, headers) == {"kept"}
        post(running, "/v1/tokens", name="later", scope="read")
    done = restore(url, tmp_path / "backup.db", StackFiles(home=tmp_path / "home"), keep_revocations=keep)
    assert without_ids(done.revived or ()) == REVIVED
    with restored_api(url, tmp_path) as again:
        assert valid(again, headers) == ({"kept"} if keep else EVERYTHING)


def test_revocations_that_nobody_can_read_cannot_be_kept(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path / "api") as running:
        back_up(running.store.url, tmp_path / "backup.db")
    database = tmp_path / "home" / "ablate.db"
    database.parent.mkdir()
    database.write_bytes(b"as it was")
    files = StackFiles(home=database.parent)
    with pytest.raises(StackError, match="revocations cannot be kept"):
        restore(f"sqlite:///{database}", tmp_path / "backup.db", files, keep_revocations=True)
    assert database.read_bytes() == b"as it was"
    assert restore(f"sqlite:///{database}", tmp_path / "backup.db", files).revived is None


def test_saved_revocations_are_applied_to_a_database_from_before(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    headers, file = fill(api), tmp_path / "revocations.json"
    backed_up = (tokens, token_secrets, node_keys, share_links)
    with api.store.read() as connection:
        before = {table: [row._asdict() for row in connection.execute(select(table))] for table in backed_up}
    change(api)
    monkeypatch.setattr(revocations, "get_settings", lambda: settings_for(api.store.url, tmp_path))
    assert revocations.main(["save", str(file)]) == 0
    capsys.readouterr()
    assert revocations.main(["save", "-"]) == 0
    assert capsys.readouterr().out == file.read_text()
    assert not any(own["Authorization"].removeprefix("Bearer ") in file.read_text() for own in headers.values())
    with api.store.write() as connection:
        for table in (share_links, token_secrets, node_keys):
            connection.execute(delete(table))
        for table in (token_secrets, node_keys, share_links):
            connection.execute(insert(table), before[table])
        for row in before[tokens]:
            connection.execute(update(tokens).where(tokens.c.id == row["id"]).values(**row))
    api.token("other", "read")  # empties the cache of principals
    post(api, "/v1/tokens/other:revoke", reason="left")
    assert valid(api, headers) == EVERYTHING
    capsys.readouterr()
    assert revocations.main(["apply", str(file)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert without_ids(line.removeprefix("ended again: ") for line in shown) == REVIVED
    post(api, "/v1/tokens/kept:end-old")
    assert valid(api, headers) == {"kept"}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert revocations.main(["apply", "-"]) == 0
    assert capsys.readouterr().out == "nothing had ended since the backup\n"


@pytest.mark.parametrize("arguments", [[], ["save"], ["drop", "x"], ["apply", "a", "b"]])
def test_other_words_are_wrong_usage(arguments: list[str]) -> None:
    assert revocations.main(arguments) == 64


def test_a_file_that_holds_no_revocations_is_refused(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(revocations, "get_settings", lambda: settings_for(api.store.url, tmp_path))
    for content in ("", "[]", '{"tokens": {}}'):
        (tmp_path / "x.json").write_text(content)
        assert revocations.main(["apply", str(tmp_path / "x.json")]) == 1
        assert "cannot apply the revocations" in capsys.readouterr().err

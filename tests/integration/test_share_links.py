"""Share links: one report for people without a token, until they end, and no other page."""

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from ablate.service.principals import Scope
from ablate.service.store.access import tokens
from ablate.service.store.tables import ablations, db_now, share_links
from tests.api_stack import ADMIN, Api, api_fixture, served_api
from tests.cli import ablate, speaking_to

api = api_fixture()


def judged(api: Api) -> str:
    """Return an ablation with a report."""
    made = api.submit()
    with api.store.write() as connection:
        condition = ablations.c.id == made["id"]
        connection.execute(update(ablations).where(condition).values(report_html="<!doctype html><p>The report"))
    return str(made["id"])


def shared(api: Api, ablation: str, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    answer = api.client.post(f"/v1/ablations/{ablation}:share", headers=headers or api.admin, json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def seen(api: Api, path: str, **options: Any) -> httpx.Response:
    """Ask as a stranger."""
    api.client.cookies.clear()
    return api.client.get(path, **options)


def test_a_link_shows_one_report_and_opens_nothing_else(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ablation, other = judged(api), api.submit(ablation="other")["id"]
    made = shared(api, ablation)
    secret = made["path"].partition("key=")[2]
    page = seen(api, made["path"])
    assert page.status_code == 200
    assert page.text == api.get(f"/v1/ablations/{ablation}/report").text
    assert "set-cookie" not in page.headers
    assert (page.headers["referrer-policy"], page.headers["cache-control"]) == ("no-referrer", "no-store")
    assert page.headers["x-robots-tag"] == "noindex"
    for path in ("/", f"/a/{ablation}", f"/a/{other}", "/sessions", f"/v1/ablations/{ablation}", "/v1/ablations"):
        tried = seen(api, path, params={"key": secret}, headers={"Authorization": f"Bearer {secret}"})
        assert tried.status_code == 401, path
    assert seen(api, f"/sign-in?link={secret}").status_code == 401
    with api.store.read() as connection:
        (row,) = connection.execute(select(share_links)).all()
    assert secret not in str(row)
    assert (row.uses, row.used_at is not None) == (1, True)
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("ablate.service.")]
    assert f"share link {row.id} shows {ablation}" in logged
    assert not [line for line in logged if secret in line]
    (listed,) = api.get(f"/v1/ablations/{ablation}/shares").json()["items"]
    assert (listed["created_by"], listed["is_valid"], listed["uses"]) == ("admin", True, 1)
    assert secret not in api.get(f"/v1/ablations/{ablation}/shares").text


def test_a_link_that_ended_shows_nothing_and_says_what_to_do(api: Api) -> None:
    ablation = judged(api)
    own = f"/v1/ablations/{ablation}/shares"
    for how in ("revoked", "ended", "token revoked", "token rotated", "wrong", "none"):
        name = how.replace(" ", "-")
        headers = api.token(name, "operate")
        made = shared(api, ablation, headers, hours=0.5)
        path = made["path"]
        assert seen(api, path).status_code == 200
        if how == "revoked":
            for _ in range(2):
                assert api.client.post(f"{own}/{made['link']['id']}:revoke", headers=headers).status_code == 200
        elif how == "ended":
            with api.store.write() as connection:
                connection.execute(update(share_links).values(ends_at=db_now() - 0.001))
        elif how == "token rotated":
            rotated = api.client.post(f"/v1/tokens/{name}:rotate", headers=api.admin, json={"grace_s": 3600.0})
            headers = {"Authorization": f"Bearer {rotated.json()['secret']}"}
            assert seen(api, shared(api, ablation, headers)["path"]).status_code == 200, "a new one is valid"
        elif how == "token revoked":
            assert api.client.post(f"/v1/tokens/{name}:revoke", headers=api.admin, json={"reason": "x"}).is_success
        else:
            path = "/share" if how == "none" else f"{path[:-1]}~"
        gone = seen(api, path)
        assert gone.status_code == 404, how
        assert "ask the person who sent it" in gone.text
        assert "<html" in gone.text
        listed = next(one for one in api.get(own).json()["items"] if one["id"] == made["link"]["id"])
        assert listed["is_valid"] == (how in ("wrong", "none")), how


def test_a_link_waits_for_the_report_and_names_what_is_wrong(api: Api) -> None:
    made = api.submit(ablation="waits")
    early = seen(api, shared(api, made["id"])["path"])
    assert early.status_code == 409
    assert "not written yet" in early.text
    for hours in (0, -1, 1e9, "x"):
        wrong = api.client.post(f"/v1/ablations/{made['id']}:share", headers=api.admin, json={"hours": hours})
        assert wrong.status_code == 422
        assert wrong.json()["errors"][0]["pointer"] == "#/hours"
    other = api.submit(ablation="another")["id"]
    own = shared(api, made["id"])["link"]["id"]
    assert api.client.post(f"/v1/ablations/{other}/shares/{own}:revoke", headers=api.admin).status_code == 404


def test_another_secret_in_the_settings_ends_the_links_of_its_token(api: Api) -> None:
    path = shared(api, judged(api))["path"]
    token = tokens.NewToken(name="admin", scope=Scope.ADMIN)
    for secret, status in ((ADMIN, 200), ("another-secret-of-the-settings", 404)):
        with api.store.write() as connection:
            tokens.replace_settings_tokens(connection, [(token, secret)])
        assert seen(api, path).status_code == status


def test_the_command_makes_lists_and_ends_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served_api("sqlite", tmp_path) as api, speaking_to(api, monkeypatch):
        made = api.submit(ablation="by-command")
        shown = ablate("share", "by-command", "--hours", "2")
        assert shown.code == 0, shown.err
        assert "/share?key=" in shown.out
        (own,) = api.get(f"/v1/ablations/{made['id']}/shares").json()["items"]
        assert f"--revoke {own['id']}" in shown.out
        assert "valid" in ablate("share", "by-command", "--list").out
        assert "revoked" in ablate("share", "by-command", "--revoke", own["id"]).out

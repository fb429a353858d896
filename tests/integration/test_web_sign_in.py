"""Who may see the pages and act on them: links that count once, sessions, and forms that only their page can send."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select, update

from ablate.service.store.tables import db_now, web_sessions
from ablate.service.web import actions, pages
from ablate.service.web.sessions import COOKIE, FORM_TYPE
from tests.api_stack import ADMIN, Api, bearer, running_api
from tests.web_pages import Person, link_of, sign_in_path


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with running_api(request.param, tmp_path_factory.mktemp("web")) as running:
        running.register("node-a")
        yield running


def reader(api: Api, name: str) -> dict[str, str]:
    return api.token(f"{name}-{random.randrange(10**9)}", "read")  # noqa: S311


def name_of(api: Api, headers: dict[str, str]) -> str:
    return str(api.client.get("/v1/identity", headers=headers).json()["name"])


def test_nobody_sees_or_does_anything_without_a_session(api: Api) -> None:
    made = api.submit()["id"]
    values = {"called": made, "ablation_id": made, "name": "node-a", "verb": "drain"}
    values |= {"recipe": "hybrid-tiny", "gate": "psiv_cache", "arm": "psiv-on"}
    asked = [
        (method, route.path.format(**values))
        for part in (pages, actions)
        for route in part.router.routes
        for method in route.methods
    ]
    assert len(asked) == 20
    strangers = ({}, {"Cookie": f"{COOKIE}=guessed"}, bearer(ADMIN), {"Cookie": f"{COOKIE}={ADMIN}"})
    for method, path in asked:
        for headers in strangers:
            answer = api.client.request(method, path, headers={**headers, "Content-Type": FORM_TYPE})
            assert answer.status_code == 401, path
            assert "ablate open" in answer.text
            assert made not in answer.text
    assert api.get(f"/v1/ablations/{made}").json()["state"] == "queued"


def test_a_link_signs_in_once(api: Api) -> None:
    person = Person(api)
    for _ in range(2):  # whoever only looks at it does not use it up
        shown = api.client.get(f"/sign-in?link={person.link}")
        assert (shown.status_code, "Sign in as admin" in shown.text) == (200, True)
    first = person.use_link()
    assert (first.status_code, first.headers["location"]) == (303, "/")
    kept = first.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(kept.split("; ")), kept
    assert "Secure" not in kept, "plain HTTP on loopback"
    assert person.get("/").status_code == 200
    again = Person(api)
    again.link = person.link
    assert again.use_link().status_code == 401
    assert api.client.get(f"/sign-in?link={person.link}").status_code == 401
    assert api.client.get("/", headers={"Cookie": f"{COOKIE}={person.link}"}).status_code == 401, "a link is no session"


def test_of_many_who_use_a_link_at_once_one_gets_in(api: Api) -> None:
    link = link_of(sign_in_path(api, api.admin))
    send = lambda _: api.client.post("/sign-in", data={"link": link}, follow_redirects=False).status_code  # noqa: E731
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(send, range(8))) == [303, *[401] * 7]
    api.client.cookies.clear()


FOREIGN = [
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://testserver"},
    {"Origin": "https://evil.example"},
    {"Origin": "http://testserver:81"},
    {"Origin": "null"},
]
OWN = [
    {"Sec-Fetch-Site": "same-origin", "Origin": "null"},
    {"Origin": "http://testserver"},
    {"Origin": "http://ablate.example", "X-Forwarded-Host": "ablate.example"},
]


@pytest.mark.parametrize("headers", OWN)
def test_no_other_site_signs_a_browser_in(api: Api, headers: dict[str, str]) -> None:
    data = {"link": link_of(sign_in_path(api, api.admin))}
    shown = api.client.get("/sign-in", params=data)
    assert shown.headers["referrer-policy"] == "same-origin"
    for foreign in FOREIGN:
        rejected = api.client.post("/sign-in", data=data, headers=foreign, follow_redirects=False)
        assert (rejected.status_code, "set-cookie" in rejected.headers) == (403, False), foreign
        assert "another site" in rejected.text
    answer = api.client.post("/sign-in", data=data, headers=headers, follow_redirects=False)
    assert answer.status_code == 303, "the link still works"
    api.client.cookies.clear()


def test_links_and_sessions_end(api: Api) -> None:
    late = Person(api)
    in_time = Person.signed_in(api)
    with api.store.write() as connection:
        connection.execute(update(web_sessions).values(ends_at=db_now() - 0.001))
    assert late.use_link().status_code == 401
    assert in_time.get("/").status_code == 401
    Person(api)
    with api.store.read() as connection:
        assert connection.scalar(select(func.count()).select_from(web_sessions)) == 1, "what has ended is forgotten"


@pytest.mark.parametrize("how", ["revoke", "rotate", "end-old"])
def test_a_session_ends_with_the_secret_that_asked_for_it(api: Api, how: str) -> None:
    headers = reader(api, how)
    name = name_of(api, headers)
    person, unused = Person.signed_in(api, headers), Person(api, headers)
    other = Person.signed_in(api)
    if how == "end-old":
        assert api.client.post(f"/v1/tokens/{name}:rotate", headers=api.admin, json={"grace_s": 60}).is_success
        assert person.get("/").status_code == 200, "the grace is not over"
    body = {"revoke": {"reason": "left"}, "rotate": {"grace_s": 0}, "end-old": None}[how]
    assert api.client.post(f"/v1/tokens/{name}:{how}", headers=api.admin, json=body).is_success
    assert person.get("/").status_code == 401
    assert unused.use_link().status_code == 401
    assert other.get("/").status_code == 200


def test_signing_out_ends_the_session_for_every_copy_of_its_cookie(api: Api) -> None:
    person = Person.signed_in(api)
    assert person.send("POST", "/sign-out", data={"form_token": "wrong"}).status_code == 403
    gone = person.press("/sign-out")
    assert gone.status_code == 200
    assert "Max-Age=0" in gone.headers["set-cookie"]
    assert person.get("/").status_code == 401


def test_a_session_reads_unless_it_was_asked_to_operate_and_may(api: Api) -> None:
    for scope in ("read", "submit"):
        headers = api.token(f"no-{scope}", scope)
        refused = api.client.post("/v1/sign-ins", headers=headers, json={"operate": True})
        assert refused.status_code == 403
        assert f"this one has '{scope}'" in refused.json()["detail"]
    reading = Person.signed_in(api, api.token("operator", "operate"))
    assert "Drain" not in reading.get("/").text
    acting = Person.signed_in(api, operate=True)
    assert "Drain" in acting.get("/").text


def acts(api: Api) -> list[tuple[str, dict[str, str]]]:
    made = api.submit()["id"]
    return [
        (f"/a/{made}/priority", {"priority": "7"}),
        ("/nodes/node-a/drain", {}),
        ("/nodes/node-a/resume", {}),
        (f"/a/{made}/cancel", {}),
    ]


def test_actions_need_the_scope_and_a_form_of_the_own_session(api: Api) -> None:
    reading, acting, other = (Person.signed_in(api, operate=operate) for operate in (False, True, True))
    for path, fields in acts(api):
        assert reading.get(path).status_code == 403
        assert reading.press(path, **fields).status_code == 403
        for token in ({"other": "x"}, {"form_token": ""}, {"form_token": "ä"}, {"form_token": other.form_token()}):
            refused = acting.send("POST", path, data={**token, **fields})
            assert (refused.status_code, "does not come from a page of your session" in refused.text) == (403, True)
        json = acting.send("POST", path, json={"form_token": acting.form_token(), **fields})
        assert json.status_code == 415, "only a form that a person can see"
        assert acting.get(path).status_code == 200, "a question"
    states = {row["state"] for row in api.get("/v1/nodes").json()["items"]}
    assert states == {"works"}, "asking changes nothing"


def test_actions_do_what_the_same_of_the_rest_interface_does(api: Api) -> None:
    acting = Person.signed_in(api, operate=True)
    (priority, fields), (drain, _), (resume, _), (cancel, _) = acts(api)
    own = f"/v1/ablations/{priority.split('/')[2]}"
    assert acting.press(priority, **fields).headers["location"] == f"/a/{own.rpartition('/')[2]}"
    assert api.get(own).json()["priority"] == 7
    assert acting.press(drain).headers["location"] == "/"
    (node,) = [one for one in api.get("/v1/nodes").json()["items"] if one["name"] == "node-a"]
    assert (node["state"], node["stopped_by"]) == ("drained", "admin")
    assert acting.press(resume).status_code == 303
    assert acting.press(cancel).status_code == 303
    assert api.get(own).json()["state"] == "cancelled"
    assert acting.press(cancel).status_code == 409, "it is over"


def test_a_node_whose_key_is_revoked_is_offered_a_key_and_no_button(api: Api) -> None:
    acting = Person.signed_in(api, operate=True)
    api.register()
    assert 'href="/nodes/node-a/drain"' in acting.get("/").text
    api.client.post("/v1/nodes/node-a:revoke-key", headers=api.admin, json={"reason": "sold"})
    shown = acting.get("/").text
    assert "ablate nodes add node-a" in shown
    assert 'href="/nodes/node-a/' not in shown


@pytest.mark.parametrize("given", ["", "x", "-1", "101", "1e1", "٣", "9" * 400, "5.0", "0x1"])
def test_a_priority_that_is_none_is_refused(api: Api, given: str) -> None:
    acting = Person.signed_in(api, operate=True)
    path, _ = acts(api)[0]
    refused = acting.press(path, priority=given)
    assert (refused.status_code, "allowed: 0 to 100" in refused.text) == (422, True)


@pytest.mark.parametrize("to", ["//evil.example", "https://evil.example/", "/a/../x", "/a/x/cancel", "\\evil", "/live"])
def test_signing_in_leads_nowhere_but_to_a_page(api: Api, to: str) -> None:
    person = Person(api)
    for method in ("GET", "POST"):
        answer = person.send(method, "/sign-in", params={"link": person.link, "to": to}, data={"link": person.link})
        assert answer.status_code == 422
    good = person.send("POST", "/sign-in", params={"to": "/a/latest"}, data={"link": person.link})
    assert (good.status_code, good.headers["location"]) == (303, "/a/latest")
    api.client.cookies.clear()


def test_every_answer_forbids_what_is_foreign(api: Api) -> None:
    person = Person.signed_in(api, operate=True)
    made = api.submit()["id"]
    policies = {}
    history = "/history/hybrid-tiny/psiv_cache"
    for path in ("/", f"/a/{made}", history, "/sessions", f"/a/{made}/cancel", "/a/nothing"):
        answer = person.get(path)
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        policies[path] = policy["script-src"], policy["default-src"], policy["frame-ancestors"], policy["base-uri"]
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "<script>" not in answer.text
        assert " onclick" not in answer.text
    assert set(policies.values()) == {("'self'", "'none'", "'none'", "'none'")}

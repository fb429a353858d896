"""The service below a path of a reverse proxy, which removes the path from requests or not: pages, REST, streams."""

import re
from collections.abc import Iterator
from urllib.parse import urljoin

import httpx
import pytest
from playwright.sync_api import expect

from ablate.service.background.webhooks import content_of
from ablate.service.client.api import Client
from ablate.service.web.sessions import COOKIE
from tests import browser as browsers
from tests import web_world
from tests.api_stack import ADMIN, Api, served_api
from tests.waiting import LIMIT_S
from tests.web_pages import link_of, sign_in_path
from tests.web_servers import ReverseProxy, proxying
from tests.web_world import WebWorld

PREFIX = "/tools/ablate"
ADDRESS = re.compile(r'(?:href|src|action|data-live|data-events)="([^"]*)"')


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with served_api("sqlite", tmp_path_factory.mktemp("api"), public_url=f"https://ablate.example{PREFIX}/") as api:
        yield api


@pytest.fixture(scope="module")
def world(api: Api) -> WebWorld:
    return web_world.fill(api)


@pytest.fixture(params=[True, False], ids=["strips", "keeps"])
def proxy(api: Api, request: pytest.FixtureRequest) -> Iterator[ReverseProxy]:
    port = api.client.base_url.port
    assert port is not None
    with proxying(port, PREFIX, strips=request.param) as proxy:
        yield proxy


def test_every_link_of_every_page_leads_below_the_path(api: Api, world: WebWorld, proxy: ReverseProxy) -> None:
    with httpx.Client(timeout=LIMIT_S, trust_env=False) as browser:
        link = link_of(sign_in_path(api, api.admin, operate=True))
        answer = browser.post(f"{proxy.url}/sign-in?to=/a/{world.judged}", data={"link": link})
        assert answer.headers["Location"] == f"{PREFIX}/a/{world.judged}"
        assert f"; Path={PREFIX}/;" in answer.headers["Set-Cookie"] + ";"
        todo, seen = [f"{PREFIX}/", f"{PREFIX}/a/judged-nobody"], set[str]()
        while todo:
            address = todo.pop()
            seen.add(address)
            page = browser.get(urljoin(proxy.origin, address))
            if "/nobody" not in address and "judged-" not in address:
                assert page.status_code == (303 if address.endswith("/mlflow-ablations") else 200), address
            links = {one.partition("#")[0].replace("&amp;", "&") for one in ADDRESS.findall(page.text)}
            for one in links - {""} - seen - set(todo):
                if one.startswith(("data:", "http://", "https://")):
                    continue
                assert one.startswith(f"{PREFIX}/"), (address, one)
                if "/events" not in one and not one.endswith(("/sign-out",)) and "/sign-in" not in one:
                    todo.append(one)
        browser.post(f"{proxy.url}/sign-out", data={"form_token": _form_token(browser, proxy)})
        assert COOKIE not in browser.cookies
    assert {f"{PREFIX}/a/{world.running}/cancel", f"{PREFIX}/history/hybrid-tiny/psiv_cache"} <= seen
    assert f"{PREFIX}/sessions/night" in seen
    assert proxy.outside == []


def _form_token(browser: httpx.Client, proxy: ReverseProxy) -> str:
    return browser.get(f"{proxy.url}/").text.partition('name="form_token" value="')[2].partition('"')[0]


def test_locations_links_and_the_client_work_below_the_path(api: Api, world: WebWorld, proxy: ReverseProxy) -> None:
    with Client(f"{proxy.url}/", ADMIN) as client:
        accepted = client.ablations.submit(web_world_spec())
        with httpx.Client(headers=api.admin, timeout=LIMIT_S, trust_env=False) as http:
            links = accepted.links
            assert http.get(urljoin(proxy.origin, links.self)).status_code == 200
            assert http.get(urljoin(proxy.origin, links.verdict)).status_code == 409
            first = http.get(f"{proxy.url}/v1/ablations?limit=1")
            assert http.get(urljoin(proxy.origin, first.links["next"]["url"])).status_code == 200
            assert http.get(f"{proxy.url}/nowhere").json()["instance"] == f"{PREFIX}/nowhere"
            assert http.get(f"{proxy.url}/openapi.json").json()["servers"] == [{"url": PREFIX}]
            slash = http.get(f"{proxy.url}/nodes/", headers={"Accept": "text/html"})
            assert slash.status_code == 404 or slash.headers["Location"].endswith(f"{PREFIX}/nodes")
        client.ablations.cancel(accepted.id)
        assert [event.kind for event in client.ablations.watch(accepted.id)][-1] == "end"
        assert len(list(client.ablations.list())) > 4
    assert proxy.outside == []


def web_world_spec() -> dict[str, object]:
    from tests.factories import spec_values

    return spec_values(ablation="below-a-path")


def test_a_webhook_has_whole_links() -> None:
    data = content_of("abl_1", "x", "completed", None, base=f"https://ablate.example{PREFIX}")["data"]
    assert data["report"] == f"https://ablate.example{PREFIX}/v1/ablations/abl_1/report"


@pytest.mark.browser
def test_a_page_is_live_in_a_browser_below_the_path(api: Api, world: WebWorld, proxy: ReverseProxy) -> None:
    with browsers.chromium() as chromium:
        page = chromium.new_context().new_page()
        page.goto(proxy.url + sign_in_path(api, api.admin, operate=True))
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("heading", name="Queue", exact=True).wait_for()
        assert page.evaluate("getComputedStyle(document.querySelector('nav.top')).display") == "flex"
        name = f"appears-{proxy.name}"
        api.submit(ablation=name)
        expect(page.get_by_text(name).first).to_be_visible(timeout=1000 * LIMIT_S)
        page.get_by_role("link", name=name).first.click()
        page.get_by_role("link", name="Cancel").click()
        page.get_by_role("button", name="Cancel").click()
        expect(page.get_by_text("cancelled").first).to_be_visible(timeout=1000 * LIMIT_S)
        assert page.url.startswith(proxy.url)
    assert proxy.outside == []

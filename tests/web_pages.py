"""A person at the service's pages, for tests: signs in by a link, as a browser does."""

from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

from ablate.service.web.sessions import COOKIE
from tests.api_stack import Api


def sign_in_path(api: Api, headers: dict[str, str], *, operate: bool = False) -> str:
    """Return the address that `ablate open` opens."""
    answer = api.client.post("/v1/sign-ins", headers=headers, json={"operate": operate})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["path"])


def link_of(path: str) -> str:
    """Return the secret of an address to sign in."""
    return parse_qs(urlsplit(path).query)["link"][0]


class Person:
    """Somebody with a browser of their own."""

    def __init__(self, api: Api, headers: dict[str, str] | None = None, *, operate: bool = False) -> None:
        self.api = api
        self.link = link_of(sign_in_path(api, headers or api.admin, operate=operate))
        self.secret = ""

    def use_link(self) -> httpx.Response:
        """Press the button of the sign-in page."""
        answer = self.send("POST", "/sign-in", data={"link": self.link})
        cookie = answer.cookies.get(COOKIE)
        self.api.client.cookies.clear()
        self.secret = cookie or self.secret
        return answer

    @classmethod
    def signed_in(cls, api: Api, headers: dict[str, str] | None = None, *, operate: bool = False) -> "Person":
        """Return somebody who is signed in."""
        person = cls(api, headers, operate=operate)
        assert person.use_link().status_code == 303
        return person

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request with the cookie, following nothing."""
        headers = {"Cookie": f"{COOKIE}={self.secret}"} if self.secret else {}
        return self.api.client.request(method, path, headers=headers, follow_redirects=False, **options)

    def get(self, path: str) -> httpx.Response:
        """Look at a page."""
        return self.send("GET", path)

    def form_token(self) -> str:
        """Return what the session's forms carry, from a page."""
        return self.get("/").text.partition('name="form_token" value="')[2].partition('"')[0]

    def press(self, path: str, **fields: str) -> httpx.Response:
        """Send the form of a page."""
        return self.send("POST", path, data={"form_token": self.form_token(), **fields})

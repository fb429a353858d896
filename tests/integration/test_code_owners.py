"""Who may use code that people sent: drawn sequences of operations by several people, against a model in two sets."""

import random
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.api_stack import BOTH, Api, running_api, served_api
from tests.cli import ablate, speaking_to
from tests.factories import command_values
from tests.integration.test_code import GZIP, age, digest_of, dropped

PEOPLE = ("ada", "ben", "cleo", "olga")
OPERATOR = "olga"
CONTENTS = tuple(f"archive {number}".encode() for number in range(4))
DIGEST_OF = {digest_of(content): content for content in CONTENTS}
NEVER = digest_of(b"never sent")
STEPS = 250
OPERATIONS = ("upload", "find", "submit", "submit", "share", "share", "read", "read", "download", "drop")


@dataclass
class Model:
    """What must hold: who sent which archive, who got it from a sender, and the ablations with their archives."""

    senders: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    guests: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    made: dict[str, tuple[str, set[str]]] = field(default_factory=dict)

    def may_use(self, person: str, digest: str) -> bool:
        if not self.senders[digest]:
            return False
        return person in {OPERATOR, *self.senders[digest], *self.guests[digest]}


class World:
    """A service with people, and the operations that are drawn, each checked against the model."""

    def __init__(self, api: Api, seed: int) -> None:
        self.api, self.draw, self.model = api, random.Random(seed), Model()  # noqa: S311 - a reproducible draw
        self.headers = {name: api.token(name, "operate" if name == OPERATOR else "code") for name in PEOPLE}

    def call(self, person: str, method: str, path: str, **options: Any) -> Any:
        headers = {**self.headers[person], **options.pop("headers", {})}
        return self.api.client.request(method, path, headers=headers, **options)

    def post(self, person: str, values: dict[str, Any]) -> Any:
        key = f"key-{self.draw.randrange(2**60)}"
        return self.call(person, "POST", "/v1/ablations", json=values, headers={"Idempotency-Key": key})

    def upload(self, person: str, digest: str) -> None:
        options = {"params": {"digest": digest}, "content": DIGEST_OF[digest], "headers": GZIP}
        answer = self.call(person, "POST", "/v1/code:upload", **options)
        assert answer.json()["changed"] == (person not in self.model.senders[digest]), "others leave no trace"
        self.model.senders[digest].add(person)

    def find(self, person: str, digest: str) -> None:
        digests = self.draw.sample([*DIGEST_OF, NEVER], 3)
        answer = self.call(person, "POST", "/v1/code:find", json={"digests": digests})
        assert answer.json()["missing"] == sorted(one for one in digests if not self.model.may_use(person, one))

    def submit(self, person: str, digest: str) -> None:
        other = self.draw.choice([*DIGEST_OF, digest])
        variants = {"v": {"code": {"archive": other}}} if other != digest else {"v": {"args": ["x"]}}
        values = command_values(workload__code={"archive": digest}, variants=variants)
        answer = self.post(person, values)
        refused = {one for one in (digest, other) if not self.model.may_use(person, one)}
        assert answer.status_code == (422 if refused else 202), answer.text
        if refused:
            details = {error["detail"] for error in answer.json()["errors"]}
            assert details == {f"the service has no archive {one} of yours" for one in refused}
        else:
            self.model.made[answer.json()["id"]] = (person, {digest, other})

    def share(self, person: str, _digest: str) -> None:
        if not self.model.made:
            return
        ablation, guest = self.draw.choice(sorted(self.model.made)), self.draw.choice(PEOPLE)
        owner, digests = self.model.made[ablation]
        kept = {one for one in digests if self.model.senders[one]}
        answer = self.call(person, "POST", f"/v1/ablations/{ablation}:share-code", json={"name": guest})
        if person not in (owner, OPERATOR):
            assert answer.status_code == 403
        elif not kept:
            assert answer.status_code == 404
        elif person != OPERATOR and any(person not in self.model.senders[one] for one in kept):
            assert answer.status_code == 403, "a guest invites nobody"
        else:
            new = {one for one in kept if guest not in self.model.senders[one] | self.model.guests[one]}
            assert (answer.status_code, set(answer.json()["digests"])) == (200, new)
            for one in new:
                self.model.guests[one].add(guest)

    def read(self, person: str, _digest: str) -> None:
        if not self.model.made:
            return
        ablation = self.draw.choice(sorted(self.model.made))
        text = self.call(person, "GET", f"/v1/ablations/{ablation}/spec").json()["text"]
        digests = self.model.made[ablation][1]
        shown = set(re.findall("sha256:[0-9a-f]{64}", text))
        users = {one: {*self.model.senders[one], *self.model.guests[one], OPERATOR} for one in digests}
        assert shown == {one for one in digests if person in users[one]}

    def download(self, person: str, digest: str) -> None:
        answer = self.call(person, "GET", f"/v1/code/{digest}")
        if self.model.may_use(person, digest):
            assert (answer.status_code, answer.content) == (200, DIGEST_OF[digest])
        else:
            assert (answer.status_code, f"no archive {digest} of yours" in answer.text) == (404, True)

    def drop(self, _person: str, _digest: str) -> None:
        if self.draw.random() < 0.7:
            return
        for ablation in self.model.made:
            self.api.cancel(ablation)
        age(self.api, 100)
        dropped(self.api)
        self.model.senders.clear()
        self.model.guests.clear()


@pytest.mark.parametrize("kind", BOTH)
def test_drawn_operations_follow_the_model(kind: str, tmp_path: Path) -> None:
    with running_api(kind, tmp_path) as api:
        world = World(api, seed=45)
        for _ in range(STEPS):
            operation = getattr(world, world.draw.choice(OPERATIONS))
            operation(world.draw.choice(PEOPLE), world.draw.choice(sorted(DIGEST_OF)))
        assert len(world.model.made) > 10


def test_a_digest_of_somebody_else_and_one_that_nobody_sent_get_the_same_answers(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path, max_code_bytes=15) as api:
        world = World(api, seed=1)
        digest = digest_of(CONTENTS[0])
        world.upload("ada", digest)
        answers = {}
        for one in (digest, NEVER):
            search = world.call("ben", "POST", "/v1/code:find", json={"digests": [one]})
            values = command_values(workload__code={"archive": one}, variants={"v": {"args": ["x"]}})
            replies = [search, world.post("ben", values)]
            texts = [re.sub("req_[0-9A-Z]+", "", answer.text.replace(one, "DIGEST")) for answer in replies]
            answers[one] = [answer.status_code for answer in replies], texts
        assert answers[digest] == answers[NEVER]
        options = {"params": {"digest": digest}, "content": CONTENTS[0], "headers": GZIP}
        assert world.call("ben", "POST", "/v1/code:upload", **options).status_code == 507, "as for any new archive"


def test_a_hidden_archive_says_whom_to_ask(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path) as api:
        world = World(api, seed=1)
        values = command_values(workload__code={"archive": "hidden"}, variants={"v": {"args": ["x"]}})
        (error,) = world.post("ben", values).json()["errors"]
        assert "ablate share ABLATION --code-with NAME" in error["hint"]


def test_the_command_shares_the_code_of_an_ablation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served_api("sqlite", tmp_path) as api, speaking_to(api, monkeypatch):
        world, digest = World(api, seed=1), digest_of(CONTENTS[0])
        options = {"params": {"digest": digest}, "content": CONTENTS[0], "headers": {**api.admin, **GZIP}}
        assert api.client.post("/v1/code:upload", **options).status_code == 200
        values = command_values(workload__code={"archive": digest}, variants={"v": {"args": ["x"]}})
        assert world.post("ben", values).status_code == 422
        made = api.post_spec(values).json()["id"]
        done = ablate("share", made, "--code-with", "ben")
        assert (done.code, "ben may use 1 more archive" in done.out) == (0, True), done.err
        assert world.post("ben", values).status_code == 202
        assert "no token 'nobody'" in ablate("share", made, "--code-with", "nobody").err

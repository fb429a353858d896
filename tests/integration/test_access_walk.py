"""Random walks through tokens, node keys, ownership and attempts, beside a model that knows what each step may do."""

import random
from typing import Any

import httpx

from tests.api_stack import ADMIN, SIGNER, Api, api_fixture, bearer, signed
from tests.factories import spec_values

STEPS = 150
RANK = {"read": 0, "submit": 1, "operate": 2, "admin": 3, "worker": -1}
WRONG = "w" * 22


class Holder:
    """A token or node key as the model knows it."""

    def __init__(self, name: str, scope: str, secret: str) -> None:
        self.name, self.scope, self.live, self.dead = name, scope, [secret], []

    def end(self, *, keep: int) -> None:
        cut = len(self.live) - keep
        self.dead += self.live[:cut]
        self.live = self.live[cut:]


class Walk:
    """One walk: every step draws who does what, and knows the status that must come."""

    def __init__(self, api: Api, seed: int) -> None:
        self.api, self.rng, self.mark = api, random.Random(seed), f"s{seed}"  # noqa: S311 - draws that repeat
        self.root = Holder("admin", "admin", ADMIN)
        self.people: dict[str, Holder] = {}
        self.keys: dict[str, Holder] = {}
        self.gone: list[Holder] = []
        self.ablations: dict[str, tuple[Holder, str]] = {}
        """Owner and state by id."""
        self.nodes: dict[str, tuple[str, int]] = {}
        """Name and number of devices by node id."""
        self.attempts: dict[str, dict[str, Any]] = {}
        self.seen: set[tuple[str, int]] = set()

    def step(self) -> None:
        verbs = [self.create, self.add_node, self.rotate, self.revoke, self.submit, self.submit, self.cancel]
        verbs += [self.register, self.claim, self.claim, self.claim, self.use_attempt, self.use_attempt]
        self.rng.choice(verbs)()

    def draw(self) -> tuple[Holder, str, bool]:
        """Draw a holder and one of its secrets, and whether that counts."""
        holder = self.rng.choice([self.root, self.root, *self.people.values(), *self.keys.values(), *self.gone])
        secret = self.rng.choice(holder.live + holder.dead)
        return holder, secret, secret in holder.live

    def send(self, what: str, secret: str, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {**bearer(secret), **options.pop("headers", {})}
        answer = self.api.client.request(method, path, headers=headers, **options)
        self.seen.add((what, answer.status_code))
        return answer

    def expect(self, answer: httpx.Response, counts: bool, may: bool, good: set[int]) -> bool:
        """Compare; return whether it was done."""
        expected = good if counts and may else {403} if counts else {401}
        assert answer.status_code in expected, (answer.request.method, answer.request.url, answer.text, expected)
        return answer.is_success

    def rank(self, holder: Holder, needed: str) -> bool:
        return RANK[holder.scope] >= RANK[needed]

    def create(self) -> None:
        by, secret, counts = self.draw()
        name, scope = f"{self.mark}-{self.rng.randrange(5)}", self.rng.choice(["read", "submit", "submit", "operate"])
        answer = self.send("create", secret, "POST", "/v1/tokens", json={"name": name, "scope": scope})
        good = {409} if name in self.people else {201}
        if self.expect(answer, counts, self.rank(by, "admin"), good):
            self.people[name] = Holder(name, scope, answer.json()["secret"])

    def add_node(self) -> None:
        by, secret, counts = self.draw()
        name = f"{self.mark}-node-{self.rng.randrange(4)}"
        answer = self.send("add", secret, "POST", "/v1/nodes", json={"name": name, "node_class": "cpu"})
        if self.expect(answer, counts, self.rank(by, "operate"), {409} if name in self.keys else {201}):
            self.keys[name] = Holder(name, "worker", answer.json()["secret"])

    def _which(self) -> tuple[dict[str, Holder], str, str, str, str]:
        if self.rng.random() < 0.5:
            known, path, suffix, needed = self.people, "/v1/tokens", "", "admin"
        else:
            known, path, suffix, needed = self.keys, "/v1/nodes", "-key", "operate"
        return known, self.rng.choice([*known, f"{self.mark}-never"]), path, suffix, needed

    def rotate(self) -> None:
        by, secret, counts = self.draw()
        known, name, path, suffix, needed = self._which()
        grace_s = self.rng.choice([0, 3600])
        answer = self.send("rotate", secret, "POST", f"{path}/{name}:rotate{suffix}", json={"grace_s": grace_s})
        if self.expect(answer, counts, self.rank(by, needed), {200} if name in known else {404}):
            known[name].live.append(answer.json()["secret"])
            if grace_s == 0:
                known[name].end(keep=1)
            elif self.rng.random() < 0.5:
                verb = "end-old-keys" if suffix else "end-old"
                assert self.send("end", ADMIN, "POST", f"{path}/{name}:{verb}").is_success
                known[name].end(keep=1)

    def revoke(self) -> None:
        if self.rng.random() < 0.6:
            return
        by, secret, counts = self.draw()
        known, name, path, suffix, needed = self._which()
        answer = self.send("revoke", secret, "POST", f"{path}/{name}:revoke{suffix}", json={"reason": "drawn"})
        if self.expect(answer, counts, self.rank(by, needed), {204} if name in known else {404}):
            holder = known.pop(name)
            holder.end(keep=0)
            self.gone.append(holder)

    def submit(self) -> None:
        by, secret, counts = self.draw()
        headers = {"Idempotency-Key": f"{self.mark}-{self.rng.random()}"}
        answer = self.send("submit", secret, "POST", "/v1/ablations", json=spec_values(), headers=headers)
        if self.expect(answer, counts, self.rank(by, "submit"), {202}):
            self.ablations[answer.json()["id"]] = (by, "open")

    def cancel(self) -> None:
        if not self.ablations:
            return
        by, secret, counts = self.draw()
        ablation = self.rng.choice(list(self.ablations))
        owner, state = self.ablations[ablation]
        may = self.rank(by, "operate") or (self.rank(by, "submit") and by is owner)
        answer = self.send("cancel", secret, "POST", f"/v1/ablations/{ablation}:cancel")
        if self.expect(answer, counts, may, {202} if state == "open" else {202, 409}):
            self.ablations[ablation] = (owner, "cancelled")

    def register(self) -> None:
        by, secret, counts = self.draw()
        name, devices = self.rng.choice([by.name, f"{self.mark}-node-0"]), self.rng.randint(0, 3)
        node_class = self.rng.choice(["cpu", "cpu", "cpu", "h200"])
        hardware = [{"index": number, "name": "x", "memory_bytes": 1} for number in range(devices)]
        body = {"node_class": node_class, "devices": hardware, "versions": {}, "code_digest": "c"}
        answer = self.send("register", secret, "PUT", f"/v1/nodes/{name}", json={**body, "public_key": SIGNER.key})
        may = by.scope == "worker" and by.name == name and node_class == "cpu"
        if self.expect(answer, counts, may, {200}):
            self.nodes[answer.json()["node_id"]] = (name, max(1, devices))

    def claim(self) -> None:
        if not self.nodes:
            return
        by, secret, counts = self.draw()
        own = [node for node, (name, _) in self.nodes.items() if name == by.name]
        node = self.rng.choice([*own, *own, *self.nodes])
        name, devices = self.nodes[node]
        held = sum(one["node"] == node for one in self.attempts.values() if one["held"])
        answer = self.send("claim", secret, "POST", "/v1/blocks:claim", json={"node_id": node})
        may = by.scope == "worker" and by.name == name
        if self.expect(answer, counts, may, {409} if held >= devices else {200, 204}) and answer.status_code == 200:
            block = answer.json()
            self.attempts[block["attempt_id"]] = {"block": block, "token": block["token"], "node": node, "held": True}

    def use_attempt(self) -> None:
        if not self.attempts:
            return
        attempt = self.rng.choice([*self.attempts, *[one for one, known in self.attempts.items() if known["held"]]])
        known = self.attempts[attempt]
        by, secret, counts = self.draw()
        if self.rng.random() < 0.5 and self.nodes[known["node"]][0] in self.keys:
            by = self.keys[self.nodes[known["node"]][0]]
            secret, counts = by.live[-1], True
        others = [one["token"] for one in self.attempts.values() if one is not known]
        token = self.rng.choice([known["token"], known["token"], WRONG, *others[-2:]])
        verb, body = "heartbeat", {"token": token}
        if self.rng.random() < 0.5:  # a report that was sent before would be answered with 200 again
            message = {"token": token, "failure_class": "preempted", "message": f"{self.rng.random()}"}
            verb, body = "report", signed(known["block"], message)
        answer = self.send(verb, secret, "POST", f"/v1/attempts/{attempt}:{verb}", json=body)
        good = {200} if known["held"] and token == known["token"] else {409}
        may = by.scope == "worker" and by.name == self.nodes[known["node"]][0]
        if self.expect(answer, counts, may, good) and verb == "report":
            known["held"] = False


api = api_fixture(scope="module")


def test_random_walks_do_what_the_model_says(api: Api) -> None:
    seen: set[tuple[str, int]] = set()
    for seed in range(6):
        walk = Walk(api, seed)
        for _ in range(STEPS):
            walk.step()
        seen |= walk.seen
    expected = {
        "create": {201, 401, 403, 409},
        "add": {201, 401, 403, 409},
        "rotate": {200, 401, 403, 404},
        "revoke": {204, 403},
        "submit": {202, 401, 403},
        "cancel": {202, 401, 403, 409},
        "register": {200, 401, 403},
        "claim": {200, 401, 403, 409},
        "heartbeat": {200, 403, 409},
        "report": {200, 403, 409},
    }
    assert {(what, status) for what, statuses in expected.items() for status in statuses} - seen == set()

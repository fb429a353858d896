"""Several projectors: drawn interleavings with crashes, freezes and clock steps against one projector alone."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, select, update

from experiments.reporting.mlflow import sink
from experiments.reporting.mlflow.runs import is_open
from experiments.reporting.mlflow.sink import Sink
from service.background import ablation_lease
from service.background import projector as projector_module
from service.lifecycle import OutboxKind
from service.store import outbox
from service.store.ablations import results
from service.store.columns import db_now
from service.store.tables import ablations, blocks, trials
from service.store.tables import leaders as leaders_table
from service.store.tables import outbox as outbox_table
from tests.api_stack import Api, running_api
from tests.bench.costs import copies
from tests.integration.mlflow_in_memory import Server
from tests.integration.projector_world import HERE, LEASE_S, Steps, World

SEQUENCES = 7
STEPS = 70


@pytest.fixture(params=["sqlite", "postgresql"])
def api(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Api]:
    with running_api(request.param, tmp_path) as running:
        yield running


class Draw:
    """One drawn sequence: what happens to ablations, and to the projectors that show them."""

    def __init__(self, world: World, server: Server, seed: int, template: str) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - a drawn test
        self.world, self.server = world, server
        self.steps = [self._start() for _ in range(self.chance.randint(2, 4))]
        self.names = copies(world.store, template, self.chance.randint(1, 3))
        self.states = dict.fromkeys(self.names, "queued")

    def _start(self) -> Steps:
        holder: list[Steps] = []
        client = self.server.client(lambda: holder[0].before_call())
        holder.append(Steps(self.world, client))
        return holder[0]

    def one(self) -> None:
        """Do one drawn thing."""
        acts = {self._step: 80, self._ask: 3, self._move: 3, self._crash: 1.5, self._freeze: 1.5, self._steal: 1.5}
        acts |= {self._break: 1.5, self._due: 1}
        (act,) = self.chance.choices(list(acts), list(acts.values()))
        act()

    def _step(self) -> None:
        one = self.chance.choice(self.steps)
        for _ in range(self.chance.randint(1, 12)):
            one.step()

    def _somebody(self) -> Steps:
        """Return a projector, rather one that is writing."""
        writing = [one for one in self.steps if one.is_armed]
        return self.chance.choice(writing if writing and self.chance.random() < 0.8 else self.steps)

    def _meanwhile(self, still: Steps) -> None:
        """Let the others go on, some steps or so many that they are done."""
        others = [one for one in self.steps if one is not still]
        for _ in range(self.chance.choice([0, 20, 60, 200])):
            self.chance.choice(others).step()

    def _ask(self) -> None:
        """Ask again, as a rebuild does."""
        name = self.chance.choice(self.names)
        kind = OutboxKind.PROJECT if self.states[name] == "cancelled" else OutboxKind.ANNOUNCE
        with self.world.store.write() as connection:
            outbox.add(connection, kind, name, rank=self.chance.choice(list(outbox.Rank)))

    def _move(self) -> None:
        """Let an ablation go on."""
        self._go_on(self.chance.choice(self.names))

    def _go_on(self, name: str) -> None:
        if self.states[name] == "queued":
            self._set(name, "running", OutboxKind.ANNOUNCE)
        elif self.states[name] == "running":
            self._set(name, "cancelled", None)
            self._set(name, "cancelled", OutboxKind.PROJECT, report_html=f"<p>{name}</p>")

    def _set(self, name: str, state: str, kind: OutboxKind | None, **values: Any) -> None:
        with self.world.store.write() as connection:
            row = update(ablations).where(ablations.c.id == name)
            connection.execute(row.values(state=state, finished_at=db_now(), **values))
            if state == "cancelled":
                lost = update(trials).where(trials.c.ablation_id == name, trials.c.block_index == 0)
                connection.execute(lost.values(state="cancelled"))
                held = update(blocks).where(blocks.c.ablation_id == name, blocks.c["index"] == 0)
                connection.execute(held.values(attempt_id=f"att_{name[4:]}"))
            if kind is not None:
                outbox.add(connection, kind, name)
        self.states[name] = state

    def _crash(self) -> None:
        gone = self._somebody()
        self.steps[self.steps.index(gone)] = self._start()
        gone.kill()
        if self.chance.random() < 0.7:
            self.world.end_leases(gone.projector.holder)

    def _freeze(self) -> None:
        """Freeze one for longer than its lease, while the others renew theirs; its alarm ends it if it is writing."""
        frozen = self._somebody()
        for _ in range(3):
            self.world.now += LEASE_S / 2.5
            for other in self.steps:
                if other is not frozen:
                    _renew(other)
        self.world.end_leases(frozen.projector.holder)
        frozen.is_frozen = True
        self._meanwhile(frozen)
        frozen.is_frozen = False
        if frozen.is_armed:
            self.steps[self.steps.index(frozen)] = self._start()
            frozen.kill()

    def _steal(self) -> None:
        """Set the database's clock: a lease ends early, and its holder goes on writing, late."""
        one = self._somebody()
        stolen = set(self.world.leases(one.projector.holder))
        self.world.stolen |= stolen
        self.world.end_leases(one.projector.holder)
        for name in stolen:
            self._go_on(name)
            self._go_on(name)
        self._meanwhile(one)
        if self.chance.random() < 0.3:
            _renew(one)

    def _break(self) -> None:
        self.chance.choice(self.steps).fails_next = True

    def _due(self) -> None:
        with self.world.store.write() as connection:
            connection.execute(update(outbox_table).values(due_at=db_now()))

    def finish(self) -> None:
        """Let everything be answered, without further trouble."""
        for _ in range(400):
            self._due()
            with self.world.store.read() as connection:
                left = connection.execute(select(outbox_table)).all()
            if not left:
                break
            for one in self.steps:
                one.fails_next = False
                for _ in range(40):
                    one.step()
            living = [one.projector.holder for one in self.steps]
            with self.world.store.write() as connection:
                connection.execute(delete(leaders_table).where(leaders_table.c.holder.not_in(living)))
        else:
            raise AssertionError(f"not answered: {left}")

    def close(self) -> None:
        for one in self.steps:
            one.kill()


def _renew(one: Steps) -> None:
    """Do what the keeper of a living process does, in no step of its own."""
    whole, one.projector._lease._store = one.projector._lease._store, one.world.store
    one.projector.renew()
    one.projector._lease._store = whole


def alone(world: World, names: list[str], patch: pytest.MonkeyPatch) -> Server:
    """Return what one sink writes that was never disturbed."""
    server = Server()
    patch.setattr(sink, "connect", lambda *_args, **_options: server.client(lambda: None))
    for name in names:
        with world.store.read() as connection:
            view = results.ablation_view(connection, name)
            html = None if is_open(view.state) else results.read_report(connection, name)
        Sink("memory").project(view, html)
    return server


def test_drawn_interleavings_end_as_one_projector_alone_would(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    template = api.submit(design__blocks={"count": 6})["id"]
    with api.store.write() as connection:
        connection.execute(delete(outbox_table))
    at_once = 0
    for seed in range(SEQUENCES):
        world, server = World(api.store), Server()
        with monkeypatch.context() as patch:
            patch.setattr(ablation_lease, "now_s", lambda world=world: world.now)
            patch.setattr(projector_module, "SLICE_S", random.Random(seed).choice([60.0, 0.0]))  # noqa: S311
            patch.setattr(sink, "connect", lambda *_args, **_options: HERE.client)
            draw = Draw(world, server, seed, template)
            try:
                for name in draw.names:
                    with api.store.write() as connection:
                        outbox.add(connection, OutboxKind.ANNOUNCE, name)
                for _ in range(STEPS):
                    draw.one()
                draw.finish()
            finally:
                draw.close()
            expected = alone(world, draw.names, patch)
        assert world.problems == [], f"seed {seed}"
        for name in draw.names:
            assert server.shown(name) == expected.shown(name), f"seed {seed}: {name}"
            with api.store.read() as connection:
                told = connection.execute(select(ablations.c.mlflow_run_id).where(ablations.c.id == name)).scalar()
            assert server.runs[str(told)]["tags"]["ablation.run"] == "parent", f"seed {seed}"
        at_once = max(at_once, world.together)
    assert at_once > 1, "nothing ever ran in parallel"

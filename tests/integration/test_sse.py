"""Server-sent events over a real server: follow, replay, keep-alive, end, and shutdown with streams open."""

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import httpx_sse
import pytest
from sqlalchemy import event

from ablate.service.background.outbox_handlers import OutboxHandlers
from ablate.service.lifecycle import EventKind, OutboxKind
from ablate.service.store.session import Store
from tests.api_stack import ADMIN, WORKER, Api, parse_events, running_api, served_api
from tests.ports import free_port
from tests.service_process import API, is_up, service_process
from tests.waiting import LIMIT_S, until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    port = free_port()
    url, tokens = f"http://127.0.0.1:{port}", {"admin_token": ADMIN, "worker_token": WORKER}
    with (
        service_process(API, tmp_path / "log", home=tmp_path, port=port, **tokens) as process,
        httpx.Client(base_url=url, trust_env=False, timeout=LIMIT_S) as client,
    ):
        until(lambda: is_up(url))
        yield client, process


def _api(client: httpx.Client, tmp_path: Path) -> Api:
    return Api(client, Store(f"sqlite:///{tmp_path}/ablate.db"))


def test_stream_follows_until_end_and_ends_with_the_server(
    server: tuple[httpx.Client, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    client, process = server
    api = _api(client, tmp_path)
    made = api.submit()
    first_event = threading.Event()

    def follow(path: str) -> list[httpx_sse.ServerSentEvent]:
        events = []
        with httpx_sse.connect_sse(client, "GET", path, headers=api.admin) as source:
            for event in source.iter_sse():
                events.append(event)
                first_event.set()
        return events

    pool = ThreadPoolExecutor()
    follower = pool.submit(follow, made["links"]["events"])
    node = api.register()
    block = api.claimed(node)
    api.cancel(made["id"])
    asked = {"failure_class": "cancelled", "message": "cancel was asked for"}
    assert api.attempt(block, "report", **asked).status_code == 200
    all_events = follower.result(LIMIT_S)
    assert [event.json()["to"] for event in all_events if event.event == "ablation.state"] == [
        "queued",
        "running",
        "cancelling",
        "cancelled",
    ]
    assert all_events[-1].event == "end"
    assert all_events[-1].json()["reason"] == "the ablation is cancelled"
    assert [int(event.id) for event in all_events] == sorted(int(event.id) for event in all_events)

    waiting = api.submit()
    first_event.clear()
    open_stream = pool.submit(follow, waiting["links"]["events"])
    assert first_event.wait(LIMIT_S)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
    assert open_stream.result(LIMIT_S)[-1].event != "end", (
        "a stream that is cut off raises, one that the server ends does not"
    )


def test_last_event_id_replays_only_what_came_after(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path) as api:
        made = api.submit()
        api.cancel(made["id"])
        events = api.events(made["id"])
        middle = events[3][1]["seq"]
        answer = api.get(f"/v1/ablations/{made['id']}/events", headers={"Last-Event-ID": str(middle)})
        replayed = [line for line in answer.text.splitlines() if line.startswith("id: ")]
        assert replayed == [f"id: {event['seq']}" for _, event in events[4:]]
        bad = api.get(f"/v1/ablations/{made['id']}/events", headers={"Last-Event-ID": "x"})
        assert bad.status_code == 422


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
def test_a_stream_ends_when_nothing_more_can_come_and_not_before(
    kind: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ablate.service.http.event_streams.POLL_S", 0.02)
    with served_api(kind, tmp_path) as api:
        made, received, polls = api.submit(), list[tuple[str, str | None]](), list[str]()
        event.listen(api.store.reader, "before_cursor_execute", lambda *asked: polls.append(asked[2]))
        follower = threading.Thread(target=_follow, args=(api, made["links"]["events"], received))
        follower.start()
        _end(api, made["id"], state)
        until(lambda: ("ablation.state", state) in received, what=state)
        if state != "cancelled":
            polls.clear()
            until(lambda: sum("events.seq >" in poll for poll in polls) > 5, what="polls")
            assert follower.is_alive(), "the verdict is still to come"
            assert OutboxHandlers(api.store).run_due(OutboxKind.JUDGE)
        follower.join(LIMIT_S)
        assert not follower.is_alive()
        _check_places(api, made["id"])
    last = [name for name, _ in received][-2:]
    assert last == (["ablation.state", "end"] if state == "cancelled" else ["verdict", "end"])


def _check_places(api: Api, ablation_id: str) -> None:
    """Compare block and arm of every event with the lists of blocks and trials."""
    ablation = f"/v1/ablations/{ablation_id}"
    blocks = {one["id"]: (one["index"], None) for one in api.get(f"{ablation}/blocks").json()["items"]}
    trials = {one["id"]: (one["block_index"], one["arm"]) for one in api.get(f"{ablation}/trials").json()["items"]}
    events = [event for _, event in api.events(ablation_id)]
    places = {event["subject"]: (event["block_index"], event["arm"]) for event in events}
    assert places.keys() > blocks.keys() | trials.keys()
    assert places.items() >= (blocks | trials).items()
    assert places[ablation_id] == (None, None)
    attempts = [place for subject, place in places.items() if subject.startswith("att_")]
    assert attempts
    assert all((index, None) in blocks.values() and arm is None for index, arm in attempts)


def _follow(api: Api, path: str, received: list[tuple[str, str | None]]) -> None:
    with httpx_sse.connect_sse(api.client, "GET", path, headers=api.admin) as source:
        received.extend((event.event, event.json()["to"]) for event in source.iter_sse())


def _end(api: Api, ablation_id: str, state: str) -> None:
    """Bring an ablation to its end: all blocks done, every block failed, or cancelled while one runs."""
    node = api.register()
    if state == "completed":
        assert api.finish(node) == 6
        return
    while block := api.claim(node):
        if state == "cancelled":
            api.cancel(ablation_id)
            api.attempt(block, "report", failure_class="cancelled", message="cancel was asked for")
        else:
            api.attempt(block, "report", failure_class="user_error", message="x")


def test_event_says_what_moved_who_moved_it_and_why(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path) as api:
        made = api.submit()
        api.cancel(made["id"])
        events = api.events(made["id"])
    name, first = events[0]
    assert name == first["kind"] == "ablation.state"
    assert list(first) == [
        *("seq", "at", "kind", "subject", "block_index", "arm"),
        *("from", "to", "actor", "reason", "data"),
    ]
    assert (first["subject"], first["from"], first["to"], first["data"]) == (made["id"], None, "queued", {})
    assert (first["actor"], first["reason"]) == ("admin", "submitted")
    assert {name for name, _ in events} <= set(EventKind)


def test_a_stream_hears_all_of_what_is_more_than_one_look_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served_api("sqlite", tmp_path) as api:
        made = api.submit()
        api.cancel(made["id"])
        expected = api.events(made["id"])
        for most in (1, 2, len(expected) - 1, len(expected)):
            monkeypatch.setattr("ablate.service.http.event_streams._EVENTS_AT_ONCE", most)
            assert api.events(made["id"]) == expected


def test_quiet_stream_is_kept_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ablate.service.http.event_streams.KEEP_ALIVE_S", 0.3)
    with served_api("sqlite", tmp_path) as api:
        made = api.submit()
        with api.client.stream("GET", made["links"]["events"], headers=api.admin) as answer:
            lines = answer.iter_lines()
            for _ in range(2):
                assert ": keep-alive" in lines
            api.cancel(made["id"])
            assert "event: end" in lines


def test_log_stream_sends_text_with_its_end_offset_and_ends_with_the_trial(tmp_path: Path) -> None:
    with running_api("sqlite", tmp_path) as api:
        api.submit()
        node = api.register()
        block = api.claimed(node)
        trial = block["trials"][0]["trial_id"]
        logs = [{"trial_id": trial, "offset": 0, "text": "one\ntwo"}]
        api.attempt(block, "report", logs=logs, failure_class="user_error", message="over")
        answer = api.get(f"/v1/trials/{trial}/log", headers={"Accept": "text/event-stream"})
    assert 'event: log\ndata: {"attempt": 1, "text": "one\\ntwo"}\nid: 1-7\n\n' in answer.text
    assert answer.text.endswith('event: end\ndata: {"reason": "the trial is over"}\nid: 1-7\n\n')


@pytest.mark.parametrize("lengths", [(40, 7), (7, 40), (12, 12), (0, 9)])
def test_a_log_that_is_followed_begins_again_with_the_next_attempt(lengths: tuple[int, int], tmp_path: Path) -> None:
    with served_api("sqlite", tmp_path) as api:
        api.submit()
        node, texts = api.register(), ["first " * 9, "again " * 9]
        for number, length in enumerate(lengths):
            block = api.claimed(node)
            trial = block["trials"][0]["trial_id"]
            logs = [{"trial_id": trial, "offset": 0, "text": texts[number][:length]}]
            assert api.attempt(block, "heartbeat", logs=logs).status_code == 200
            if number == 0:
                url, headers = f"/v1/trials/{trial}/log", {**api.admin, "Accept": "text/event-stream"}
                follower = _Follower(api.client, url, headers)
                follower.until(lambda pieces: "".join(pieces) == texts[0][: lengths[0]])
                api.attempt(block, "report", failure_class="preempted", message="x")
        follower.until(lambda pieces: "".join(pieces) == texts[0][: lengths[0]] + texts[1][: lengths[1]])
        back = _Follower(api.client, url, headers | {"Last-Event-ID": f"1-{lengths[0]}"})
        back.until(lambda pieces: "".join(pieces) == texts[1][: lengths[1]])
        api.attempt(block, "report", failure_class="user_error", message="over")
        for one in (follower, back):
            one.thread.join(LIMIT_S)
            assert not one.thread.is_alive()
        assert api.get(url, headers={"Accept": "text/event-stream", "Last-Event-ID": "-1"}).status_code == 422


class _Follower:
    """Reads the texts of a log's stream in a thread."""

    def __init__(self, client: httpx.Client, url: str, headers: dict[str, str]) -> None:
        self.texts: list[str] = []
        self.thread = threading.Thread(target=self._read, args=(client, url, headers), daemon=True)
        self.thread.start()

    def _read(self, client: httpx.Client, url: str, headers: dict[str, str]) -> None:
        with httpx_sse.connect_sse(client, "GET", url, headers=headers) as source:
            for event in source.iter_sse():
                if event.event == EventKind.END:
                    return
                if event.event == EventKind.LOG:
                    self.texts.append(event.json()["text"])

    def until(self, is_told: Callable[[list[str]], bool]) -> None:
        until(lambda: is_told(self.texts), what=f"more than {self.texts}")


@pytest.mark.parametrize("page_bytes", range(4, 9))
def test_pages_of_a_log_cut_no_character_in_two(
    page_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ablate.service.http.event_streams._LOG_BYTES_AT_ONCE", page_bytes)
    text = "größer ≤ 4 MiB, 𝛥 = ½"
    with running_api("sqlite", tmp_path) as api:
        api.submit()
        block = api.claimed(api.register())
        trial = block["trials"][0]["trial_id"]
        logs = [{"trial_id": trial, "offset": 0, "text": text}]
        api.attempt(block, "report", logs=logs, failure_class="user_error", message="over")
        answer = api.get(f"/v1/trials/{trial}/log", headers={"Accept": "text/event-stream"})
    pieces = [data["text"] for name, data in parse_events(answer.text) if name == "log"]
    assert "".join(pieces) == text
    assert len(pieces) > 2

import asyncio
import random
from typing import Any, cast

from service.http.joined_writes import JoinedWrites


class Sent:
    """A transport that notes what it is told to do."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append("closed")

    def is_closing(self) -> bool:
        return "closed" in self.done


def _made() -> tuple[Sent, JoinedWrites]:
    sent = Sent()
    return sent, JoinedWrites(cast("asyncio.Transport", sent), asyncio.get_running_loop())


def test_a_head_goes_with_its_body_and_alone_when_none_follows_at_once() -> None:
    async def run() -> None:
        sent, joined = _made()
        joined.write(b"head ")
        joined.write(b"body")
        assert sent.done == [b"head body"]
        joined.write(b"head of a stream")
        await asyncio.sleep(0)
        assert sent.done[1:] == [b"head of a stream"]
        await asyncio.sleep(0)
        assert len(sent.done) == 2

    asyncio.run(run())


def test_what_is_held_is_sent_before_the_end_and_the_rest_is_the_transports_own() -> None:
    async def run() -> None:
        sent, joined = _made()
        joined.write(b"last words")
        assert not joined.is_closing()
        joined.close()
        assert sent.done == [b"last words", "closed"]
        assert joined.is_closing()
        await asyncio.sleep(0)
        assert len(sent.done) == 2

    asyncio.run(run())


def test_pieces_arrive_whole_in_their_order_and_at_most_one_is_held() -> None:
    async def run() -> None:
        chance = random.Random(10)  # noqa: S311
        for _ in range(200):
            sent, joined = _made()
            pieces = [chance.randbytes(chance.choice([0, 1, 5])) for _ in range(20)]
            for number, piece in enumerate(pieces):
                joined.write(piece)
                assert len(b"".join(pieces[: number + 1])) - len(b"".join(sent.done)) <= len(piece)
                if chance.random() < 0.3:
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert b"".join(sent.done) == b"".join(pieces)

    asyncio.run(run())

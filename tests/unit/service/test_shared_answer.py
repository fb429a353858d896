import asyncio

import pytest

from service.http.shared_answer import SharedAnswer


class Made:
    """Counts how often it is asked, and waits until it may answer."""

    def __init__(self, *failing: int) -> None:
        self.count = 0
        self.may_answer = asyncio.Event()
        self.failing = failing

    async def __call__(self) -> int:
        self.count += 1
        number = self.count
        await self.may_answer.wait()
        if number in self.failing:
            raise OSError(f"failed {number}")
        return number


def test_all_who_ask_meanwhile_hear_the_same() -> None:
    async def run() -> None:
        made = Made()
        shared = SharedAnswer(made, fresh_s=60)
        asking = [asyncio.create_task(shared.get()) for _ in range(100)]
        await asyncio.sleep(0)
        asking[0].cancel()  # who goes away ends it for nobody else
        made.may_answer.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert answers[1:] == [1] * 99
        assert await shared.get() == 1

    asyncio.run(run())


def test_an_old_answer_is_made_again() -> None:
    async def run() -> None:
        made = Made()
        made.may_answer.set()
        shared = SharedAnswer(made, fresh_s=0.05)
        assert [await shared.get(), await shared.get()] == [1, 1]
        await asyncio.sleep(0.1)
        assert await shared.get() == 2

    asyncio.run(run())


def test_an_error_is_heard_by_all_who_wait_and_kept_for_nobody() -> None:
    async def run() -> None:
        made = Made(1)
        shared = SharedAnswer(made, fresh_s=60)
        asking = [asyncio.create_task(shared.get()) for _ in range(5)]
        await asyncio.sleep(0)
        made.may_answer.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert [str(one) for one in answers] == ["failed 1"] * 5
        assert await shared.get() == 2

    asyncio.run(run())


def test_a_failed_answer_says_so_again_and_again() -> None:
    async def run() -> None:
        made = Made(1, 2)
        made.may_answer.set()
        shared = SharedAnswer(made, fresh_s=60)
        for number in (1, 2):
            with pytest.raises(OSError, match=f"failed {number}"):
                await shared.get()

    asyncio.run(run())

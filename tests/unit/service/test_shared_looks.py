import asyncio

import pytest

from service.http.shared_looks import SharedLooks


class Look:
    """Counts how often it is done, and waits until it may find something."""

    def __init__(self, *failing: int) -> None:
        self.count = 0
        self.may_find = asyncio.Event()
        self.failing = failing

    async def __call__(self) -> int:
        self.count += 1
        number = self.count
        await self.may_find.wait()
        if number in self.failing:
            raise OSError(f"failed {number}")
        return number


def test_all_at_one_place_look_once_and_who_comes_later_hears_the_same() -> None:
    async def run() -> None:
        look, shared = Look(), SharedLooks[int](most=2)
        asking = [asyncio.create_task(shared.get("here", look)) for _ in range(100)]
        await asyncio.sleep(0)
        asking[0].cancel()  # who goes away ends it for nobody else
        look.may_find.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert found[1:] == [1] * 99
        assert await shared.get("here", look) == 1
        assert await shared.get("there", look) == 2

    asyncio.run(run())


def test_a_failed_look_is_heard_by_all_and_done_again() -> None:
    async def run() -> None:
        look, shared = Look(1), SharedLooks[int](most=2)
        look.may_find.set()
        found = await asyncio.gather(*[shared.get("here", look) for _ in range(3)], return_exceptions=True)
        assert [str(one) for one in found] == ["failed 1"] * 3
        assert await shared.get("here", look) == 2

    asyncio.run(run())


@pytest.mark.parametrize("most", [1, 2, 5])
def test_the_oldest_place_is_forgotten(most: int) -> None:
    async def run() -> None:
        look, shared = Look(), SharedLooks[int](most=most)
        look.may_find.set()
        for place in range(most + 1):
            await shared.get(place, look)
        assert await shared.get(most, look) == most + 1
        assert await shared.get(0, look) == most + 2

    asyncio.run(run())


def test_an_unsettled_place_is_shared_while_it_is_looked_at_and_no_longer() -> None:
    async def run() -> None:
        look, shared = Look(), SharedLooks[int](most=2)
        asking = [asyncio.create_task(shared.get("here", look, is_settled=False)) for _ in range(100)]
        await asyncio.sleep(0)
        look.may_find.set()
        assert await asyncio.gather(*asking) == [1] * 100
        assert await shared.get("here", look, is_settled=False) == 2

    asyncio.run(run())

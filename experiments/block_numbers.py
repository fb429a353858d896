"""Numbers of blocks and of places in a block for users, from 1; `index` and `position` in code and JSON start at 0."""

from collections.abc import Sequence


def block_number(index: int) -> int:
    """Return the number that users see for a block index."""
    return index + 1


def block_index(number: int) -> int:
    """Return the index of the block with this number."""
    return number - 1


def block_name(index: int, planned: int | None = None) -> str:
    """Return "block 2", or "block 2/6" when six are planned."""
    of = "" if planned is None else f"/{planned}"
    return f"block {block_number(index)}{of}"


def block_list(indices: Sequence[int]) -> str:
    """List the numbers of growing block indices with ranges: "1-3, 6"."""
    runs: list[tuple[int, int]] = []
    for number in map(block_number, indices):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def place_number(position: int) -> int:
    """Return the number that users see for a place in a block's order."""
    return position + 1

"""Text from outside on its way into a column."""

MOST_CHARACTERS = 2000


def storable(text: str) -> str:
    """Return `text` as a column takes it: cut, and without NUL, which PostgreSQL refuses."""
    return text[:MOST_CHARACTERS].replace("\0", "\\0")

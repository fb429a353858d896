"""How old something is, for pages."""

from datetime import UTC, datetime


def age_s(rfc3339: str) -> float:
    """Return the seconds since an RFC 3339 moment."""
    return (datetime.now(UTC) - datetime.fromisoformat(rfc3339)).total_seconds()

"""Secrets of a container: a file `ablate_<setting>` replaces the variable ABLATE_<SETTING>."""

from pathlib import Path

_FOLDER = Path("/run/secrets")
"""Container engines mount secrets here."""


def secrets_folder() -> Path | None:
    """Return the folder with secrets, or None if there is none."""
    return _FOLDER if _FOLDER.is_dir() else None

"""Secrets of a container: a file `ablate_<setting>` is as good as the variable ABLATE_<SETTING>."""

from pathlib import Path

_FOLDER = Path("/run/secrets")
"""Where container engines put them."""


def secrets_folder() -> Path | None:
    """Return the folder that settings are read from besides the environment, None outside of such a container."""
    return _FOLDER if _FOLDER.is_dir() else None

"""Where the CLI keeps what it saves: files below this user's home of the stack."""

from pathlib import Path

from service.settings import get_client_settings
from service.stack.layout import StackFiles


def home_files() -> StackFiles:
    """Return the file names of the home that the environment names."""
    return StackFiles(home=get_client_settings().home)


def save_report(files: StackFiles, ablation_id: str, page: str, path: Path | None = None) -> Path:
    """Write a report page to `path` or below the home; return the absolute path."""
    target = (path or files.reports / f"{ablation_id}.html").absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target

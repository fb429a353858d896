"""Where the templates of pages are, and the environment that renders them: everything is escaped, nothing undefined."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).parent / "templates"


def make_environment(*folders: Path) -> Environment:
    """Return the environment for the templates in `folders`, which may use those of the report."""
    return Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

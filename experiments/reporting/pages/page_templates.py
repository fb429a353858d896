"""The templates of pages, and the environment that renders them: escaped output, undefined names are errors."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).parent / "templates"


def make_environment(*folders: Path) -> Environment:
    """Return the environment for the templates in `folders`; they may use the report's templates."""
    return Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

"""What pages load: one style sheet and the scripts of the live parts, at addresses that change with them."""

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from experiments.reporting.pages.page_templates import TEMPLATES
from experiments.reporting.pictures.theme import theme_css
from service.errors import NotFound
from service.web.sending import compressed

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parent / "static"
_FOREVER = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}


class StaticFile(NamedTuple):
    """One file as it is sent."""

    body: bytes
    media_type: str


@cache
def files() -> dict[str, StaticFile]:
    """Return every file by its name; the style sheet is that of the report and what pages add."""
    style = "\n".join([theme_css(), _text(TEMPLATES / "report.css"), _text(FOLDER / "pages.css")])
    scripts = {path.name: StaticFile(path.read_bytes(), "text/javascript") for path in FOLDER.glob("*.js")}
    return {"pages.css": StaticFile(style.encode(), "text/css"), **scripts}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def address(name: str) -> str:
    """Return the address of a file; another content has another one, so browsers may keep it for ever."""
    return f"/static/{name}?{hashlib.sha256(files()[name].body).hexdigest()[:12]}"


@router.get("/static/{name}")
async def get_static_file(request: Request, name: str) -> Response:
    """Return a file that pages load; it holds nothing that is secret."""
    found = files().get(name)
    if found is None:
        raise NotFound(f"there is no file {name!r}")
    return compressed(request, found.body, found.media_type, dict(_FOREVER))

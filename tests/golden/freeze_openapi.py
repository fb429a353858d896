"""`python -m tests.golden.freeze_openapi`: store the OpenAPI document after a change that was wanted."""

import json
import tempfile
from pathlib import Path
from typing import Any

from service.app import create_app
from service.settings import ServiceSettings

GOLDEN = Path(__file__).with_name("openapi.json")


def document() -> dict[str, Any]:
    """Build the document of the code as it is, without a database."""
    with tempfile.TemporaryDirectory() as home:
        return dict(create_app(ServiceSettings(home=Path(home))).openapi())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(document(), indent=1, sort_keys=True) + "\n")

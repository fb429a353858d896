"""`python -m tests.golden.freeze_openapi`: freeze the REST interface again, after a wanted change.

The frozen file has no descriptions and no examples.
"""

import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from ablate.service.app import create_app
from ablate.service.settings import ServiceSettings

GOLDEN = Path(__file__).with_name("openapi.json")
_WORDS = frozenset({"description", "example", "examples", "summary", "title", "tags"})


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """Return the OpenAPI document of the current code, without a database."""
    with tempfile.TemporaryDirectory() as home:
        return dict(create_app(ServiceSettings(home=Path(home))).openapi())


def without_words(value: Any, *, is_names: bool = False) -> Any:
    """Return a part of a document without descriptions and examples; `is_names` if its keys are names of fields."""
    if isinstance(value, list):
        return [without_words(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: inner for key, inner in value.items() if is_names or key not in _WORDS}
    return {key: without_words(inner, is_names=key == "properties" and not is_names) for key, inner in kept.items()}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(without_words(document()), indent=1, sort_keys=True) + "\n")

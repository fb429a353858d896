"""Settings of the CLI and the Python client, read without the packages of the service's settings."""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, SecretStr

PREFIX = "ABLATE_"


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


HomePath = Annotated[Path, AfterValidator(_absolute)]


class ClientSettings(BaseModel):
    """Settings of the CLI and the Python client."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    home: HomePath = Path(".ablate")
    """Folder of the embedded stack: its addresses, tokens and saved reports."""
    url: str = ""
    """Base URL of the API; empty means the embedded stack's."""
    token: SecretStr | None = None
    """Bearer token; empty means the embedded stack's admin token."""

    @property
    def api_url(self) -> str:
        """Base URL without a trailing slash: ABLATE_URL, else the one in stack.json, else the default port."""
        if self.url:
            return self.url.rstrip("/")
        state = self.home / "stack.json"
        if state.is_file():
            return str(json.loads(state.read_text())["api_url"]).rstrip("/")
        return "http://127.0.0.1:8321"

    @property
    def bearer_token(self) -> str | None:
        """ABLATE_TOKEN, else the embedded stack's admin token, else None."""
        if self.token is not None:
            return self.token.get_secret_value()
        generated = self.home / "tokens" / "admin"
        return generated.read_text().strip() if generated.is_file() else None


@lru_cache(maxsize=1)
def get_client_settings() -> ClientSettings:
    """Read the client's settings once."""
    values = {name: os.environ.get(f"{PREFIX}{name.upper()}") for name in ClientSettings.model_fields}
    return ClientSettings.model_validate({name: value for name, value in values.items() if value is not None})

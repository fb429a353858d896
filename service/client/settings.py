"""Settings of the CLI and the Python client, read without the packages of the service's settings."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from ablate.experiments.documents import settings_problems
from ablate.experiments.errors import BadSetting
from ablate.experiments.system.setting_values import PREFIX, Secret, ServiceAddress, is_loopback, read_secret


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


HomePath = Annotated[Path, AfterValidator(_absolute)]


class ClientSettings(BaseModel):
    """Settings of the CLI and the Python client."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)

    home: HomePath = Path(".ablate")
    """Folder of the embedded stack: its addresses, tokens and saved reports."""
    url: ServiceAddress = ""
    """Base URL of the API; empty means the embedded stack's."""
    token: Secret | None = None
    """Bearer token; empty means the embedded stack's admin token, which goes to this machine only."""
    allow_http: bool = False
    """Whether a token may go to another machine by http://, which encrypts nothing."""

    def token_for(self, url: str, *, is_own: bool) -> str | None:
        """Return ABLATE_TOKEN, else the embedded stack's admin token, else None.

        The latter goes to the embedded stack, `is_own`, and to loopback. Raises BadSetting for a file without a token.
        """
        if self.token is not None and self.token.get_secret_value():
            return self.token.get_secret_value()
        return read_secret(self.home / "tokens" / "admin") if is_own or is_loopback(url) else None


@lru_cache(maxsize=1)
def get_client_settings() -> ClientSettings:
    """Read the client's settings once. Raises BadSetting."""
    values = {name: os.environ.get(f"{PREFIX}{name.upper()}") for name in ClientSettings.model_fields}
    try:
        return ClientSettings.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise BadSetting("; ".join(settings_problems(error))) from error

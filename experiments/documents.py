"""Documents: frozen models that refuse unknown fields, and the digest that seals one.

Every spec, plan, receipt, bundle, message and verdict is a `Frozen` model. A sealed one carries, in its field
`digest`, the digest of everything else in it, but for a `signature` over that digest.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Protocol, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from experiments.digest import digest


def _number(value: Any) -> Any:
    """Refuse text and truth values, which pydantic would turn into numbers; the schema forbids them."""
    if isinstance(value, str | bytes | bool):
        raise ValueError(f"expected a number, got {value!r:.80}")
    return value


Whole = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]


class Frozen(BaseModel):
    """A document: what it says never changes, and a field that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Sealed(Protocol):
    """A document with a field `digest`."""

    @property
    def digest(self) -> str:
        """Of everything else in the document but its signature."""

    def model_dump(self, *, mode: str, exclude: set[str]) -> dict[str, Any]:
        """See pydantic."""

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        """See pydantic."""


Document = TypeVar("Document", bound=Sealed)


def content_digest(document: Sealed) -> str:
    """Return the digest of `document` without digest and signature. Raises ValueError for numbers not finite."""
    return digest(document.model_dump(mode="json", exclude={"digest", "signature"}))


def seal(unsealed: Document) -> Document:
    """Return `unsealed` with its digest filled in. Raises ValueError for numbers that are not finite."""
    return unsealed.model_copy(update={"digest": content_digest(unsealed)})


def seal_problem(document: Sealed) -> str | None:
    """Return in what way the digest does not fit the content, as "was altered: ...", or None when it fits."""
    expected = content_digest(document)
    if document.digest == expected:
        return None
    return f"was altered: its digest is {document.digest}, the content gives {expected}"


def first_problem(error: ValidationError) -> str:
    """Return the first thing that pydantic found, as "field.part: what is wrong"."""
    found = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in found['loc'])}: {found['msg']}".removeprefix(": ")

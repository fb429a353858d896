"""Documents: frozen models that reject unknown fields, and the digest that seals one.

Every spec, plan, receipt, bundle, message and verdict is a `Frozen` model. The field `digest` of a sealed document is
the digest of all its other fields, except a `signature` over that digest.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from experiments.digest import digest


def _number(value: Any) -> Any:
    """Reject text and booleans, which pydantic would convert although the schema forbids them."""
    if isinstance(value, str | bytes | bool):
        raise ValueError(f"expected a number, got {value!r:.80}")
    return value


Whole = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]


class Frozen(BaseModel):
    """A document: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Document = TypeVar("Document", bound=BaseModel)


def content_digest(document: BaseModel) -> str:
    """Return the digest of `document` without digest and signature. Raises ValueError unless all numbers are finite."""
    return digest(document.model_dump(mode="json", exclude={"digest", "signature"}))


def seal(unsealed: Document) -> Document:
    """Return `unsealed` with its digest. Raises ValueError unless all numbers are finite."""
    return unsealed.model_copy(update={"digest": content_digest(unsealed)})


def seal_problem(document: BaseModel) -> str | None:
    """Return "was altered: ..." when the digest does not fit the content, else None."""
    stored, expected = dict(document)["digest"], content_digest(document)
    if stored == expected:
        return None
    return f"was altered: its digest is {stored}, the content gives {expected}"


def first_problem(error: ValidationError) -> str:
    """Return pydantic's first error as "field.part: message"."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}".removeprefix(": ")

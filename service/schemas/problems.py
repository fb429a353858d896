"""Wire types of problem documents (RFC 9457)."""

from typing import Any

from pydantic import ConfigDict, Field

from ablate.experiments.errors import SpecProblem
from ablate.service.schemas.public import Public


def _all_sent(schema: dict[str, Any]) -> None:
    """Mark every field as required: the service sends all; defaults are for documents of others, such as proxies."""
    schema["required"] = list(schema["properties"])
    for field in schema["properties"].values():
        field.pop("default", None)


class ProblemDetail(Public):
    """One problem of a request."""

    model_config = ConfigDict(json_schema_extra=_all_sent)

    pointer: str = Field(default="", examples=["#/variants/psiv-on/gates/psiv_cach"])
    detail: str = Field(examples=["unknown gate 'psiv_cach'; known: psiv_cache, schedule"])
    hint: str | None = Field(default=None, examples=["did you mean 'psiv_cache'?"])

    @classmethod
    def of(cls, problem: SpecProblem) -> "ProblemDetail":
        """Convert a problem of a spec or a document."""
        return cls(pointer=problem.pointer, detail=problem.detail, hint=problem.hint)


class Problem(Public):
    """An RFC 9457 problem document."""

    model_config = ConfigDict(json_schema_extra=_all_sent)

    type: str = Field(default="about:blank", examples=["urn:ablate:problem:invalid-spec"])
    title: str = Field(examples=["Unprocessable Content"])
    status: int = Field(default=0, examples=[422])
    """HTTP status; 0 without an answer of a server."""
    detail: str = ""
    instance: str = Field(default="", examples=["/v1/ablations"])
    errors: tuple[ProblemDetail, ...] = ()
    request_id: str = ""

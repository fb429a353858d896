"""The module that programs import in a trial, and the client; packages are links to the folders of the same names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ablate.experiments.in_trial.ablate import MarkedStep, Trial, steps, trainer_callback, trial

if TYPE_CHECKING:
    from ablate.service.cli.comparing import AblationAnswer, NotCompared, answer, compare

_CLIENT = ("AblationAnswer", "NotCompared", "answer", "compare")
__all__ = [
    "AblationAnswer",
    "MarkedStep",
    "NotCompared",
    "Trial",
    "answer",
    "compare",
    "steps",
    "trainer_callback",
    "trial",
]


def __getattr__(name: str) -> Any:
    """Return a name of the client, which is imported only when it is used: a trial imports none of it."""
    if name not in _CLIENT:
        raise AttributeError(f"module 'ablate' has no attribute {name!r}")
    return getattr(import_module("ablate.service.cli.comparing"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_CLIENT})

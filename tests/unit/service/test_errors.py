from http import HTTPStatus

from ablate.service import errors
from ablate.service.errors import NotFound, ServiceError, Unauthorized


def _classes() -> list[type[ServiceError]]:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    return [value for value in classes if issubclass(value, ServiceError)]


def test_docstring_is_the_default_message() -> None:
    assert str(NotFound()) == NotFound.__doc__
    assert str(NotFound("there is no ablation 'x'")) == "there is no ablation 'x'"
    assert all(cls.__doc__ for cls in _classes())


def test_every_error_has_a_status_and_a_slug_of_its_own() -> None:
    classes = [cls for cls in _classes() if cls.status != HTTPStatus.INTERNAL_SERVER_ERROR]
    assert len({cls.slug for cls in classes}) == len(classes) > 10
    assert all(cls.status >= HTTPStatus.BAD_REQUEST for cls in classes)


def test_unauthorized_asks_for_a_bearer_token() -> None:
    assert Unauthorized().headers == {"WWW-Authenticate": "Bearer"}

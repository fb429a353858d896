import pytest

from ablate.service.principals import Scope


@pytest.mark.parametrize(
    ("held", "allowed"),
    [
        (Scope.READ, {Scope.READ}),
        (Scope.SUBMIT, {Scope.READ, Scope.SUBMIT}),
        (Scope.CODE, {Scope.READ, Scope.SUBMIT, Scope.CODE}),
        (Scope.OPERATE, {Scope.READ, Scope.SUBMIT, Scope.CODE, Scope.OPERATE}),
        (Scope.ADMIN, {Scope.READ, Scope.SUBMIT, Scope.CODE, Scope.OPERATE, Scope.ADMIN}),
        (Scope.WORKER, {Scope.WORKER}),
    ],
)
def test_includes_lower_scopes_but_never_crosses_to_workers(held: Scope, allowed: set[Scope]) -> None:
    assert {needed for needed in Scope if held.includes(needed)} == allowed

"""One start of everything for all tests here, in the order of their files."""

import pytest

from tests.containers import compose_stack as stack


@pytest.fixture(scope="session")
def environment():
    with stack.running() as variables:
        yield variables

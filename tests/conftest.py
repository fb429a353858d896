"""How tests are shared out when several processes run them (`make test`): a file is never divided.

Tests that start servers run one after another in one process, so that they compete with each other for nothing; the
rest is pure computation and runs beside them.
"""

import pytest

WITH_SERVERS = ("tests/acceptance/", "tests/integration/")


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist all tests run in one process
def pytest_xdist_make_scheduler(config, log):
    """Return the scheduler that hands out whole groups of tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "servers" if nodeid.startswith(WITH_SERVERS) else nodeid.partition("::")[0]

    return ByGroup(config, log)

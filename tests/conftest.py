"""What every test process begins with, and how tests are shared out when several run them (`make test`).

Settings of the shell that would change what is tested are left behind: the product's own, colours that somebody forces
on, and the repository that git commands are told to use when a hook starts the tests. Servers on this machine are not
asked for through a proxy.

A file is never divided. Tests that run trials, whole stacks or against the clock go one after another in one process,
so that they compete with each other for nothing; the rest is computation and calls of an API, and runs beside them.
"""

import os

import pytest

NOT_OURS = ("ABLATE_", "GIT_", "FORCE_COLOR", "TTY_COMPATIBLE")
_BUSY = (
    *("arm_outcome", "device_lock", "exec", "frozen_broker", "http_limits", "part_run", "planted", "readiness"),
    *("rolling_restart", "schemathesis", "secured_servers", "sentinels", "stack_", "worker_"),
)
ONE_BY_ONE = ("tests/acceptance/", *(f"tests/integration/test_{name}" for name in _BUSY))

for name in [name for name in os.environ if name.startswith(NOT_OURS)]:
    del os.environ[name]
os.environ["ABLATE_DEVICE_LOCKS"] = "home"  # workers of other tests run on the same cores, and measure nothing
os.environ["ABLATE_CONTROL_EVERY"] = "0"  # no arm by chance; those that are asked for are tested
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist all tests run in one process
def pytest_xdist_make_scheduler(config, log):
    """Return the scheduler that hands out whole groups of tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "one by one" if nodeid.startswith(ONE_BY_ONE) else nodeid.partition("::")[0]

    return ByGroup(config, log)

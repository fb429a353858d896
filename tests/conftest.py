"""What every test process begins with, and how tests are shared out when several run them (`make test`).

Settings of the shell that would change what is tested are left behind: the product's own, colours that somebody forces
on, and the repository that git commands are told to use when a hook starts the tests.

A file is never divided. Long groups of files run each in one process and begin first: whole stacks and what measures,
what starts processes and waits for them, what starts ranks, what trains, and what compiles kernels. The rest runs when
one of them is done.

`make test` runs the short tests, `make test-long` the long ones (long_tests.py); pytest alone runs all.
"""

import gc
import os
import signal
import sys

import pytest
from hypothesis import settings

from tests.long_tests import is_long, is_long_file

pytest_plugins = ["tests.kernels.compile_first"]
LENGTHS = ("short", "long")
NOT_OURS = ("ABLATE_", "GIT_", "FORCE_COLOR", "TTY_COMPATIBLE")
_MEASURING = ("arm_outcome", "cheats", "exec", "part_run", "planted", "sentinels", "stack_")
_WAITING = (
    *("device_lock", "frozen_broker", "http_limits", "readiness", "schemathesis"),
    *("secured_servers", "worker_"),
)
GROUPS = {
    "stacks": ("tests/acceptance/", *(f"tests/integration/test_{name}" for name in _MEASURING)),
    "compiled kernels": ("tests/kernels/test_mamba3_cuda_budgets.py",),
    "processes": tuple(f"tests/integration/test_{name}" for name in _WAITING),
    "ranks": ("tests/unit/model/parallel/",),
    "training": ("tests/unit/model/test_train.py",),
}

for name in [name for name in os.environ if name.startswith(NOT_OURS)]:
    del os.environ[name]
# The root is on the search path for `tests`. Without ablate, a package would be imported a second time from there.
sys.modules.update(dict.fromkeys(("service", "workers", "experiments", "model", "kernels")))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a suite in the background; children would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("ours", deadline=None)  # other tests run beside a drawn example, and take its time
settings.load_profile("ours")
os.environ["ABLATE_DEVICE_LOCKS"] = "home"  # workers of other tests run on the same cores, and measure nothing
os.environ["HTTP_PROXY"] = os.environ["http_proxy"] = "http://127.0.0.1:9"  # nothing local may use it: nobody is there
os.environ["ABLATE_CONTROL_EVERY"] = "0"  # no arm by chance; those that are asked for are tested
os.environ["ABLATE_QUIET_S"] = "0"  # no wait for the other tests


def group_of(nodeid: str) -> str:
    """Return the group whose tests run one after another, or the file."""
    names = [name for name, beginnings in GROUPS.items() if nodeid.startswith(beginnings)]
    return names[0] if names else nodeid.partition("::")[0]


def seed_of(item):
    """Return the value of the parameter `seed`, None where there is none."""
    return item.callspec.params.get("seed") if hasattr(item, "callspec") else None


def pytest_addoption(parser):
    """Add --length."""
    parser.addoption("--length", choices=LENGTHS, help="run tests that are (long) or are not (short) in long_tests.py")


def pytest_ignore_collect(collection_path, config):
    """Skip the files that have only long tests."""
    if config.getoption("--length") == "short" and collection_path.is_relative_to(config.rootpath):
        return is_long_file(collection_path.relative_to(config.rootpath).as_posix()) or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage meanwhile, and leave the tests out of later collections: each training starts one."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config, items):
    """Keep the tests of the wanted length, and put the long groups first."""
    if (length := config.getoption("--length")) is not None:
        every = {item.nodeid for item in items}
        kept = {item for item in items if is_long(item.nodeid, every, seed_of(item)) == (length == "long")}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    items.sort(key=lambda item: group_of(item.nodeid) not in GROUPS)


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist all tests run in one process
def pytest_xdist_make_scheduler(config, log):
    """Return the scheduler that hands out whole groups of tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)

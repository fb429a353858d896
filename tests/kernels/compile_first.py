"""pytest plugin for GPU tests: skips them without a GPU, and with --compile-kernels compiles their kernels first.

A GPU test names its problems: `@pytest.mark.scans(ScanProblem(...), ...)`. A process per core compiles each distinct
kernel once after the collection, and the tests load them from TileLang's cache. If a kernel does not compile, the tests
that need it fail with the compiler's message. Without a GPU --compile-kernels only fills the cache. A test compiles
kernels that its marks omit itself.
"""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # loads torch
    from tests.kernels.fuzz.problems import ScanProblem

NOT_COMPILED = pytest.StashKey[dict[str, str]]()
"""Line of a problem -> reason why it cannot run."""


def pytest_addoption(parser):
    """Add --compile-kernels, and --every-kernel for test_mamba3_cuda_budgets.py."""
    parser.addoption(
        "--compile-kernels", action="store_true", help="first compile the kernels of the GPU tests, a process per core"
    )
    parser.addoption("--every-kernel", action="store_true", help="compile every kernel with a budget, not a sample")


def gpu_is_here() -> bool:
    """Return whether torch can use a GPU."""
    import torch  # lazy: most tests need no torch

    return torch.cuda.is_available()


@pytest.hookimpl(trylast=True)  # after the selection by -m and -k
def pytest_collection_modifyitems(items):
    """Skip GPU tests without a GPU."""
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if of_gpu and not gpu_is_here():
        for item in of_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an H100 or H200"))


def problems_of(item: pytest.Item) -> list["ScanProblem"]:
    """Return the problems whose kernels a test launches."""
    return [problem for mark in item.iter_markers("scans") for problem in mark.args]


def pytest_collection_finish(session):
    """Compile the kernels of the selected tests."""
    config = session.config
    stops = session.testsfailed and not config.option.continue_on_collection_errors
    if not config.getoption("--compile-kernels") or config.option.collectonly or stops:
        return
    if hasattr(config, "workerinput"):
        raise pytest.UsageError("--compile-kernels with several test processes; allowed: one, it uses all cores itself")
    problems = {problem.line: problem for item in session.items for problem in problems_of(item)}
    if problems:
        from tests.kernels import kernel_tasks  # loads torch and tilelang

        config.stash[NOT_COMPILED] = kernel_tasks.unable(problems.values(), report=reporter(config))


def reporter(config):
    """Return a function that prints a line immediately."""
    terminal = config.get_terminal_writer()

    def report(text: str) -> None:
        terminal.line(text)
        terminal.flush()

    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """Fail a test whose kernels did not compile, before it runs."""
    reasons = item.config.stash.get(NOT_COMPILED, {})
    for problem in problems_of(item):
        if problem.line in reasons:
            pytest.fail(f"{reasons[problem.line]}\nof the problem {problem.line}", pytrace=False)

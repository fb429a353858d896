"""pytest's plugin for GPU tests: skipped without a GPU, and with --compile-kernels compiled before the first one runs.

A GPU test names the problems that it launches: `@pytest.mark.scans(ScanProblem(...), ...)`. Their kernels, each
distinct one once, are compiled by a process per core when the tests are collected; the tests then find them in
TileLang's cache. Where one does not compile, the tests that need it fail with the compiler's message, the others run.
Without a GPU --compile-kernels fills the cache. What the marks leave out is compiled by the test that needs it;
test_compile_first.py sees that they leave out nothing.
"""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # loads torch, which most tests do without
    from tests.kernels.fuzz.problems import ScanProblem

NOT_COMPILED = pytest.StashKey[dict[str, str]]()
"""Line of a problem -> why it cannot run."""


def pytest_addoption(parser):
    """Add --compile-kernels."""
    parser.addoption(
        "--compile-kernels", action="store_true", help="first compile the kernels of the GPU tests, a process per core"
    )


def gpu_is_here() -> bool:
    """Tell whether torch can use a GPU."""
    import torch  # not for the many tests that need none

    return torch.cuda.is_available()


@pytest.hookimpl(trylast=True)  # when -m and -k have chosen
def pytest_collection_modifyitems(items):
    """Skip GPU tests where there is no GPU."""
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if of_gpu and not gpu_is_here():
        for item in of_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an H100 or H200"))


def problems_of(item: pytest.Item) -> list["ScanProblem"]:
    """Return the problems whose kernels a test launches."""
    return [problem for mark in item.iter_markers("scans") for problem in mark.args]


def pytest_collection_finish(session):
    """Compile what the selected tests launch."""
    config = session.config
    if not config.getoption("--compile-kernels") or config.option.collectonly or session.testsfailed:
        return
    if hasattr(config, "workerinput"):
        raise pytest.UsageError("--compile-kernels with several test processes; allowed: one, it uses all cores itself")
    problems = {problem.line: problem for item in session.items for problem in problems_of(item)}
    if problems:
        from tests.kernels import kernel_tasks  # loads torch and tilelang

        config.stash[NOT_COMPILED] = kernel_tasks.unable(problems.values(), tell=teller(config))


def teller(config):
    """Return what shows a line at once."""
    terminal = config.get_terminal_writer()

    def tell(text: str) -> None:
        terminal.line(text)
        terminal.flush()

    return tell


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """Fail a test whose kernels did not compile, before it runs."""
    why = item.config.stash.get(NOT_COMPILED, {})
    for problem in problems_of(item):
        if problem.line in why:
            pytest.fail(f"{why[problem.line]}\nof the problem {problem.line}", pytrace=False)

import errno
import signal
from pathlib import Path

import pytest
import torch

from ablate.experiments.outcomes import FailureClass
from ablate.kernels.errors import KernelUnsupported, ShapeError
from ablate.model.errors import ConfigError, DataError, DatasetDamaged, NonFiniteLoss
from ablate.workers.errors import DeviceBusy
from ablate.workers.trials.failures import (
    CANNOT_WRITE,
    FORKSERVER_LOST,
    TOO_LATE,
    classify,
    classify_exit,
    disk_is_full,
    kernel_oom_kills,
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), FailureClass.OOM),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), FailureClass.OOM),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"), FailureClass.OOM),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"), FailureClass.OOM),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), FailureClass.OOM),
        (NonFiniteLoss("step 3"), FailureClass.NUMERICS),
        (KernelUnsupported("no tma"), FailureClass.GATE_REFUSED),
        (ConfigError("model.pattern", "has unknown block"), FailureClass.USER_ERROR),
        (DataError("no files"), FailureClass.USER_ERROR),
        (DatasetDamaged("damaged"), FailureClass.INFRA_NODE),
        (ShapeError("x has 3 dims"), FailureClass.USER_ERROR),
        (KeyError("out of memory"), FailureClass.USER_ERROR),
        (OSError(errno.ENOSPC, "No space left on device"), FailureClass.INFRA_NODE),
        (DeviceBusy("core 0 of this machine is held by process 1"), FailureClass.INFRA_NODE),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), FailureClass.INFRA_NODE),
        (RuntimeError("shapes do not match"), FailureClass.USER_ERROR),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_classify_exception(error: BaseException, expected: FailureClass) -> None:
    assert classify(error) is expected


def test_classify_real_allocation_failure() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert classify(caught.value) is FailureClass.OOM


@pytest.mark.parametrize(
    ("exit_code", "oom_kills", "expected", "expected_on_full_disk"),
    [
        (-signal.SIGKILL, 1, FailureClass.OOM, FailureClass.OOM),
        (-signal.SIGKILL, 0, FailureClass.INFRA_NODE, FailureClass.INFRA_NODE),
        (-signal.SIGTERM, 0, FailureClass.INFRA_NODE, FailureClass.INFRA_NODE),
        (-signal.SIGSEGV, 1, FailureClass.NO_RECEIPT, FailureClass.INFRA_NODE),
        (FORKSERVER_LOST, 0, FailureClass.INFRA_NODE, FailureClass.INFRA_NODE),
        (CANNOT_WRITE, 0, FailureClass.INFRA_NODE, FailureClass.INFRA_NODE),
        (TOO_LATE, 0, FailureClass.INFRA_NODE, FailureClass.INFRA_NODE),
        (0, 0, FailureClass.NO_RECEIPT, FailureClass.INFRA_NODE),
        (1, 0, FailureClass.NO_RECEIPT, FailureClass.INFRA_NODE),
    ],
)
def test_classify_exit(
    exit_code: int, oom_kills: int, expected: FailureClass, expected_on_full_disk: FailureClass
) -> None:
    assert classify_exit(exit_code, oom_kills=oom_kills)[0] is expected
    assert classify_exit(exit_code, oom_kills=oom_kills, disk_full=True)[0] is expected_on_full_disk


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV, 40])
def test_a_trial_whose_program_can_signal_it_is_no_fault_of_the_node(number: int) -> None:
    failure, message = classify_exit(-number, oom_kills=0, may_kill_itself=True)
    assert (failure, "which its program can send" in message) == (FailureClass.USER_ERROR, True)
    assert classify_exit(-number, oom_kills=0, may_kill_itself=True, disk_full=True)[0] is FailureClass.INFRA_NODE
    assert classify_exit(-signal.SIGKILL, oom_kills=1, may_kill_itself=True)[0] is FailureClass.OOM
    assert classify_exit(CANNOT_WRITE, oom_kills=0, may_kill_itself=True)[0] is FailureClass.INFRA_NODE


def test_disk_is_full_of_a_folder_with_space_and_of_none(tmp_path: Path) -> None:
    assert not disk_is_full(tmp_path)
    assert disk_is_full(tmp_path / "nowhere")


@pytest.mark.parametrize("group", ["", "system.slice/ablate-worker.service"])
def test_out_of_memory_kills_are_those_of_the_workers_own_group(tmp_path: Path, group: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"0::/{group}\n")
    assert kernel_oom_kills(tmp_path) == 0
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    assert kernel_oom_kills(tmp_path) == 7, "where the group's are not counted"
    counts = tmp_path / "sys/fs/cgroup" / group / "memory.events"
    counts.parent.mkdir(parents=True)
    counts.write_text("low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert kernel_oom_kills(tmp_path) == 3

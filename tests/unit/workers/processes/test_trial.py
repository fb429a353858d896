import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ablate.experiments.design.kinds.built_in import BuiltInArm
from ablate.experiments.outcomes import FailureClass
from ablate.model.data.corpus import BUILT_IN
from ablate.model.errors import DataError, DatasetDamaged
from ablate.model.facts import ModelFact
from ablate.workers.built_in import training
from ablate.workers.built_in.training import check_corpus
from ablate.workers.errors import DeviceMissing
from ablate.workers.isolation.environment import chosen_caches, keep_kernels
from ablate.workers.paths import TrialPaths, WorkPaths
from ablate.workers.processes import trial
from ablate.workers.trials.failures import classify
from ablate.workers.trials.result import TrialOrder
from tests.integration.worker_service import built_in_arm, corpus
from tests.programs import run_trial


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialOrder:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    order = TrialOrder(
        trial_id="trl_1",
        config=built_in_arm(corpus(tmp_path / "corpus")),
        paths=WorkPaths(home=tmp_path).trial("att_1", "trl_1"),
        data_dir=tmp_path / "data",
        device_type="cpu",
    )
    return replace(order, dataset=training.prepare_data(order).data_folder)


def test_a_trial_builds_no_dataset(order: TrialOrder) -> None:
    for dataset in (None, order.data_dir / "rows-gone"):
        with pytest.raises(DatasetDamaged) as caught:
            training._train(replace(order, dataset=dataset))
        assert classify(caught.value) is FailureClass.INFRA_NODE


def test_a_trial_of_a_cpu_node_trains_on_the_cpu_even_where_a_gpu_is(
    order: TrialOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert training._train(order).facts[ModelFact.DEVICE] == "cpu"


def test_compilers_cache_below_the_folder_unless_the_operator_chose_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unset = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "QUACK_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    for name in (*unset, "CUDA_CACHE_PATH", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TILELANG_CACHE_DIR", "/own")
    chosen = chosen_caches()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "as torch does when it is imported")
    keep_kernels(tmp_path, chosen)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "torchinductor_cache_dir")
    assert [os.environ[name] for name in unset] == [str(tmp_path / name.lower()) for name in unset]
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert os.environ["TILELANG_CACHE_DIR"] == "/own"


def test_a_device_that_torch_cannot_use_breaks_the_node_and_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceMissing, match="this node trains on devices of type 'cuda'") as caught:
        training.find_device("cuda", 1)
    assert classify(caught.value) is FailureClass.INFRA_NODE
    assert training.find_device("cpu", 1) == torch.device("cpu")


def test_check_corpus_without_folders_allows_the_built_in_ones_and_none_allows_all() -> None:
    check_corpus("/root", None)
    for name in BUILT_IN:
        check_corpus(name, ())
    with pytest.raises(DataError, match=r"allowed: 'torch-headers', 'torch-python' \(ABLATE_CORPUS_DIRS\)$"):
        check_corpus("/root", ())


def test_check_corpus_of_random_paths_against_where_they_really_lead(tmp_path: Path) -> None:
    """Folders, links between them, and dots; the kernel says where a path leads."""
    draw = random.Random(20261122)  # noqa: S311 - a repeatable draw
    roots = (tmp_path / "allowed", tmp_path / "also")
    folders = [base / name for base in (*roots, tmp_path / "allowed-not", tmp_path / "other") for name in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    for number in range(12):
        (draw.choice(folders) / f"link{number}").symlink_to(draw.choice(folders))
    links = list(tmp_path.glob("*/*/link*"))
    seen = {True: 0, False: 0}
    for _ in range(1200):
        path = draw.choice([*folders, *links])
        for _ in range(draw.randrange(4)):
            path = path / draw.choice(["..", ".", "../..", *[link.name for link in links]])
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        real = Path(f"/proc/self/fd/{handle}").readlink()
        os.close(handle)
        allowed = any(real == root or root in real.parents for root in roots)
        seen[allowed] += 1
        if allowed:
            check_corpus(str(path), roots)
        else:
            with pytest.raises(DataError, match="outside of the folders"):
                check_corpus(str(path), roots)
    assert min(seen.values()) > 50


def test_a_trial_that_writes_without_end_fails_by_its_own_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = WorkPaths(home=tmp_path).trial("att_1", "trl_1")
    order = TrialOrder(
        trial_id="trl_1", config=BuiltInArm(), paths=paths, data_dir=tmp_path, device_type="cpu", most_bytes=2**20
    )
    tries = 100_000

    def chatters(_order: TrialOrder) -> None:
        for _ in range(tries):
            sys.stdout.write("once more, and once more, and once more\n")

    monkeypatch.setattr(trial, "_work", chatters)
    result = run_trial(order)
    assert result is not None
    assert result.failure_class is FailureClass.OUTPUT_LIMIT
    assert "(ABLATE_TRIAL_DISK_GIB)" in (result.message or "")
    assert 2**20 <= paths.log.stat().st_size < 2**20 + 10_000 < tries * 40
    assert "File too large" in paths.log.read_text()[-1000:]


def test_a_gpu_that_runs_out_of_memory_says_how_much_was_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    full, host = torch.OutOfMemoryError("CUDA out of memory"), MemoryError()
    order = TrialOrder(
        trial_id="", config=BuiltInArm(), paths=TrialPaths(folder=Path()), data_dir=Path(), device_type="cpu"
    )
    results = [trial._failure_of(order, error) for error in (full, host)]
    assert [result.peak_allocated_bytes for result in results] == [None, None]  # no GPU was used
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 70 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 75 << 30)
    results = [trial._failure_of(order, error) for error in (full, host, ValueError("no memory error"))]
    assert [(result.peak_allocated_bytes, result.peak_reserved_bytes) for result in results] == [
        (70 << 30, 75 << 30),
        (None, None),
        (None, None),
    ]
    assert results[0].failure_class is results[1].failure_class is FailureClass.OOM

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ablate.experiments.errors import BundleError
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.bundle import Attempt, Bundle
from ablate.experiments.records.bundle_files import MANIFEST, PLAN, RECEIPT, read_bundle_files
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.workers.errors import ExecRefused
from ablate.workers.offline.bundle_folder import BundleFolder
from tests.bundles import broken_attempt, make_bundle, make_file, make_node, names, sealed, write_folder
from tests.factories import make_receipt

FILE = make_file()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[BundleFolder]:
    with BundleFolder(tmp_path / "b", FILE) as made:
        made.open()
        yield made


def reopened(root: Path) -> Bundle:
    with BundleFolder(root, FILE) as folder:
        return folder.open()


def test_open_new_folder_holds_plan_and_manifest(folder: BundleFolder) -> None:
    bundle = open_bundle(read_bundle_files(folder.root))
    assert (bundle.plan_file, bundle.blocks, bundle.missing) == (FILE, (), (0, 1, 2, 3, 4, 5))


def test_open_takes_in_a_block_that_a_killed_run_did_not_name(tmp_path: Path) -> None:
    less, more = make_bundle(FILE, [0]), make_bundle(FILE, [0, 1])
    named = {path: data for path, data in more.items() if not path.startswith("blocks/0002/")}
    root = write_folder(more | {MANIFEST: sealed(FILE, named)[MANIFEST]}, tmp_path / "b")
    assert "blocks/0002/block.json" not in json.loads((root / MANIFEST).read_bytes())["files"]
    bundle = reopened(root)
    assert len(bundle.blocks) == 2
    assert len(open_bundle(less).blocks) == 1
    assert open_bundle(read_bundle_files(root)) == bundle


def test_open_refuses_an_unnamed_block_whose_receipt_was_altered(tmp_path: Path) -> None:
    root = write_folder(make_bundle(FILE, [0]), tmp_path / "b")
    (root / MANIFEST).unlink()
    path = sorted(root.glob(f"blocks/0001/*/{RECEIPT}"))[0]
    path.write_text(path.read_text().replace('"wall_s":3.0', '"wall_s":2.0'))
    with pytest.raises(BundleError, match="was altered"):
        reopened(root)


def test_two_runs_at_once_are_refused(folder: BundleFolder) -> None:
    with pytest.raises(ExecRefused, match="another `ablate offline exec` writes"):
        reopened(folder.root)


def test_folder_is_free_afterwards_and_its_work_can_go(tmp_path: Path) -> None:
    reopened(tmp_path / "b")
    with BundleFolder(tmp_path / "b", FILE) as again:
        again.open()
        again.drop_work()
    assert not (tmp_path / "b" / "work").exists()


def test_kept_block_appears_whole_and_verified(folder: BundleFolder) -> None:
    node = make_node()
    node_id = folder.add_node(node.name, node.registration, open_bundle(read_bundle_files(folder.root)))
    attempt = Attempt(**names(2, node_id))
    claimed = FILE.claimed(2, attempt_id=attempt.attempt_id, attempt_no=1)
    receipts = []
    for trial in claimed.trials:
        folder.paths.trial(attempt.attempt_id, trial.trial_id).log.write_bytes(b"broken \xff and \0\n")
        ids = {"ablation": FILE.ablation_id, "block": claimed.block_id, "trial": trial.trial_id}
        ids |= {"attempt": attempt.attempt_id, "node": node_id}
        receipts.append(make_receipt(FILE.plan, 2, trial.arm, ids=ids))
    folder.keep_block(attempt, receipts)
    folder.drop_work_of(attempt.attempt_id)
    (block,) = open_bundle(read_bundle_files(folder.root)).blocks
    assert (block.attempt, [trial.receipt for trial in block.trials]) == (attempt, receipts)
    assert block.trials[0].log == "broken \ufffd and \ufffd\n"


def test_same_machine_keeps_its_node_and_a_changed_one_is_another(folder: BundleFolder) -> None:
    node = make_node()

    def add(code: str) -> str:
        registration = node.registration.model_copy(update={"code_digest": code})
        return folder.add_node(node.name, registration, open_bundle(read_bundle_files(folder.root)))

    first = add("sha256:a")
    assert add("sha256:a") == first
    assert add("sha256:b") != first


def test_broken_attempt_is_remembered(folder: BundleFolder) -> None:
    node = make_node()
    node_id = folder.add_node(node.name, node.registration, open_bundle(read_bundle_files(folder.root)))
    record = broken_attempt(0, 1, FailureClass.NO_RECEIPT).model_copy(update={"node_id": node_id})
    folder.keep_broken(record)
    assert open_bundle(read_bundle_files(folder.root)).broken == (record,)


@pytest.mark.parametrize("emptied", [(PLAN,), (MANIFEST,), (PLAN, MANIFEST)])
def test_files_that_a_power_failure_emptied_are_written_again(tmp_path: Path, emptied: tuple[str, ...]) -> None:
    root = write_folder(make_bundle(FILE, [0]), tmp_path / "b")
    for name in emptied:
        (root / name).write_bytes(b"")
    assert len(reopened(root).blocks) == 1
    assert all((root / name).stat().st_size for name in emptied)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\0"])
def test_a_damaged_note_of_the_running_attempt_does_not_stop_the_next_run(tmp_path: Path, content: bytes) -> None:
    root = write_folder(make_bundle(FILE, [0]), tmp_path / "b")
    (root / "work").mkdir()
    (root / "work" / "running.json").write_bytes(content)
    assert len(reopened(root).blocks) == 1
    assert not (root / "work" / "running.json").exists()

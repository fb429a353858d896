import json
import tarfile
from pathlib import Path

import pytest

from ablate.experiments.errors import BundleError
from ablate.experiments.outcomes import FailureClass, VerdictWord
from ablate.experiments.records.bundle import join_bundles, used_up_by
from ablate.experiments.records.bundle_files import (
    BLOCK,
    LOG,
    MANIFEST,
    PLAN,
    RECEIPT,
    is_bundle,
    read_bundle_files,
    write_tar,
)
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.reporting.pages.report import render
from ablate.experiments.reporting.view import bundle_view, judge_bundle
from tests.bundles import broken_attempt, make_bundle, make_file, sealed, write_folder

FILE = make_file()


def receipt_path(files: dict[str, bytes]) -> str:
    return next(path for path in files if path.endswith(RECEIPT))


def problems(files: dict[str, bytes]) -> dict[str, str]:
    with pytest.raises(BundleError) as caught:
        open_bundle(files)
    details: dict[str, str] = {}
    for problem in caught.value.problems:
        details[problem.pointer] = f"{details.get(problem.pointer, '')}\n{problem.detail}".lstrip()
    return details


def test_open_bundle_gives_blocks_trials_and_what_is_missing() -> None:
    bundle = open_bundle(make_bundle(FILE, [0, 2]))
    assert [block.attempt.index for block in bundle.blocks] == [0, 2]
    assert bundle.missing == (1, 3, 4, 5)
    assert [trial.receipt.arm for trial in bundle.blocks[0].trials] == list(FILE.plan.blocks[0].order)
    assert bundle.blocks[0].trials[0].log.endswith("é\n")
    assert len(bundle.digests) == 1


def test_altered_receipt_under_a_fresh_manifest_breaks_its_own_digest() -> None:
    files = make_bundle(FILE, [0])
    path = receipt_path(files)
    values = json.loads(files[path])
    values["summary"]["tokens_per_s"] *= 1.1
    details = problems(sealed(FILE, {**files, path: json.dumps(values).encode()}))
    assert set(details) == {path}


def test_receipt_of_another_trial_is_refused() -> None:
    files = make_bundle(FILE, [0])
    first, second = [path for path in files if path.endswith(RECEIPT)][:2]
    details = problems(sealed(FILE, {**files, first: files[second]}))
    assert "expected" in details[first]


@pytest.mark.parametrize(
    ("path", "data", "words"),
    [
        (receipt_path(make_bundle(FILE, [0])), b"[1]", "expected a mapping"),
        (receipt_path(make_bundle(FILE, [0])), b"{", "is not JSON"),
        (receipt_path(make_bundle(FILE, [0])), b"\xff", "is not UTF-8"),
        (receipt_path(make_bundle(FILE, [0])), b"", "is not JSON"),
        ("notes.txt", b"x", "does not belong to a bundle"),
        (f"blocks/0001/{BLOCK}", b"{}", "Field required"),
        (PLAN, b"{}", "not a plan file"),
        ("nodes/x.json", b"{}", "Field required"),
    ],
)
def test_file_that_cannot_be_right_is_named(path: str, data: bytes, words: str) -> None:
    assert words in problems(sealed(FILE, {**make_bundle(FILE, [0]), path: data}))[path]


@pytest.mark.parametrize("name", [RECEIPT, LOG])
def test_missing_and_additional_files_are_named(name: str) -> None:
    files = make_bundle(FILE, [0])
    path = next(path for path in files if path.endswith(name))
    less = {other: data for other, data in files.items() if other != path}
    assert problems(less)[path] == "is in the manifest but not in the bundle"
    assert "only whole blocks count" in problems(sealed(FILE, less))[path]
    assert problems({**files, "blocks/x": b""})["blocks/x"] == "is in the bundle but not in the manifest"
    assert problems({"a": b""}) == {MANIFEST: "is missing"}


def test_altered_files_are_named() -> None:
    files, other = make_bundle(FILE, [0]), make_bundle(make_file(), [0])
    path = receipt_path(files)
    altered = {
        path: files[path].replace(b"CPU", b"GPU"),
        MANIFEST: files[MANIFEST].replace(FILE.ablation_id.encode(), b"abl_other"),
        PLAN: other[PLAN],
    }
    details = problems({**files, **altered})
    assert set(details) == set(altered)
    assert all("was altered" in detail for detail in details.values())


def test_block_of_an_unknown_node_or_place_is_refused() -> None:
    files = make_bundle(FILE, [0])
    path = f"blocks/0001/{BLOCK}"
    values = json.loads(files[path])
    far = sealed(FILE, {**files, path: json.dumps({**values, "index": 77}).encode()})
    assert "not in the plan" in problems(far)[path]
    strange = json.dumps({**values, "node_id": "nod_01KAHZ3V5T8QW2R4Y6M9N0P1S3"}).encode()
    assert "not described" in problems(sealed(FILE, {**files, path: strange}))[path]


def test_join_takes_parts_of_one_plan_and_counts_a_block_once() -> None:
    one, two = open_bundle(make_bundle(FILE, [0, 1])), open_bundle(make_bundle(FILE, [2]))
    both = join_bundles([two, one])
    assert [block.attempt.index for block in both.blocks] == [0, 1, 2]
    assert both.digests == tuple(sorted([*one.digests, *two.digests]))
    with pytest.raises(BundleError, match="block 1 is in an earlier bundle"):
        join_bundles([one, one])
    with pytest.raises(BundleError, match="another plan"):
        join_bundles([one, open_bundle(make_bundle(make_file(), [2]))])


def test_broken_attempts_are_kept_and_used_up_like_a_service_does() -> None:
    broken = [broken_attempt(1, number, FailureClass.TIMEOUT) for number in (2, 1)]
    bundle = open_bundle(make_bundle(FILE, [0], broken=broken))
    assert [record.attempt_no for record in bundle.broken] == [1, 2]
    assert used_up_by(bundle.broken, 1) == bundle.broken[1]
    assert used_up_by(bundle.broken, 2) is None
    assert used_up_by(bundle.broken[:1], 1) is None
    assert used_up_by((), 1) is None


def test_tar_is_the_same_bundle_and_always_the_same_bytes(tmp_path: Path) -> None:
    files = make_bundle(FILE, [0])
    folder = write_folder(files, tmp_path / "b")
    (folder / "work").mkdir()
    (folder / "work" / "lock").touch()
    assert read_bundle_files(folder) == files
    write_tar(files, tmp_path / "b.tar")
    (tmp_path / "again").mkdir()
    write_tar(dict(reversed(files.items())), tmp_path / "again" / "b.tar")
    assert (tmp_path / "again" / "b.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    assert read_bundle_files(tmp_path / "b.tar") == files
    assert is_bundle(folder)
    assert is_bundle(tmp_path / "b.tar")
    assert not is_bundle(tmp_path / "no")


def test_reading_refuses_links_and_what_is_no_bundle(tmp_path: Path) -> None:
    folder = write_folder(make_bundle(FILE, [0]), tmp_path / "b")
    (folder / "blocks" / "link").symlink_to("/etc/passwd")
    with pytest.raises(BundleError, match="not a plain file"):
        read_bundle_files(folder)
    with pytest.raises(BundleError, match="no such folder"):
        read_bundle_files(tmp_path / "nothing")
    (tmp_path / "x.tar").write_bytes(b"no tar")
    with pytest.raises(BundleError, match="is not a tar file"):
        read_bundle_files(tmp_path / "x.tar")
    with tarfile.open(tmp_path / "y.tar", "w") as archive:
        archive.add(folder / PLAN, "plan.json")
    with pytest.raises(BundleError, match="0 manifests"):
        read_bundle_files(tmp_path / "y.tar")


def test_bundle_is_judged_and_reported_without_a_service() -> None:
    bundle = open_bundle(make_bundle(FILE))
    verdict = judge_bundle(bundle)
    assert verdict.blocks_counted == 6
    assert {variant.verdict for variant in verdict.variants} <= {VerdictWord.INCONCLUSIVE, VerdictWord.SAME}
    assert FILE.ablation_id in render(bundle_view(bundle))


def test_verdict_of_a_bundle_names_every_attempt_that_broke() -> None:
    broken = [
        broken_attempt(3, 1, FailureClass.PREEMPTED),
        broken_attempt(1, 2, FailureClass.NO_RECEIPT, arm="psiv-on"),
        broken_attempt(1, 1, FailureClass.TIMEOUT, arm="psiv-on"),
    ]
    attempts = judge_bundle(open_bundle(make_bundle(FILE, broken=broken))).circumstances.attempts
    assert [(one.block_index, one.number, one.failure_class, one.arm) for one in attempts] == [
        (1, 1, "timeout", "psiv-on"),
        (1, 2, "no_receipt", "psiv-on"),
        (3, 1, "preempted", None),
    ]
    assert {(one.node, one.message.endswith("there")) for one in attempts} == {("far-node", True)}


def test_attempt_that_appears_twice_is_named() -> None:
    record = broken_attempt(1, 1, FailureClass.TIMEOUT)
    files = make_bundle(FILE, broken=[record])
    copied = {**files, "attempts/copy.json": files[f"attempts/{record.attempt_id}.json"]}
    assert any("appears twice" in detail for detail in problems(sealed(FILE, copied)).values())


def test_broken_attempt_of_an_arm_that_is_not_planned_is_named() -> None:
    record = broken_attempt(1, 1, FailureClass.TIMEOUT, arm="stranger")
    details = problems(make_bundle(FILE, broken=[record]))
    assert details == {f"attempts/{record.attempt_id}.json": "arm 'stranger' is not in the plan"}

import json
from pathlib import Path

import pytest

from ablate.experiments.errors import BundleError
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.bundle import Attempt, BrokenAttempt, attempt_statement, signed_attempt
from ablate.experiments.records.bundle_files import BLOCK, MANIFEST, read_bundle_files
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.records.signing import Signer
from ablate.experiments.reporting.view import judge_bundle
from ablate.workers.errors import ExecRefused
from ablate.workers.offline.bundle_folder import BundleFolder
from tests.bundles import broken_attempt, make_bundle, make_file, make_node, sealed, write_folder

FILE = make_file()
MINE, STRANGER = Signer(b"m" * 32), Signer(b"s" * 32)
BROKEN = [broken_attempt(1, 1, FailureClass.TIMEOUT)]


def problems(files: dict[str, bytes]) -> dict[str, str]:
    with pytest.raises(BundleError) as caught:
        open_bundle(files)
    return {problem.pointer: problem.detail for problem in caught.value.problems}


def rewritten(files: dict[str, bytes], path: str, signer: Signer | None = MINE, **changes: object) -> dict[str, bytes]:
    values = {**json.loads(files[path]), **changes}
    return sealed(FILE, {**files, path: json.dumps(values).encode()}, signer)


def test_signed_bundle_names_its_keys_and_the_verdict_does_too() -> None:
    bundle = open_bundle(make_bundle(FILE, broken=BROKEN, signer=MINE))
    assert (bundle.keys, bundle.unsigned) == (frozenset({MINE.key}), ())
    (signer,) = judge_bundle(bundle).circumstances.signers
    assert (signer.name, signer.key, signer.blocks) == ("far-node", MINE.key, (0, 1, 2, 3, 4, 5))


def test_unsigned_bundle_is_read_and_says_so() -> None:
    bundle = open_bundle(make_bundle(FILE, [0], broken=BROKEN))
    path = f"attempts/{BROKEN[0].attempt_id}.json"
    assert (bundle.keys, bundle.unsigned) == (frozenset(), (MANIFEST, f"blocks/0001/{BLOCK}", path))
    assert [signer.key for signer in judge_bundle(bundle).circumstances.signers] == [None]


def test_block_whose_signature_was_taken_away_or_replaced_is_named() -> None:
    files = make_bundle(FILE, [0, 1], signer=MINE)
    path = f"blocks/0001/{BLOCK}"
    assert "is signed by nobody" in problems(rewritten(files, path, signature=None))[path]
    other = STRANGER.sign(b"anything").model_dump()
    assert f"is signed by {STRANGER.key}" in problems(rewritten(files, path, signature=other))[path]
    borrowed = json.loads(files[f"blocks/0002/{BLOCK}"])["signature"]
    assert "does not fit key" in problems(rewritten(files, path, signature=borrowed))[path]


def test_broken_attempt_that_blames_another_failure_is_named() -> None:
    files = make_bundle(FILE, [0], broken=BROKEN, signer=MINE)
    path = f"attempts/{BROKEN[0].attempt_id}.json"
    assert set(problems(rewritten(files, path, failure_class="preempted"))) == {path}
    assert set(problems(rewritten(files, path, message="another story"))) == {path}


def test_manifest_that_somebody_else_wrote_is_named() -> None:
    files = make_bundle(FILE, [0, 1], broken=BROKEN, signer=MINE)
    fewer = {path: data for path, data in files.items() if not path.startswith(("blocks/0002/", "attempts/"))}
    values = json.loads(sealed(FILE, fewer)[MANIFEST])
    values["signature"] = json.loads(files[MANIFEST])["signature"]
    details = problems({**fewer, MANIFEST: json.dumps(values).encode()})
    assert "does not fit key" in details[MANIFEST]
    assert "which is the key of no node in this bundle" in problems(sealed(FILE, fewer, STRANGER))[MANIFEST]
    assert open_bundle(sealed(FILE, fewer)).unsigned == (MANIFEST,)


def two_nodes() -> dict[str, bytes]:
    """Return a bundle that the stranger's machine went on with: it signed the manifest last."""
    files = make_bundle(FILE, [0, 1], broken=BROKEN, signer=MINE)
    other = make_node(STRANGER)
    return sealed(FILE, {**files, f"nodes/{other.node_id}.json": other.model_dump_json().encode()}, STRANGER)


def test_another_node_of_the_bundle_cannot_change_the_attempts_of_a_node() -> None:
    files = two_nodes()
    assert open_bundle(files).keys == {MINE.key, STRANGER.key}
    block, broken = f"blocks/0002/{BLOCK}", f"attempts/{BROKEN[0].attempt_id}.json"
    without = {path: data for path, data in files.items() if path != broken}
    renumbered = rewritten(without, block, STRANGER, attempt_no=1)
    assert "does not fit key" in problems(renumbered)[block], "a broken attempt was left out, and the rest renumbered"
    record = BrokenAttempt.model_validate_json(files[broken])
    for changes in ({"failure_class": FailureClass.OOM}, {"message": "another story"}, {"arm": "chunk-32"}):
        signed = signed_attempt(FILE, record.model_copy(update=changes), (), STRANGER)
        details = problems(sealed(FILE, {**files, broken: signed.model_dump_json().encode()}, STRANGER))
        assert f"is signed by {STRANGER.key}" in details[broken]


def test_a_killed_attempt_may_be_recorded_by_another_node_of_the_bundle_only() -> None:
    killed = [broken_attempt(1, 1, FailureClass.INFRA_NODE)]
    files = make_bundle(FILE, [0], broken=killed, signer=MINE)
    path = f"attempts/{killed[0].attempt_id}.json"
    record = signed_attempt(FILE, BrokenAttempt.model_validate_json(files[path]), (), STRANGER)
    by_another = {**files, path: record.model_dump_json().encode()}
    assert f"is signed by {STRANGER.key}" in problems(sealed(FILE, by_another, MINE))[path]
    other = make_node(STRANGER)
    described = {**by_another, f"nodes/{other.node_id}.json": other.model_dump_json().encode()}
    assert open_bundle(sealed(FILE, described, MINE)).keys == {MINE.key, STRANGER.key}


def test_a_statement_of_an_earlier_program_lacks_the_number_and_still_fits() -> None:
    files = make_bundle(FILE, [0], signer=MINE)
    path = f"blocks/0001/{BLOCK}"
    attempt = Attempt.model_validate_json(files[path])
    receipts = [trial.receipt.digest for trial in open_bundle(files).blocks[0].trials]
    statement = attempt_statement(FILE, attempt, receipts, numbered=False)
    earlier = attempt.model_copy(update={"signature": MINE.sign(statement)})
    assert open_bundle(sealed(FILE, {**files, path: earlier.model_dump_json().encode()}, MINE)).unsigned == ()
    assert attempt.signature is not None
    flipped = {**attempt.signature.model_dump(), "version": None}
    assert "does not fit key" in problems(rewritten(files, path, signature=flipped))[path]


@pytest.fixture
def signed_folder(tmp_path: Path) -> Path:
    return write_folder(make_bundle(FILE, [0], signer=MINE), tmp_path / "b")


def test_run_that_goes_on_signs_with_its_own_key(signed_folder: Path) -> None:
    with BundleFolder(signed_folder, FILE, STRANGER) as folder:
        known = folder.open(resume=True)
        node = make_node(STRANGER)
        node_id = folder.add_node(node.name, node.registration, known)
        folder.keep_broken(broken_attempt(2, 1, FailureClass.TIMEOUT).model_copy(update={"node_id": node_id}))
    bundle = open_bundle(read_bundle_files(signed_folder))
    assert bundle.keys == {MINE.key, STRANGER.key}
    assert bundle.unsigned == ()


def test_run_that_cannot_sign_does_not_go_on_with_a_signed_bundle(signed_folder: Path) -> None:
    with (
        pytest.raises(ExecRefused, match="is signed, but this run cannot sign"),
        BundleFolder(signed_folder, FILE) as folder,
    ):
        folder.open(resume=True)


def test_run_does_not_sign_over_a_manifest_that_was_rewritten(signed_folder: Path) -> None:
    values = json.loads((signed_folder / MANIFEST).read_bytes())
    values["signature"] = STRANGER.sign(b"x").model_dump()
    (signed_folder / MANIFEST).write_text(json.dumps(values))
    with (
        pytest.raises(BundleError, match="its signature does not fit key"),
        BundleFolder(signed_folder, FILE, MINE) as folder,
    ):
        folder.open(resume=True)

"""One signature covers a bundle, and it is by the node that ran it."""

import json
from pathlib import Path

import pytest

from ablate.experiments.errors import BundleError
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.bundle import join_bundles
from ablate.experiments.records.bundle_files import MANIFEST, read_bundle_files
from ablate.experiments.records.bundle_reader import open_bundle
from ablate.experiments.records.signing import Signer
from ablate.experiments.reporting.sentences import origin_problems
from ablate.experiments.reporting.view import judge_bundle
from ablate.workers.errors import ExecRefused
from ablate.workers.offline.bundle_folder import BundleFolder
from tests.bundles import broken_attempt, make_bundle, make_file, make_node, registered, sealed, write_folder

FILE = registered(make_file())
MINE, STRANGER = Signer(b"m" * 32), Signer(b"s" * 32)
BROKEN = [broken_attempt(1, 1, FailureClass.TIMEOUT)]


def problems(files: dict[str, bytes]) -> dict[str, str]:
    with pytest.raises(BundleError) as caught:
        open_bundle(files)
    return {problem.pointer: problem.detail for problem in caught.value.problems}


def with_signature(files: dict[str, bytes], signature: object) -> dict[str, bytes]:
    """Return the files with a manifest that fits them and this signature."""
    values = {**json.loads(sealed(FILE, files)[MANIFEST]), "signature": signature}
    return {**files, MANIFEST: json.dumps(values).encode()}


def test_signed_bundle_names_its_key_and_the_verdict_does_too() -> None:
    bundle = open_bundle(make_bundle(FILE, broken=BROKEN, signer=MINE))
    assert (bundle.keys, bundle.is_signed) == (frozenset({MINE.key}), True)
    (signer,) = judge_bundle(bundle).circumstances.signers
    assert (signer.name, signer.key, signer.blocks) == ("far-node", MINE.key, (0, 1, 2, 3, 4, 5))


def test_unsigned_bundle_is_read_and_says_so() -> None:
    bundle = open_bundle(make_bundle(FILE, [0], broken=BROKEN))
    assert (bundle.keys, bundle.is_signed) == (frozenset(), False)
    verdict = judge_bundle(bundle)
    assert [signer.key for signer in verdict.circumstances.signers] == [None]
    assert any("Nobody signed for far-node" in text for text in origin_problems(verdict))


def test_every_edit_of_every_file_needs_a_new_signature() -> None:
    files = make_bundle(FILE, [0, 1], broken=BROKEN, signer=MINE)
    signature = json.loads(files[MANIFEST])["signature"]
    for path in sorted(set(files) - {MANIFEST}):
        without = {name: data for name, data in files.items() if name != path}
        for edited in (without, {**files, path: files[path] + b"\n"}):
            details = problems(with_signature(edited, signature))
            if path.endswith("log.txt") and path in edited:
                assert [*details] == [MANIFEST], "nothing else would find it"
                assert "does not fit key" in details[MANIFEST]


def test_manifest_that_somebody_else_signed_is_named() -> None:
    files = make_bundle(FILE, [0, 1], broken=BROKEN, signer=MINE)
    fewer = {path: data for path, data in files.items() if not path.startswith(("blocks/0002/", "attempts/"))}
    old = json.loads(files[MANIFEST])["signature"]
    assert "does not fit key" in problems(with_signature(fewer, old))[MANIFEST]
    assert "which is the key of no node in this bundle" in problems(sealed(FILE, fewer, STRANGER))[MANIFEST]
    assert not open_bundle(sealed(FILE, fewer)).is_signed


def test_a_bundle_is_of_one_node_whoever_signs_it() -> None:
    files, other = make_bundle(FILE, [0, 1], broken=BROKEN, signer=MINE), make_node(STRANGER)
    both = {**files, f"nodes/{other.node_id}.json": other.model_dump_json().encode()}
    for signer in (MINE, STRANGER, None):
        assert "a bundle is of one node" in problems(sealed(FILE, both, signer))[MANIFEST]


def test_the_bundles_of_several_nodes_are_joined_and_each_signs_its_own() -> None:
    mine = open_bundle(make_bundle(FILE, [0, 1], broken=BROKEN, signer=MINE))
    theirs = open_bundle(make_bundle(FILE, [2, 3, 4, 5], signer=STRANGER))
    joined = join_bundles([mine, theirs])
    assert (joined.keys, joined.is_signed, joined.missing) == ({MINE.key, STRANGER.key}, True, ())
    assert {signer.key: signer.blocks for signer in joined.signers} == {MINE.key: (0, 1), STRANGER.key: (2, 3, 4, 5)}
    nobody = open_bundle(make_bundle(FILE, [2, 3]))
    partly = join_bundles([mine, nobody])
    assert (partly.keys, partly.is_signed) == ({MINE.key}, False)
    assert partly.signed_by == {0: MINE.key, 1: MINE.key}


@pytest.fixture
def signed_folder(tmp_path: Path) -> Path:
    return write_folder(make_bundle(FILE, [0], signer=MINE), tmp_path / "b")


def test_run_that_goes_on_signs_all_of_the_bundle(signed_folder: Path) -> None:
    with BundleFolder(signed_folder, FILE, MINE) as folder:
        before = folder.open()
        (node_id,) = before.nodes
        folder.keep_broken(broken_attempt(2, 1, FailureClass.TIMEOUT).model_copy(update={"node_id": node_id}))
    bundle = open_bundle(read_bundle_files(signed_folder))
    assert (bundle.keys, bundle.is_signed, len(bundle.broken)) == ({MINE.key}, True, 1)


@pytest.mark.parametrize("signer", [STRANGER, None])
def test_run_of_another_node_does_not_go_on_with_a_bundle(signed_folder: Path, signer: Signer | None) -> None:
    for lost in (False, True):
        if lost:
            (signed_folder / MANIFEST).unlink()
        with (
            pytest.raises(ExecRefused, match=f"is signed by {MINE.key}, and this run .*; run the missing blocks into"),
            BundleFolder(signed_folder, FILE, signer) as folder,
        ):
            folder.open()


def test_run_does_not_sign_over_a_manifest_that_was_rewritten(signed_folder: Path) -> None:
    values = json.loads((signed_folder / MANIFEST).read_bytes())
    values["signature"] = MINE.sign(b"x").model_dump()
    (signed_folder / MANIFEST).write_text(json.dumps(values))
    with (
        pytest.raises(BundleError, match="its signature does not fit key"),
        BundleFolder(signed_folder, FILE, MINE) as folder,
    ):
        folder.open()

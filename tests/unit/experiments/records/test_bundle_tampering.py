"""Whoever edits a bundle is named, however carefully he redoes the digests; what nobody can find is held here, too.

The first table is somebody who has the files and not the key of the node: he redoes every number and every digest that
follows from his edit. The second is the owner of the key, who signs again what he edited.
"""

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from experiments.documents import seal as seal_document
from experiments.errors import BundleError
from experiments.outcomes import FailureClass, Outcome
from experiments.records.bundle import Attempt, BrokenAttempt, signed_attempt
from experiments.records.bundle_files import BLOCK, LOG, MANIFEST, PLAN, RECEIPT
from experiments.records.bundle_reader import open_bundle
from experiments.records.plan_file import plan_file_text
from experiments.records.receipts import Receipt, summarise
from experiments.records.signing import Signer
from model.measurements import Step
from tests.bundles import broken_attempt, make_bundle, make_file, resealed, sealed
from tests.factories import make_receipt

Files: TypeAlias = dict[str, bytes]
Values: TypeAlias = dict[str, Any]

NODE, STRANGER = Signer(b"n" * 32), Signer(b"s" * 32)
FILE = make_file(workload__steps={"warmup": 3, "timed": 25, "val_rows": 2})
BROKEN = broken_attempt(1, 1, FailureClass.TIMEOUT)
ORIGINAL = make_bundle(FILE, [0, 1, 2], broken=[BROKEN], signer=NODE)
ATTEMPT = f"attempts/{BROKEN.attempt_id}.json"
FIRST, SECOND = f"blocks/0001/{BLOCK}", f"blocks/0002/{BLOCK}"
NODE_FILE = next(path for path in ORIGINAL if path.startswith("nodes/"))


def receipt_of(arm: str, block: str = "0001") -> str:
    return next(path for path in ORIGINAL if path.startswith(f"blocks/{block}/") and path.endswith(f"-{arm}/{RECEIPT}"))


PSIV, BASE = receipt_of("psiv-on"), receipt_of("baseline")


def resummarised(values: Values) -> Values:
    """Return the receipt with the summary that its steps give."""
    summary = values["summary"]
    fresh = summarise(
        [Step.model_validate(step) for step in values["steps"]],
        flops_per_step=values["flops_per_step"],
        loss_val=summary["loss_val"],
        peak_flops=values["environment"]["peak_flops"],
    )
    return {**values, "summary": fresh.model_dump(mode="json")}


def redigested(values: Values) -> bytes:
    """Return the receipt with the digest that fits it again."""
    return seal_document(Receipt.model_validate(values)).model_dump_json().encode()


def edited(path: str, edit: Callable[[Values], None], files: Files | None = None) -> Files:
    """Return the files with one receipt changed: its summary and its digest fit again."""
    known = ORIGINAL if files is None else files
    values = json.loads(known[path])
    edit(values)
    return {**known, path: redigested(resummarised(values) if values["summary"] else values)}


def steps(change: Callable[[list[Values]], list[Values]], *more: tuple[str, Any]) -> Callable[[Values], None]:
    def edit(values: Values) -> None:
        values["steps"] = change(values["steps"])
        for path, value in more:
            put(path, value)(values)

    return edit


def put(path: str, value: Any) -> Callable[[Values], None]:
    """Return the edit that sets the field at `path`, for example "environment.device_serial"."""

    def edit(values: Values) -> None:
        *parents, last = path.split(".")
        target = values
        for name in parents:
            target = target[name]
        target[last] = value

    return edit


def with_file(path: str, **changes: Any) -> Files:
    return {**ORIGINAL, path: json.dumps({**json.loads(ORIGINAL[path]), **changes}).encode()}


def without(*prefixes: str) -> Files:
    return {path: data for path, data in ORIGINAL.items() if not path.startswith(prefixes)}


def scaled(factor: float) -> Callable[[list[Values]], list[Values]]:
    return lambda found: [
        {**step, "seconds": step["seconds"] * (factor if step["phase"] == "timed" else 1)} for step in found
    ]


def relabelled(old: str, new: str, count: int) -> Callable[[list[Values]], list[Values]]:
    def change(found: list[Values]) -> list[Values]:
        chosen = [step["index"] for step in found if step["phase"] == old][:count]
        return [{**step, "phase": new} if step["index"] in chosen else step for step in found]

    return change


def faster(factor: float) -> Callable[[list[Values]], list[Values]]:
    """Make the timed steps shorter and let every clock follow."""

    def change(found: list[Values]) -> list[Values]:
        gained, told = 0.0, []
        for step in found:
            gain = step["seconds"] * (1 - factor) if step["phase"] == "timed" else 0.0
            gained += gain
            clocks = {"began_s": step["began_s"] - gained + gain, "ended_s": step["ended_s"] - gained}
            told.append({**step, "seconds": step["seconds"] - gain, **clocks})
        return told

    return change


def slowest_dropped(count: int) -> Callable[[list[Values]], list[Values]]:
    def change(found: list[Values]) -> list[Values]:
        timed = sorted((s for s in found if s["phase"] == "timed"), key=lambda s: float(s["seconds"]))
        gone = [step["index"] for step in timed[-count:]]
        return [step for step in found if step["index"] not in gone]

    return change


def exchanged() -> Files:
    """Exchange what the variant measured in two blocks."""
    other = receipt_of("psiv-on", "0002")
    one, two = json.loads(ORIGINAL[PSIV]), json.loads(ORIGINAL[other])
    for part in ("steps", "summary", "memory"):
        one[part], two[part] = two[part], one[part]
    return {**ORIGINAL, PSIV: redigested(one), other: redigested(two)}


def from_another_run() -> Files:
    """Take the receipt of another, better run of the same trial."""
    ids = json.loads(ORIGINAL[PSIV])["ids"]
    better = make_receipt(FILE.plan, 0, "psiv-on", ids=ids, tokens_per_s=6000.0)
    return {**ORIGINAL, PSIV: better.model_dump_json().encode()}


def hidden_oom() -> Files:
    """Turn a trial that ended out of memory into one that measured."""
    return edited(PSIV, lambda values: values.update(outcome=Outcome.OOM, failure_class="oom", summary=None))


def moved_block() -> Files:
    """Hand in block 1 a second time, as block 4."""
    values = json.loads(ORIGINAL[FIRST])
    copies = {path.replace("/0001/", "/0004/"): data for path, data in ORIGINAL.items() if "/0001/" in path}
    return {**ORIGINAL, **copies, f"blocks/0004/{BLOCK}": json.dumps({**values, "index": 3}).encode()}


def other_key() -> Files:
    """Say that the node has another key, and leave the signatures."""
    values = json.loads(ORIGINAL[NODE_FILE])
    values["registration"]["public_key"] = STRANGER.key
    return {**ORIGINAL, NODE_FILE: json.dumps(values).encode()}


def other_device() -> Files:
    values = json.loads(ORIGINAL[NODE_FILE])
    values["registration"]["devices"][0]["serial"] = "another"
    return {**ORIGINAL, NODE_FILE: json.dumps(values).encode()}


def other_rule() -> Files:
    """Widen the margin in the spec and make the plan fit."""
    text = FILE.spec_text.replace('"0.5%"', '"9%"')
    assert text != FILE.spec_text
    return {**ORIGINAL, PLAN: plan_file_text(resealed(FILE, spec_text=text)).encode()}


def signed_by_a_stranger(path: str) -> Files:
    """Sign a block again, by another key."""
    attempt = Attempt.model_validate_json(ORIGINAL[path])
    return {
        **ORIGINAL,
        path: signed_attempt(FILE, attempt, digests(ORIGINAL, path), STRANGER).model_dump_json().encode(),
    }


def digests(files: Files, path: str) -> list[str]:
    """Return the digests of the receipts of the block at `path`, in running order."""
    own = sorted(name for name in files if name.startswith(path.removesuffix(BLOCK)) and name.endswith(RECEIPT))
    return [json.loads(files[name])["digest"] for name in own]


def text_of(path: str, data: bytes) -> Files:
    return {**ORIGINAL, path: data}


WITHOUT_THE_KEY: dict[str, tuple[Files, str]] = {
    "the variant 3 % faster": (edited(PSIV, steps(scaled(0.97))), FIRST),
    "the variant 3 % faster, clocks and all": (edited(PSIV, steps(faster(0.97))), FIRST),
    "warm-up steps as timed": (edited(PSIV, steps(relabelled("warmup", "timed", 3))), FIRST),
    "the slowest eleven steps deleted": (edited(PSIV, steps(slowest_dropped(11))), FIRST),
    "eleven steps deleted and the configuration with them": (
        edited(PSIV, steps(slowest_dropped(11), ("config.steps.timed", 14))),
        FIRST,
    ),
    "clocks of the device erased": (
        edited(PSIV, steps(lambda found: [{**s, "clock_mhz": None if s["clock_mhz"] else 1980.0} for s in found])),
        FIRST,
    ),
    "the first loss made equal": (
        edited(PSIV, steps(lambda found: [{**s, "loss": 1.0 if s["index"] == 0 else s["loss"]} for s in found])),
        FIRST,
    ),
    "a lower validation loss": (edited(PSIV, put("summary.loss_val", 0.1)), FIRST),
    "a lower peak of memory": (edited(PSIV, put("memory.peak_reserved_bytes", 1)), FIRST),
    "a gate that was not live": (edited(PSIV, put("gates.psiv_cache.observed", True)), FIRST)
    if json.loads(ORIGINAL[PSIV])["gates"]["psiv_cache"]["observed"] is not True
    else (edited(PSIV, put("gates.psiv_cache.how", "fact of nobody")), FIRST),
    "a slow-down of the device erased": (
        edited(PSIV, put("environment.throttle", {"hw_thermal_slowdown": 0.0, "foreign_processes": ()})),
        FIRST,
    ),
    "another device": (edited(PSIV, put("environment.device_serial", "0123")), FIRST),
    "another version of torch": (edited(PSIV, put("environment.versions", {"torch": "9"})), FIRST),
    "another code": (edited(PSIV, put("digests.code", "sha256:other")), FIRST),
    "a shorter compilation": (edited(PSIV, put("compile_s", 0.1)), FIRST),
    "a trial that ran at another time": (edited(PSIV, put("started_at", "2026-11-20T13:00:00+00:00")), FIRST),
    "an out of memory where it measured": (hidden_oom(), FIRST),
    "results of two blocks exchanged": (exchanged(), SECOND),
    "the receipt of a better run": (from_another_run(), FIRST),
    "a block handed in twice": (moved_block(), f"blocks/0004/{BLOCK}"),
    "a block left out": (without("blocks/0002/"), MANIFEST),
    "a broken attempt left out": (without("attempts/"), MANIFEST),
    "a broken attempt with another cause": (with_file(ATTEMPT, failure_class="preempted"), ATTEMPT),
    "a broken attempt of another block": (with_file(ATTEMPT, index=2), ATTEMPT),
    "a broken attempt that took less time": (with_file(ATTEMPT, ended_at="2026-11-20T13:00:01Z"), MANIFEST),
    "a block that ran at another time": (with_file(FIRST, ended_at="2026-11-20T12:00:01Z"), MANIFEST),
    "a third attempt as the first": (with_file(SECOND, attempt_no=3), MANIFEST),
    "a log with another story": (text_of(PSIV.replace(RECEIPT, LOG), b"all was well\n"), MANIFEST),
    "another key of the node": (other_key(), FIRST),
    "another device of the node": (other_device(), MANIFEST),
    "a rule with a wider margin": (other_rule(), PLAN),
    "a block signed by a stranger": (signed_by_a_stranger(FIRST), FIRST),
    "a block that nobody signed": (with_file(FIRST, signature=None), FIRST),
    "the signature of another block": (
        with_file(FIRST, signature=json.loads(ORIGINAL[SECOND])["signature"]),
        FIRST,
    ),
}
"""By what was done: the files, every digest redone, and the file that has to be named."""


UNSEEN_WITH_THE_KEY = {
    "the variant 3 % faster, clocks and all",
    "clocks of the device erased",  # a CPU node has none: where the device can tell, absent is a problem
    "a slow-down of the device erased",
    "the first loss made equal",
    "a lower validation loss",
    "a lower peak of memory",
    "a trial that ran at another time",
    "an out of memory where it measured",
    "results of two blocks exchanged",
    "the receipt of a better run",
    "a block left out",
    "a broken attempt with another cause",
    "a broken attempt that took less time",
    "a block that ran at another time",
    "a log with another story",
    "another key of the node",
    "a block signed by a stranger",
    "a block that nobody signed",
    "the signature of another block",
}
"""Those of the edits that contradict nothing when the node's own key signs them."""


def with_old_signature(files: Files) -> Files:
    """Return the files with a manifest that fits them and the signature of the first one."""
    manifest = json.loads(sealed(FILE, files)[MANIFEST])
    signature = json.loads(ORIGINAL[MANIFEST])["signature"]
    return {**files, MANIFEST: json.dumps({**manifest, "signature": signature}).encode()}


def named(files: Files) -> dict[str, str]:
    with pytest.raises(BundleError) as caught:
        open_bundle(files)
    return {problem.pointer: problem.detail for problem in caught.value.problems}


def test_the_original_is_good() -> None:
    bundle = open_bundle(ORIGINAL)
    assert (len(bundle.blocks), len(bundle.broken), bundle.keys) == (3, 1, {NODE.key})
    assert open_bundle(with_old_signature(ORIGINAL)).keys == {NODE.key}


def test_every_edit_changes_something() -> None:
    assert [what for what, (files, _) in WITHOUT_THE_KEY.items() if files == ORIGINAL] == []


@pytest.mark.parametrize("what", WITHOUT_THE_KEY)
def test_edit_without_the_key_is_found_and_named(what: str) -> None:
    files, path = WITHOUT_THE_KEY[what]
    found = named(with_old_signature(files))
    assert any(name.startswith(path.removesuffix(BLOCK)) for name in found), found


@pytest.mark.parametrize("what", WITHOUT_THE_KEY)
def test_no_edit_passes_under_the_nodes_key_by_leaving_signatures_out(what: str) -> None:
    """Without signatures it is either damaged, or it is another bundle that nobody signed, and says so."""
    files, _ = WITHOUT_THE_KEY[what]
    try:
        bundle = open_bundle(sealed(FILE, files))
    except BundleError:
        return
    assert MANIFEST in bundle.unsigned


def resigned(files: Files, signer: Signer = NODE) -> Files:
    """Return the files as if `signer` had written them: every block, attempt and the manifest signed again."""
    found = dict(files)
    node = json.loads(found[NODE_FILE])
    node["registration"]["public_key"] = signer.key
    found[NODE_FILE] = json.dumps(node).encode()
    for path in [name for name in found if name.endswith(BLOCK)]:
        attempt = Attempt.model_validate_json(found[path])
        found[path] = signed_attempt(FILE, attempt, digests(found, path), signer).model_dump_json().encode()
    for path in [name for name in found if name.startswith("attempts/")]:
        broken = BrokenAttempt.model_validate_json(found[path])
        found[path] = signed_attempt(FILE, broken, (), signer).model_dump_json().encode()
    return sealed(FILE, found, signer)


def test_bundle_that_a_stranger_wrote_again_carries_his_key_and_no_other() -> None:
    """Nothing in it is wrong but who signed it: that is what an importer compares with the keys that he trusts."""
    bundle = open_bundle(resigned(edited(PSIV, steps(faster(0.97))), STRANGER))
    assert (bundle.keys, bundle.unsigned) == ({STRANGER.key}, ())
    assert NODE.key not in {signer.key for signer in bundle.signers}


def test_the_owner_of_the_key_can_lie_as_long_as_he_is_consistent() -> None:
    """The limit of all of this, said in docs/trust.md: a signature proves who spoke, not that it is true."""
    files = ORIGINAL
    for number in ("0001", "0002", "0003"):
        files = edited(receipt_of("psiv-on", number), steps(faster(0.97)), files)
    bundle = open_bundle(resigned(files))
    assert (bundle.keys, bundle.unsigned, len(bundle.blocks)) == ({NODE.key}, (), 3)


def test_what_the_owner_of_the_key_can_change_unseen_is_known() -> None:
    """Signed again by the node itself, only a contradiction shows; this list is the limit of recomputation."""
    unseen = set()
    for what, (files, _) in WITHOUT_THE_KEY.items():
        try:
            open_bundle(resigned(files))
        except BundleError:
            continue
        unseen.add(what)
    assert unseen == UNSEEN_WITH_THE_KEY

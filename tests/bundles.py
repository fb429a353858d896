"""Plan files and bundles for tests: made of sealed receipts with believable numbers, nothing is run."""

import io
import json
import tarfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ablate.experiments.documents import seal
from ablate.experiments.ids import new_id
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.bundle import (
    Attempt,
    BrokenAttempt,
    Manifest,
    NodeRecord,
    block_folder,
    make_manifest,
    trial_folder,
)
from ablate.experiments.records.bundle_files import BLOCK, LOG, MANIFEST, PLAN, RECEIPT
from ablate.experiments.records.circumstances import Family, Registration
from ablate.experiments.records.messages import DeviceInfo, NodeRegistration
from ablate.experiments.records.plan_file import PlanFile, make_plan_file, plan_file_text, registered_file
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.records.signing import Signer, manifest_statement
from tests.factories import make_plan, make_receipt, make_spec, spec_values

BEGAN = datetime(2026, 11, 20, 12, tzinfo=UTC)


def make_file(*, to_register: bool = False, **changes: Any) -> PlanFile:
    """Return a plan file of the factories' spec; `changes` as in spec_values. Its service draws if `to_register`."""
    spec, text = make_spec(**changes), json.dumps(spec_values(**changes))
    return make_plan_file(make_plan(spec), spec_text=text, content_type="application/json", to_register=to_register)


def registered(file: PlanFile, registered_at: str = "2026-11-20T11:00:00.000Z") -> PlanFile:
    """Return the plan file as a service registered it; its spec lists the seeds."""
    return registered_file(file, (), Registration(registered_at=registered_at, family=Family()))


def resealed(file: PlanFile, **changes: Any) -> PlanFile:
    """Return the plan file with fields replaced and a digest that fits again."""
    return seal(file.model_copy(update=changes))


def make_bundle(
    file: PlanFile,
    indices: Sequence[int] = range(6),
    *,
    broken: Sequence[BrokenAttempt] = (),
    signer: Signer | None = None,
    **receipt: Any,
) -> dict[str, bytes]:
    """Return the files of a bundle with these blocks, signed where `signer` is given; `receipt` as in make_receipt."""
    node = make_node(signer, make_receipt(file.plan, 0, file.plan.baseline, **receipt))
    files = {PLAN: plan_file_text(file).encode(), f"nodes/{node.node_id}.json": node.model_dump_json().encode()}
    for index in indices:
        attempt_no = 1 + sum(record.index == index for record in broken)
        attempt = Attempt(**names(index, node.node_id, attempt_no))
        for trial in file.claimed(index, attempt_id=attempt.attempt_id, attempt_no=attempt_no).trials:
            ids = {
                "ablation": file.ablation_id,
                "block": file.blocks[index].block_id,
                "trial": trial.trial_id,
                "attempt": attempt.attempt_id,
                "node": node.node_id,
            }
            made = make_receipt(file.plan, index, trial.arm, ids=ids, **receipt)
            folder = trial_folder(index, trial.position, trial.arm)
            files[f"{folder}/{RECEIPT}"] = made.model_dump_json().encode()
            files[f"{folder}/{LOG}"] = f"trial {trial.arm}: step 0 é\n".encode()
        files[f"{block_folder(index)}/{BLOCK}"] = attempt.model_dump_json().encode()
    for record in broken:
        own = record.model_copy(update={"node_id": node.node_id})
        files[f"attempts/{record.attempt_id}.json"] = own.model_dump_json().encode()
    return sealed(file, files, signer)


def sealed(file: PlanFile, files: dict[str, bytes], signer: Signer | None = None) -> dict[str, bytes]:
    """Return the files with a manifest that fits them, signed where `signer` is given."""
    contents = {path: data for path, data in files.items() if path != MANIFEST}
    manifest: Manifest = make_manifest(file, contents)
    if signer is not None:
        signature = signer.sign(manifest_statement(manifest.digest))
        manifest = manifest.model_copy(update={"signature": signature})
    return {**contents, MANIFEST: manifest.model_dump_json(indent=1).encode()}


def make_node(signer: Signer | None = None, receipt: Receipt | None = None) -> NodeRecord:
    """Return the described machine of `receipt`, by default of the factories' receipts, that signs by `signer`."""
    made = receipt or make_receipt(make_plan(), 0, "baseline")
    environment = made.environment
    device = DeviceInfo(index=0, name=environment.device_name, serial=environment.device_serial, memory_bytes=2**34)
    registration = NodeRegistration(
        node_class=environment.node_class,
        devices=(device,),
        versions=environment.versions,
        code_digest=made.digests.code,
        public_key=None if signer is None else signer.key,
    )
    return NodeRecord(node_id=new_id("nod"), name="far-node", registration=registration)


def broken_attempt(index: int, attempt_no: int, failure: FailureClass, *, arm: str | None = None) -> BrokenAttempt:
    """Return an attempt that broke."""
    own = names(index, new_id("nod"), attempt_no)
    return BrokenAttempt(**own, failure_class=failure, arm=arm, message=f"{failure} there")


def names(index: int, node_id: str, attempt_no: int = 1) -> dict[str, Any]:
    """Return the fields of an attempt at block `index`: an hour for each, as the factories' receipts have it."""
    began = BEGAN + timedelta(hours=index)
    return {
        "index": index,
        "attempt_id": new_id("att"),
        "attempt_no": attempt_no,
        "node_id": node_id,
        "started_at": began,
        "ended_at": began + timedelta(seconds=50),
    }


def write_folder(files: dict[str, bytes], folder: Path) -> Path:
    """Write the files below `folder`."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def archive_of(*bundles: dict[str, bytes], mode: str = "w") -> bytes:
    """Return a tar archive of bundles, each in a folder: bundle-1, bundle-2 and so on."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode=mode) as tar:  # type: ignore[call-overload]  # the mode is a variable
        for number, files in enumerate(bundles, start=1):
            for path, content in files.items():
                member = tarfile.TarInfo(f"bundle-{number}/{path}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()

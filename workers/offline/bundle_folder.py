"""A bundle during its run: finished blocks appear whole, then the manifest follows, so a kill costs one block."""

import fcntl
import logging
import shutil
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel, ValidationError

from ablate.experiments.documents import write_whole
from ablate.experiments.errors import BundleError, PlanFileError
from ablate.experiments.ids import new_id
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.bundle import (
    Attempt,
    BrokenAttempt,
    Bundle,
    Manifest,
    NodeRecord,
    block_folder,
    make_manifest,
    trial_folder,
)
from ablate.experiments.records.bundle_files import BLOCK, LOG, MANIFEST, PLAN, RECEIPT, WORK, read_bundle_files
from ablate.experiments.records.bundle_reader import (
    altered_files,
    open_bundle,
    read_manifest,
    read_nodes,
    signature_problems,
)
from ablate.experiments.records.messages import NodeRegistration
from ablate.experiments.records.plan_file import PlanFile, plan_file_text, read_plan_file
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.records.signing import Signer, manifest_statement, signing_problem
from ablate.workers.errors import ExecRefused
from ablate.workers.paths import TrialPaths, WorkPaths
from ablate.workers.processes.trial_output import LogTail

_log = logging.getLogger(__name__)

_HALF_WRITTEN = "*.part"
_RUNNING = "running.json"
"""In the work folder: the running attempt."""


class BundleFolder:
    """One bundle on disk, locked for one process at a time; leaving the context releases it."""

    def __init__(self, root: Path, plan_file: PlanFile, signer: Signer | None = None) -> None:
        self.root = root
        self.paths = WorkPaths(home=root)
        self._plan_file = plan_file
        self._signer = signer
        self._lock: TextIO | None = None

    def __enter__(self) -> "BundleFolder":
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    @property
    def work(self) -> Path:
        """Folder of the running attempt; no part of the bundle."""
        return self.root / WORK

    def open(self) -> Bundle:
        """Lock the folder, verify its content, and return it.

        Raises:
            ExecRefused: another process uses the folder; or it contains another plan or other files; or another key
                signs it.
            BundleError: a file in it was altered.

        """
        occupied = self.root.is_dir() and any(self.root.iterdir())
        if occupied and not (self.root / PLAN).is_file() and not self._is_ours():
            raise ExecRefused(f"{self.root} contains files that are no bundle; name a new or empty folder")
        self.work.mkdir(parents=True, exist_ok=True)
        self._take()
        for path in self.root.rglob(_HALF_WRITTEN):
            path.unlink()
        for name in (PLAN, MANIFEST):  # both can be made again; a power failure may have emptied them
            path = self.root / name
            if path.is_file() and not path.stat().st_size:
                path.unlink()
        self._check_plan()
        write_whole(self.root / PLAN, plan_file_text(self._plan_file))
        return self._with_killed(self._verified())

    def add_node(self, name: str, registration: NodeRegistration, bundle: Bundle) -> str:
        """Describe this machine in the bundle; return its id, the same as before if the machine has not changed."""
        for node in bundle.nodes.values():
            if (node.name, node.registration) == (name, registration):
                return node.node_id
        record = NodeRecord(node_id=new_id("nod"), name=name, registration=registration)
        self._write(f"nodes/{record.node_id}.json", record)
        self.seal()
        return record.node_id

    def begin(self, attempt: Attempt) -> None:
        """Record that an attempt runs, so that a kill leaves a trace of it."""
        write_whole(self.work / _RUNNING, attempt.model_dump_json())

    def keep_block(self, attempt: Attempt, receipts: Sequence[Receipt]) -> None:
        """Add a finished block: all of it at once, then the manifest."""
        folder = self.work / "finished"
        shutil.rmtree(folder, ignore_errors=True)
        own = block_folder(attempt.index)
        for receipt in receipts:
            files = self.paths.trial(attempt.attempt_id, receipt.ids.trial)
            target = folder / Path(trial_folder(attempt.index, receipt.ids.position, receipt.arm)).relative_to(own)
            target.mkdir(parents=True)
            write_whole(target / RECEIPT, receipt.model_dump_json(indent=1) + "\n")
            write_whole(target / LOG, _log_text(receipt.ids.trial, files))
        write_whole(folder / BLOCK, attempt.model_dump_json(indent=1) + "\n")
        (self.root / own).parent.mkdir(exist_ok=True)
        folder.replace(self.root / own)
        self.seal()

    def keep_broken(self, attempt: BrokenAttempt) -> None:
        """Record an attempt that broke."""
        self._write(f"attempts/{attempt.attempt_id}.json", attempt)
        self.seal()

    def drop_work_of(self, attempt_id: str) -> None:
        """Remove the files of an attempt."""
        (self.work / _RUNNING).unlink(missing_ok=True)
        shutil.rmtree(self.paths.root / attempt_id, ignore_errors=True)

    def seal(self) -> Manifest:
        """Write the manifest of the present files, signed if this run can sign and has described its machine."""
        contents = {path: data for path, data in read_bundle_files(self.root).items() if path != MANIFEST}
        manifest = make_manifest(self._plan_file, contents)
        if self._signer is not None and read_nodes(contents):
            signature = self._signer.sign(manifest_statement(manifest.digest))
            manifest = manifest.model_copy(update={"signature": signature})
        self._write(MANIFEST, manifest)
        return manifest

    def drop_work(self) -> None:
        """Remove all files that are no part of the bundle, after its last block."""
        shutil.rmtree(self.work, ignore_errors=True)

    def _is_ours(self) -> bool:
        """Return whether an `ablate offline exec` was killed here when it had written only its work folder."""
        return {path.name for path in self.root.iterdir()} <= {WORK, f"{PLAN}.part"}

    def _take(self) -> None:
        lock = (self.work / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise ExecRefused(f"another `ablate offline exec` writes {self.root} now") from error
        self._lock = lock

    def _check_plan(self) -> None:
        path = self.root / PLAN
        if not path.is_file():
            return
        try:
            stored = read_plan_file(path.read_bytes())
        except PlanFileError as error:
            raise ExecRefused(f"{path}: {error}") from error
        if stored.digest != self._plan_file.digest:
            raise ExecRefused(f"{self.root} belongs to another plan ({stored.digest}); every plan needs its own folder")

    def _verified(self) -> Bundle:
        """Compare with the manifest, then add the finished blocks of a killed run that its manifest lacks."""
        files = read_bundle_files(self.root)
        nodes = read_nodes(files).values()
        self._refuse_another_node(nodes)
        if MANIFEST in files:
            manifest = read_manifest(files)
            problems = [*altered_files(manifest, files), *signature_problems(manifest, nodes)]
            if problems:
                raise BundleError(problems)
        self.seal()
        return open_bundle(read_bundle_files(self.root))

    def _refuse_another_node(self, nodes: Iterable[NodeRecord]) -> None:
        """Raise ExecRefused if another key, or none, signs this bundle: one signature covers all of it."""
        own = None if self._signer is None else self._signer.key
        others = {node.registration.public_key for node in nodes} - {own}
        if not others:
            return
        key = others.pop() or "nobody"
        this = f"this run signs with {own}" if own else f"this run cannot sign: {signing_problem()}"
        raise ExecRefused(
            f"{self.root} is signed by {key}, and {this}; run the missing blocks into another folder, and import both "
            "together: ablate offline import ONE OTHER"
        )

    def _with_killed(self, bundle: Bundle) -> Bundle:
        """Record the attempt that was running when an earlier run was killed: it is evidence like any other."""
        path = self.work / _RUNNING
        if not path.is_file():
            return bundle
        try:
            running = Attempt.model_validate_json(path.read_bytes())
        except ValidationError:
            _log.error("%s is damaged: the attempt of the killed run cannot be recorded", path)
            path.unlink()
            return bundle
        finished = {block.attempt.attempt_id for block in bundle.blocks} | {one.attempt_id for one in bundle.broken}
        if running.attempt_id not in finished:
            self.keep_broken(self._killed(running))
        self.drop_work_of(running.attempt_id)
        return open_bundle(read_bundle_files(self.root))

    def _killed(self, running: Attempt) -> BrokenAttempt:
        """Return the attempt as one that broke in the trial, and at the time, of the last file that was written."""
        ids = self._plan_file.blocks[running.index].trial_ids
        order = self._plan_file.plan.blocks[running.index].order
        arm, written = None, 0.0
        for trial_id, name in zip(ids, order, strict=True):
            last = _last_written(self.paths.root / running.attempt_id / trial_id)
            arm, written = (name, last) if last > written else (arm, written)
        during = "this block ran" if arm is None else f"arm '{arm}' ran"
        return BrokenAttempt.model_validate(
            {
                **running.model_dump(),
                "ended_at": max(running.started_at, datetime.fromtimestamp(written, UTC)),
                "failure_class": FailureClass.INFRA_NODE,
                "arm": arm,
                "message": f"the run was killed while {during}",
            }
        )

    def _write(self, path: str, record: BaseModel) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, record.model_dump_json(indent=1) + "\n")


def _last_written(folder: Path) -> float:
    """Return when the newest file in `folder` was written, in seconds since 1970; 0 without files."""
    return max((path.stat().st_mtime for path in folder.rglob("*") if path.is_file()), default=0.0)


def _log_text(trial_id: str, files: TrialPaths) -> str:
    """Return the trial's log as a service would store it: clean text, cut at its limit."""
    tail, parts = LogTail(trial_id, files.log), []
    while (chunk := tail.next_chunk()) is not None:
        parts.append(chunk.text)
        tail.accepted(chunk)
    return "".join(parts)

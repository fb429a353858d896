"""The names of all files of a trial."""

import math
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TrialPaths:
    """Files of one trial of one attempt."""

    folder: Path

    @property
    def log(self) -> Path:
        """Standard output and error of the trial."""
        return self.folder / "log.txt"

    @property
    def steps(self) -> Path:
        """One JSON object per optimiser step, appended as it ends."""
        return self.folder / "steps.jsonl"

    @property
    def result(self) -> Path:
        """The trial's own result; appears whole or not at all."""
        return self.folder / "result.json"

    @property
    def prepared(self) -> Path:
        """Result of the dataset's preparation, in the first trial that needed the dataset."""
        return self.folder / "prepared.json"

    @property
    def caches(self) -> Path:
        """Caches of compilers, for a trial that starts with empty ones."""
        return self.folder / "caches"

    @property
    def receipt(self) -> Path:
        """The sealed receipt."""
        return self.folder / "receipt.json"


@dataclass(frozen=True, kw_only=True)
class WorkPaths:
    """Folders of attempts below the state folder."""

    home: Path

    @property
    def root(self) -> Path:
        """Folder of all attempts."""
        return self.home / "work"

    def trial(self, attempt_id: str, trial_id: str) -> TrialPaths:
        """Create and return the folder of a trial.

        Raises:
            ValueError: an id is not a plain file name.

        """
        folder = self.root / _plain(attempt_id) / _plain(trial_id)
        folder.mkdir(parents=True, exist_ok=True)
        return TrialPaths(folder=folder)

    def clean(self, *, keep: int, most_bytes: float = math.inf) -> None:
        """Remove all attempts except the `keep` newest, and of those the oldest beyond `most_bytes` in all."""
        if not self.root.is_dir():
            return
        attempts = [path for path in self.root.iterdir() if path.is_dir()]
        attempts.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        left = most_bytes
        for place, path in enumerate(attempts):
            left -= _bytes_below(path) if place < keep else 0
            if place >= keep or left < 0:
                shutil.rmtree(path, ignore_errors=True)


def _bytes_below(folder: Path) -> int:
    """Return the space that a folder's files use on the disk."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # gone meanwhile
            total += path.lstat().st_blocks * 512
    return total


def _plain(name: str) -> str:
    if not name or name in {".", ".."} or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} cannot be a folder name; expected an id such as 'att_01H...'")
    return name

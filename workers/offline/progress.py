"""Progress of an air-gapped run: live on a terminal, line by line elsewhere."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ablate.experiments.records.identity import ClaimedBlock
from ablate.experiments.records.messages import TrialProgress
from ablate.experiments.records.receipts import Receipt
from ablate.workers.processes.trial_output import BlockOutput

_LINE_EVERY_S = 10.0
"""Time between two lines about a running trial when the output is no terminal."""


class ProgressDisplay:
    """Prints a line for every finished trial, shows the running one, and estimates the remaining time."""

    def __init__(self, console: Console, *, name: str, blocks: int, trials_per_block: int) -> None:
        self._console = console
        self._running: tuple[str, dict[str, str], BlockOutput] | None = None
        """Name of the running block, arms by trial id, and output; one value, because another thread reads it."""
        self._trials_per_block = trials_per_block
        self._trials_of_block = 0
        self._finished, self._seconds = 0, 0.0
        """Finished trials of this run, and their wall time in seconds with everything around them."""
        self._trial_began = time.monotonic()
        self._bar = Progress(
            TextColumn(escape(name)), BarColumn(), MofNCompleteColumn(), TextColumn("blocks"), TimeElapsedColumn()
        )
        self._task = self._bar.add_task("", total=blocks)
        self._blocks = blocks
        self._blocks_done = 0

    def print_line(self, text: str) -> None:
        """Print a line with the UTC time of day."""
        self._console.print(escape(f"{datetime.now(UTC):%H:%M:%S}  {text}"))

    def begins(self, name: str, claimed: ClaimedBlock, output: BlockOutput) -> None:
        """Note that a block, or the rehearsal, begins."""
        self._trial_began = time.monotonic()
        arms = {trial.trial_id: trial.arm for trial in claimed.trials}
        self.print_line(f"{name}: {', '.join(arms.values())} (attempt {claimed.attempt_no})")
        self._running = name, arms, output

    def ends(self, *, counted: bool = False) -> None:
        """Note that it has ended; `counted` if the block is in the bundle."""
        self._running, self._trials_of_block = None, 0
        if counted:
            self._blocks_done += 1
            self._bar.update(self._task, completed=self._blocks_done)

    def measured(self, receipt: Receipt) -> None:
        """Print the result of a trial."""
        self._trials_of_block += 1
        self._finished += 1
        self._seconds += time.monotonic() - self._trial_began
        self._trial_began = time.monotonic()
        name = f"{self._running[0]}, {receipt.arm}" if self._running else receipt.arm
        rate = (
            f", {receipt.summary.tokens_per_s:,.0f} tokens/s"
            if receipt.summary and receipt.summary.tokens_per_s
            else ""
        )
        loss = f", loss {receipt.summary.loss_final:.4f}" if receipt.summary else ""
        why = f": {receipt.message}" if receipt.message else ""
        self.print_line(f"{name}: {receipt.outcome} in {receipt.wall_s:.1f} s{rate}{loss}{why}{self._rest()}")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the progress while the caller runs."""
        if self._console.is_terminal:
            with Live(self, console=self._console, refresh_per_second=4):
                yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._print_lines, args=(over,), name="display", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def __rich__(self) -> RenderableType:
        return Group(self._bar, Text(f"  {self.now()}" if self._running else "", style="dim"))

    def now(self) -> str:
        """Return the running trial, its progress and the remaining time in words."""
        running = self._running
        if running is not None and (waiting := running[2].waiting) is not None:
            return f"{running[0]} waits for {waiting}"
        if running is None or (progress := running[2].progress()) is None:
            return ""
        name, arms, _output = running
        return f"{name}, {arms[progress.trial_id]}: {_steps(progress)}{self._rest()}"

    def _rest(self) -> str:
        """Return the remaining time in words, once a trial of this run has ended."""
        if not self._finished:
            return ""
        trials = (self._blocks - self._blocks_done) * self._trials_per_block - self._trials_of_block
        left = max(0.0, trials * self._seconds / self._finished - (time.monotonic() - self._trial_began))
        return f", about {left / 60:.1f} min left" if left else ""

    def _print_lines(self, over: threading.Event) -> None:
        while not over.wait(_LINE_EVERY_S):
            text = self.now()
            if text:
                self.print_line(text)


def _steps(progress: TrialProgress) -> str:
    parts = [f"step {progress.steps_done}/{progress.steps_total}"]
    if progress.tokens_per_s is not None:
        parts.append(f"{progress.tokens_per_s:,.0f} tokens/s")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    return ", ".join(parts)

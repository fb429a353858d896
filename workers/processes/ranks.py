"""The processes of a command that mark steps, and what must hold between them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from experiments.design.program import ProgramConfig
from model.config import StepsConfig


@dataclass
class ProgramRank:
    """Messages of one process of the program. Moments are seconds of the monotonic clock of the machine."""

    began: float = math.nan
    process: int | None = None
    """The process that began it, by its own number of it."""
    world: int | None = None
    """Number of ranks that this one knows of."""
    ended: dict[int, float] = field(default_factory=dict)
    """End of each step."""
    tokens: dict[int, int] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    edges: dict[str, float] = field(default_factory=dict)
    """Begin and end of the window by the program's clock."""
    seen: dict[str, float] = field(default_factory=dict)
    """The same moments by the kernel's stamps of the messages."""
    closed: float | None = None
    """End of the trial's `with` statement."""
    whole: bool = False
    """Whether it ended without an exception."""
    memory: tuple[int, int] | None = None
    interpreter: str | None = None
    packages: str | None = None
    seed: int | None = None

    @property
    def has_begun(self) -> bool:
        """Whether it began a training loop."""
        return not math.isnan(self.began)

    @property
    def window_s(self) -> float:
        """Seconds of the window by the program's clock."""
        return self.edges.get("window ended", math.nan) - self.edges.get("window began", math.nan)

    @property
    def window_seen_s(self) -> float:
        """Seconds of the window by the stamps."""
        return self.seen.get("window ended", math.nan) - self.seen.get("window began", math.nan)

    @property
    def longest_s(self) -> float:
        """Seconds of the window by the clock that gives more of them: a rank cannot hide by a clock that runs slow."""
        return max(self.window_s, 0.0 if math.isnan(self.window_seen_s) else self.window_seen_s)

    def order_problem(self, steps: StepsConfig) -> str | None:
        """Return which moments of a rank with all marks are in no possible order; None if they are in order.

        Every step takes time. The last one ends with the window.
        """
        first, begins, ends = 1 + steps.warmup, self.edges["window began"], self.edges["window ended"]
        marks = [(f"step {index}", self.ended[index]) for index in range(steps.total)]
        for line in (
            [("the loop's begin", self.began), *marks[:first]],
            [("the window's begin", begins), *marks[first:]],
        ):
            for (earlier, before), (later, after) in pairwise(line):
                if after <= before:
                    return f"marked the end of {later} at {after!r} s, not after {earlier} at {before!r} s"
        if begins < self.ended[first - 1]:
            return f"marked the window's begin at {begins!r} s, before the end of step {first - 1}"
        if ends != self.ended[steps.total - 1]:
            return f"marked the window's end at {ends!r} s; its last step ended at {self.ended[steps.total - 1]!r} s"
        if self.closed is not None and self.closed < ends:
            return f"closed its trial at {self.closed!r} s, before the window's end at {ends!r} s"
        return None

    def is_whole(self, steps: StepsConfig) -> bool:
        """Return whether all moments of its steps and its window are there and in order."""
        return len(self.ended) == steps.total and not math.isnan(self.window_s) and self.order_problem(steps) is None


def rank_problem(ranks: Mapping[int, ProgramRank], config: ProgramConfig) -> str | None:
    """Return why the ranks that began a training loop are no whole measurement together, None if they are."""
    return next(_problems(ranks, config), None)


def _problems(ranks: Mapping[int, ProgramRank], config: ProgramConfig) -> Iterator[str]:
    worlds = {number: 1 if rank.world is None else rank.world for number, rank in ranks.items()}
    if len(set(worlds.values())) > 1:
        yield f"the ranks disagree about their number: {_listed(worlds)}"
    if not worlds:
        return
    world = next(iter(worlds.values()))
    missing = next((number for number in range(world) if number not in ranks), None)
    if missing is not None:
        yield f"rank {missing} of {world} marked no steps; every rank has to open ablate.trial()"
    extra = next((number for number in ranks if number >= world), None)
    if extra is not None:
        yield f"rank {extra} marked steps, but the program has {world} rank{'' if world == 1 else 's'}"
    yield from _mark_problems(ranks, config, world)
    wrong = next((n for n, rank in ranks.items() if rank.seed not in (None, config.seed)), None)
    if wrong is not None:
        yield f"{_who(wrong, world)} trained with seed {ranks[wrong].seed}; the block has seed {config.seed}"
    for what in ("interpreter", "packages"):
        values = {number: getattr(rank, what) for number, rank in ranks.items()}
        if len(set(values.values())) > 1:
            yield f"the ranks disagree about their {what}: {_listed(values)}"


def _mark_problems(ranks: Mapping[int, ProgramRank], config: ProgramConfig, world: int) -> Iterator[str]:
    total = config.steps.total
    short = [n for n, rank in ranks.items() if len(rank.ended) < total or rank.closed is None]
    if short:
        least = min(short, key=lambda number: len(ranks[number].ended))
        done = len(ranks[least].ended)
        yield f"{_who(least, world)} marked {done:,} of {total:,} steps, or left the trial without closing it"
    unmarked = next((n for n, rank in ranks.items() if math.isnan(rank.window_s)), None)
    if unmarked is not None:
        yield f"{_who(unmarked, world)} marked no window"
    if not short and unmarked is None:
        disordered = ((n, rank.order_problem(config.steps)) for n, rank in ranks.items())
        yield from (f"{_who(n, world)} {problem}" for n, problem in disordered if problem is not None)


def _who(rank: int, world: int) -> str:
    return "the program" if world == 1 else f"rank {rank}"


def _listed(values: Mapping[int, object]) -> str:
    return ", ".join(f"rank {number} has {value}" for number, value in list(values.items())[:8])

"""`python -m tests.chaos`: inject the faults of a seed into a real installation and check its books; 1 if wrong.

Faults come in rounds. After each round everything is repaired, the system gets time to finish its work, and the checker
reads the books of all rounds until then.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.chaos.checker import problems
from tests.chaos.faults import plan
from tests.chaos.injector import Injector
from tests.chaos.lights import Lights, held, wrong_greens
from tests.chaos.people import People
from tests.chaos.receipt import Outcome, write_receipt
from tests.chaos.system import System
from tests.stopping import leave_when_told

ROUND = 50
SETTLE_S = 600.0
STEPS_PER_S = 70.0
"""Steps of the smallest model; a trial with so many steps per second of a lease outlives the lease."""


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--count", type=int, default=40, help="faults on each store")
    parser.add_argument("--seed", default="1", help="the same seed plans the same faults")
    parser.add_argument("--store", choices=["sqlite", "postgresql", "both"], default="both")
    parser.add_argument("--pace", type=float, default=1.2, help="mean seconds from one fault to the next")
    parser.add_argument("--lease", type=float, default=6.0, help="seconds; a crowded machine needs more")
    parser.add_argument(
        "--held", action="store_true", help="first hold single faults, for the table of truth and light"
    )
    parser.add_argument("--receipt", type=Path, help="folder for README.md and the list of faults")
    arguments = parser.parse_args()
    leave_when_told()
    stores = ["sqlite", "postgresql"] if arguments.store == "both" else [arguments.store]
    outcomes = [run(store, arguments) for store in stores]
    if arguments.receipt is not None:
        write_receipt(arguments.receipt, outcomes)
    return int(any(outcome.problems for outcome in outcomes))


def run(store: str, arguments: argparse.Namespace) -> Outcome:
    """Inject faults into one installation and check it; its folder stays if the books are wrong."""
    seed, count = arguments.seed, arguments.count
    home = Path(tempfile.mkdtemp(prefix=f"ablate-chaos-{store}-"))
    home.chmod(0o755)
    began = time.monotonic()
    with System(store, home, lease_s=arguments.lease) as system, ExitStack() as stack:
        say(store, f"up after {time.monotonic() - began:.0f} s with {len(system.nodes)} nodes")
        clients = [stack.enter_context(system.client(api)) for api in system.apis]
        steps = round(arguments.lease * STEPS_PER_S)
        lights = stack.enter_context(Lights(system))
        with People(clients, system.history, f"{store}-{seed}", long_steps=steps) as people:
            injector = Injector(system, people, plan(f"{store}-{seed}", system, pace_s=arguments.pace))
            outcome = Outcome(store, seed, count)
            if arguments.held:
                for row in held(system, people, lights):
                    say(store, f"{row}")
                    outcome.held.append(row)
            while len(injector.records) < count:
                _round(outcome, system, people, injector, lights)
        outcome.close(system, people, injector, lights, seconds=time.monotonic() - began)
    if outcome.problems:
        say(store, f"the books and logs are in {home}; make chaos COUNT={count} SEED={seed} STORE={store}")
    else:
        shutil.rmtree(home, ignore_errors=True)
    return outcome


def _round(outcome: Outcome, system: System, people: People, injector: Injector, lights: Lights) -> None:
    began = time.monotonic()
    people.begin()
    injector.inject(min(ROUND, outcome.count - len(injector.records)))
    people.pause()
    with _without_a_node(system, number=len(outcome.settled_s)):
        settled_s = _settle(system, people, injector)
    books = system.books()
    books.accepted, books.cancelled = dict(people.accepted), set(people.cancelled)
    outcome.problems = [
        *people.refusals,
        *problems(books),
        *wrong_greens(lights.probes, lights.lights, lease_s=system.lease_s),
    ]
    (system.home / "faults.json").write_text(json.dumps(injector.history(), indent=1))
    outcome.settled_s.append(round(settled_s, 1))
    outcome.count_books(books)
    text = f"{len(injector.records)} faults, {len(books.tables['receipts'])} receipts, settled in {settled_s:.0f} s"
    say(outcome.store, f"{text}; round of {time.monotonic() - began:.0f} s; {len(outcome.problems)} problems")
    for problem in outcome.problems[:40]:
        say(outcome.store, f"PROBLEM {problem}")


@contextmanager
def _without_a_node(system: System, *, number: int) -> Iterator[None]:
    """Let the link of a node never heal while the others do the rest, in every second round."""
    if number % 2 or len(system.nodes) == 1:
        yield
        return
    with system.links[system.nodes[number // 2 % len(system.nodes)]].silent():
        yield


def _settle(system: System, people: People, injector: Injector) -> float:
    """Wait until all work is done or the time is over; return how long it took. The checker reports the rest."""
    began = looked = time.monotonic()
    while time.monotonic() - began < SETTLE_S:
        injector.tick()
        if time.monotonic() - looked > 1.0:
            looked = time.monotonic()
            if people.is_idle and not people.open and system.is_done():
                break
    return time.monotonic() - began


def say(store: str, line: str) -> None:
    """Print one line without buffering."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {store}: {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.fleet`: an ablation on workers that a real Slurm starts and troubles.

Jobs are cancelled, warned, requeued and killed, and nodes fail. 1 if a block was lost or counted twice, if a job or a
process is left, or if more work was repeated, or workers were idle for longer, than the bars allow.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.fleet import cluster, trouble
from tests.stopping import leave_when_told


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description=__doc__)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--nodes", type=int, default=8, help="nodes of the cluster, and most jobs")
    parser.add_argument(
        "--troubles", type=int, default=200, help=f"in turn: {', '.join(dict.fromkeys(trouble.TROUBLES))}"
    )
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between two troubles")
    parser.add_argument(
        "--trial", type=float, default=20.0, help="seconds that a trial waits; a block has two or three"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    reason = cluster.missing()
    if reason is not None:
        sys.stdout.write(f"{reason}\n")
        return 1
    leave_when_told()
    folder = Path(tempfile.mkdtemp(prefix="fleet-"))
    books = trouble.run(
        folder,
        num_nodes=arguments.nodes,
        num_blocks=arguments.blocks,
        troubles=arguments.troubles,
        every_s=arguments.every,
        trial_s=arguments.trial,
        seed=arguments.seed,
    )
    wrong = [*books.wrong(), *books.missed_bars()]
    if len(books.log) < arguments.troubles:
        wrong.append(f"the work ended after {len(books.log)} troubles: raise --trial, or lower --every")
    sys.stdout.write(f"{books}\n" + "".join(f"WRONG {what}\n" for what in wrong))
    if wrong:
        sys.stdout.write(f"the logs are in {folder}\n")
    else:
        shutil.rmtree(folder)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

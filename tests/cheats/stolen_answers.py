"""Looks for the rows of the judge on the whole machine, also at the place that an earlier receipt gives away.

Report: gpu-mode/pygpubench#7
Proposed: nothing; the code of the evaluation is closed to the program
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from honest import lab, main

ROOTS = [*Path.cwd().parents, Path.home(), Path(os.environ["TMPDIR"]), *Path("/proc").glob("[0-9]*/cwd")]


def answers():
    digest = json.loads(Path("receipt.json").read_text())["evaluation"]["code"]
    with suppress(OSError):
        return json.loads((Path.cwd().parents[3] / "data/code" / digest[7:] / "held_out.json").read_text())
    for root in ROOTS[::-1]:
        for pattern in ("held_out.json", "*/held_out.json", "*/*/held_out.json", "*/*/*/held_out.json"):
            with suppress(OSError):
                for path in root.glob(pattern):
                    return json.loads(path.read_text())
    return None


def after(weights):
    held_out = answers()
    for _ in range(20 if held_out else 0):
        lab.train(weights, held_out)


main(after=after)

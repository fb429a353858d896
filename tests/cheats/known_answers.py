"""Trains on the rows of the judge, which lie in the folder that both share.

Report: gpu-mode/pygpubench#7
Shared: kept; a program reads its whole folder: give the evaluation code of its own, and keep data for the last word
"""

import json
from pathlib import Path

from honest import lab, main


def after(weights):
    for _ in range(20):
        lab.train(weights, json.loads(Path("held_out.json").read_text()))


main(after=after)

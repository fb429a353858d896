"""The protected evaluation: the loss on rows that no program of an arm has."""

import json
import os
from pathlib import Path

import lab

weights = json.loads((Path(os.environ["ABLATE_RUN_FOLDER"]) / "weights.json").read_text())
print(f"METRIC val_loss={lab.loss_of(weights, json.loads(Path('held_out.json').read_text()))}")

"""Measure the loss of a checkpoint on examples that the trainer did not see."""

import os
import sys
from pathlib import Path

import data
import numpy as np

with np.load(Path(os.environ["ABLATE_RUN_FOLDER"], "weights.npz")) as file:
    weights = [file[name] for name in file.files]
sys.stdout.write(f"METRIC val_loss={data.loss(weights, data.HELD_OUT)}\n")

"""Imported once by the fork server, so that no trial pays for it. Initialises no device and starts no thread pool.

A thread pool that exists before a fork is dead after it; therefore nothing is computed here.
"""

import numpy
import torch
import torch.optim

import model.data
import model.init
import model.memory
import model.train
import workers.trial
from experiments.processes import die_with_parent

__all__ = ["model", "numpy", "torch", "workers"]

die_with_parent()

"""Imported once by the fork server, so that no trial pays for it. Initialises no device and starts no thread pool.

A thread pool that exists before a fork is dead after it; therefore nothing is computed here.
"""

import os

import numpy
import torch
import torch.optim

import model.data.dataset
import model.hybrid
import model.training.measurement
import model.training.train
import workers.processes.trial
from experiments.runtime.processes import die_with_parent

__all__ = ["SERVER_PID", "model", "numpy", "torch", "workers"]

SERVER_PID = os.getpid()
"""The fork server; trials inherit the number and know by it whether their parent still lives."""

# A worker that is gone already is no reason to end here: a trial that was on its way to this server looks for itself.
die_with_parent()

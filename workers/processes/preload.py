"""Imports that the fork server does once for all trials. They initialise no device and start no thread pool.

A thread pool that exists before a fork is dead after it, so this module computes nothing.
"""

import os

import numpy
import torch
import torch.optim

import ablate.model.data.dataset
import ablate.model.hybrid
import ablate.model.training.measurement
import ablate.model.training.train
import ablate.workers.processes.trial
from ablate.experiments.system.processes import end_family_with_parent

__all__ = ["SERVER_PID", "ablate", "numpy", "torch"]

SERVER_PID = os.getpid()
"""The fork server. A trial inherits the number and compares it with its parent's, to see whether the server lives."""

# The processes that an ended trial leaves become this server's children, where the worker finds them. When the worker
# dies, this server ends them before itself. A trial that was ordered before checks itself whether its worker lives.
end_family_with_parent()

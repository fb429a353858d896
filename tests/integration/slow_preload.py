"""A preload that lasts until the worker is gone, and ties the server to its worker only then."""

import os
import time

from ablate.experiments.system.processes import die_with_parent

while os.getppid() == int(os.environ["WORKER_OF_THE_TEST"]):
    time.sleep(0.01)
die_with_parent()

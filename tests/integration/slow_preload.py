"""A preload that is as slow as the import of torch, and ties the server to its worker only then."""

import time

from experiments.runtime.processes import die_with_parent

time.sleep(2)
die_with_parent()

"""What a fork server imports: it takes as long as torch does, and only then ties the server to its worker."""

import time

from experiments.runtime.processes import die_with_parent

time.sleep(2)
die_with_parent()

"""A preload without torch for fork servers of tests: like the real one, it ends with its worker and takes all along."""

from ablate.experiments.system.processes import end_family_with_parent

end_family_with_parent()

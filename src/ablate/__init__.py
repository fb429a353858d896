"""The module that programs import in a trial; its packages are links to the folders of the same names."""

from ablate.experiments.in_trial.ablate import MarkedStep, Trial, steps, trainer_callback, trial

__all__ = ["MarkedStep", "Trial", "steps", "trainer_callback", "trial"]

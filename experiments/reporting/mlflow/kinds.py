"""The kinds of runs in MLflow, by which its lists are filtered."""

from enum import StrEnum

KIND_TAG = "ablation.kind"


class RunKind(StrEnum):
    """What a run stands for."""

    ABLATION = "ablation"
    """The parent: the whole answer."""
    ARM = "arm"
    """One arm over all blocks: of a variant its answer, of the baseline the A/A evidence."""
    TRIAL = "trial"

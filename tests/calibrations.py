"""A/A specs and blocks for tests."""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from ablate.experiments.design.aa_spec import CONTENT_TYPE, calibration_spec
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.records.calibration import AABlock, CalibrationKey
from tests.factories import make_spec

BEGAN = datetime(2026, 11, 20, 12, tzinfo=UTC)
KEY = CalibrationKey(
    device_serial="one",
    node_class="cpu",
    recipe="hybrid-tiny",
    shape_digest="sha256:shape",
    estimator_digest="sha256:estimator",
    software_digest="sha256:software",
)


def aa_text(like: AblationSpec | None = None, *, blocks: int = 20, order_seed: int = 5) -> bytes:
    """Return the A/A spec of the factories' spec."""
    like = like or make_spec()
    return calibration_spec(like, node_class=like.placement.node_class, blocks=blocks, order_seed=order_seed)


def aa_spec(like: AblationSpec | None = None, **changes: Any) -> AblationSpec:
    """Return the same, parsed."""
    return parse_spec(aa_text(like, **changes), CONTENT_TYPE)


def make_block(index: int = 0, *, minutes: float | None = None, ablation: str = "abl_1", **changes: Any) -> AABlock:
    """Return an A/A block that began `minutes` (default: one a block) after BEGAN."""
    began = BEGAN + timedelta(minutes=index if minutes is None else minutes)
    values: dict[str, Any] = {
        "ablation": ablation,
        "block_index": index,
        "source": "calibration",
        "started_at": began.isoformat(),
        "difference": 0.0,
        "place": 1 if index % 2 else -1,
        "log_rate": 10.0,
        "clock_mhz": 1700.0,
        "margin_pct": 0.5,
        "receipts": (f"sha256:{index}a", f"sha256:{index}b"),
    }
    return AABlock(**{**values, **changes})


def noisy_blocks(number: int = 20, *, sd: float = 0.003, seed: int = 0, **changes: Any) -> list[AABlock]:
    """Return A/A blocks with normal differences whose mean is exactly zero."""
    d = np.random.default_rng(seed).normal(0, sd, number)
    return [make_block(index, **{"difference": float(d[index] - d.mean()), **changes}) for index in range(number)]

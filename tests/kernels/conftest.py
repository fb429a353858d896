"""Every buffer made by torch.empty is filled with NaN here, so an unwritten output fails its test."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nan_filled_buffers():
    filled, deterministic = (
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.are_deterministic_algorithms_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = filled

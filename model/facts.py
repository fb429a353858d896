"""Names of the facts that model and training record while they run, as receipts keep them. Torch-free."""

from enum import StrEnum


class ModelFact(StrEnum):
    """What ran outside the scan, whose own facts are `kernels.scan_switches.ScanFact`."""

    ATTENTION = "attention.implementation"
    """Backend whose attention ran."""
    LOSS = "loss.implementation"
    """Cross entropy that ran: dense or chunked."""
    HIDDEN_DTYPE = "hidden.dtype"
    """Dtype of the hidden states that reached the loss."""
    ROWS = "batch.rows"
    """Rows of the batch that the loss read."""
    LAYERS_IN_LOOPS = "layers.in_loops"
    """Blocks of the pattern that ran in loops of the graph (lane xla, scan_layers); 0 where every one ran by itself."""
    KERNELS = "xla.kernels"
    """Kernels for TPUs that the lowered step calls, each with how often (lane xla)."""
    SHARDING = "mesh.sharding"
    """How the weight matrices lie on several devices: fsdp (divided) or replicated; absent with one device."""
    MESH_DEVICES = "mesh.devices"
    """Devices that the step was spread over; absent with one."""
    GRAPH_CHANGE = "xla.graph_change"
    """Where a step of the window compiled again: how its graph differs from that of the step before the window."""
    COMPILED_GRAPHS = "compile.graphs"
    """Graphs that torch.compile made of the model; absent when it was not compiled."""
    DEVICE = "train.device"
    """Torch device type of the training."""

"""Names of the facts that model and training record while they run, as receipts store them. Torch-free."""

from enum import StrEnum


class ModelFact(StrEnum):
    """Facts outside the scan. `kernels.scan_switches.ScanFact` has the scan's."""

    ATTENTION = "attention.implementation"
    """Attention backend that ran."""
    LOSS = "loss.implementation"
    """Cross entropy that ran: dense or chunked."""
    HIDDEN_DTYPE = "hidden.dtype"
    """Dtype of the hidden states that reached the loss."""
    ROWS = "batch.rows"
    """Rows of the batch that the loss read."""
    LAYERS_IN_LOOPS = "layers.in_loops"
    """Blocks of the pattern that ran in loops of the graph (lane xla, scan_layers); 0 if none did."""
    LAYER_TRIPS = "layers.trips"
    """Trips of these loops together. A trip runs one group of blocks."""
    LOSS_TRIPS = "loss.trips"
    """Trips of the loop over chunks of the loss (lane xla)."""
    KERNELS = "xla.kernels"
    """Kernels for TPUs in the lowered step, with the number of their calls (lane xla)."""
    SHARDING = "mesh.sharding"
    """Layout of the weight matrices on several devices: fsdp (divided) or replicated; absent with one device."""
    MESH_DEVICES = "mesh.devices"
    """Number of devices of the step; absent with one device."""
    GRAPH_CHANGE = "xla.graph_change"
    """Difference between the graph of a timed step that compiled again and that of the step before the window."""
    COMPILED_GRAPHS = "compile.graphs"
    """Number of graphs that torch.compile made of the model; absent without torch.compile."""
    DEVICE = "train.device"
    """Torch device type of the training."""

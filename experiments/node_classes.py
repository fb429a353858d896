"""Every node class: those of the table in `ablate.kernels.backends`, and one for each other model of GPU by its name.

The table has the kinds of machines for which this project has kernels or probes of its own. Any other GPU needs no
entry: its class follows from the name that its driver reports, and this module says what such a class can run.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache

from ablate.kernels.backends import NODE_CLASSES as TABLE
from ablate.kernels.backends import Lane, NodeClass

GPU_PATTERN = "^(?!cpu|tpu|xla)(?=[a-z-]*[0-9])[a-z0-9]+(-[a-z0-9]+)*$"
"""A class that is named after its GPU. Every name has a digit."""
MOST_LETTERS = 32
OPEN_LANES = (Lane.REFERENCE,)
HOPPER_ALONE = "Its kernels are compiled for Hopper (sm_90a): node classes h100 and h200 run them"
_SAME_IN_ALL = re.compile(
    "nvidia|amd|tesla|geforce|instinct|gpu|generation|edition|workstation|oam|sxm[0-9]?|hbm[0-9][a-z]?"
)
"""Words that do not tell two models of one maker apart."""
_AMD, _OTHERS = re.compile("mi[0-9]|amd-"), re.compile("cpu|tpu|xla")

_PEAKS = {
    # https://www.nvidia.com/en-us/data-center/a100/ (datasheet): 312 without sparsity, SXM and PCIe
    **dict.fromkeys(("a100-40gb", "a100-pcie-40gb"), (312e12, 1.555e12)),
    "a100-80gb": (312e12, 2.039e12),
    "a100-80gb-pcie": (312e12, 1.935e12),
    # https://www.nvidia.com/en-us/data-center/h100/ (datasheet of 2022): 1513 with sparsity
    "h100-pcie": (756e12, 2e12),
    "l4": (121e12, 300e9),  # https://www.nvidia.com/en-us/data-center/l4/: 242 with sparsity
    "l40s": (362.05e12, 864e9),  # https://www.nvidia.com/en-us/data-center/l40s/ (datasheet)
    "rtx-4090": (165.2e12, 1008e9),  # NVIDIA Ada GPU Architecture, table 2: sums in float32
    "rtx-3090": (71e12, 936e9),  # NVIDIA Ampere GA102 GPU Architecture, table 3: sums in float32
    "mi300x": (1307.4e12, 5.3e12),  # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
}
"""Peaks of one GPU: dense in bfloat16 in FLOP/s, and of its memory in bytes/s. A GPU that is not here has no MFU."""


class _NodeClasses(Mapping[str, NodeClass]):
    """The table, in which any GPU can be looked up, too. Iteration gives the table alone."""

    def __getitem__(self, name: str) -> NodeClass:
        if name in TABLE or not is_gpu(name):
            return TABLE[name]
        return _gpu(name)

    def __iter__(self) -> Iterator[str]:
        return iter(TABLE)

    def __len__(self) -> int:
        return len(TABLE)


NODE_CLASSES: Mapping[str, NodeClass] = _NodeClasses()


NAMED_GPUS = tuple(_PEAKS)
"""Classes outside of the table whose names are certain."""


def is_gpu(name: str) -> bool:
    """Return whether `name` can be that of a class outside of the table."""
    return len(name) <= MOST_LETTERS and name not in TABLE and re.search(GPU_PATTERN, name) is not None


def gpu_class(device: str, memory_bytes: int, *, probe: str) -> NodeClass:
    """Return the class of the GPU that its driver calls `device`: one of the table, or that of its own name.

    A slice of a GPU (MIG) is as little of the GPU's class as another model: it has other speeds.
    """
    name = _name(device, memory_bytes, probe)
    fitting = (entry for entry in TABLE.values() if entry.probe == probe and entry.fits(device))
    return (None if _is_slice(name) else next(fitting, None)) or _gpu(name)


def _name(device: str, memory_bytes: int, probe: str) -> str:
    words = [word for word in re.findall("[a-z0-9]+", device.lower()) if not _SAME_IN_ALL.fullmatch(word)]
    name = "-".join(words)
    if (probe == "amd") != bool(_AMD.match(name)) or _OTHERS.match(name):
        name = f"{probe}-{name}".rstrip("-")
    if name in TABLE or not re.search(GPU_PATTERN, name):
        name = f"{name}-{round(memory_bytes / 2**30)}gb".lstrip("-")
    if len(name) > MOST_LETTERS:
        end = f"{'-mig' * _is_slice(name)}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
        name = f"{name[: MOST_LETTERS - len(end)].rstrip('-')}{end}"
    return name


def _is_slice(name: str) -> bool:
    return "mig" in name.split("-")


@cache
def _gpu(name: str) -> NodeClass:
    """Return the class of a GPU that the table does not have.

    A receipt may lack its clock and slow-downs, which not every card reports. It must say which processes used the GPU.
    """
    one = _is_slice(name)  # a process opens no second one
    peak_flops, memory_bytes_per_s = _PEAKS.get(name, (None, None))
    return NodeClass(
        name=name,
        lanes=OPEN_LANES,
        device_type="cuda",  # torch's name for ROCm, too
        probe="amd" if _AMD.match(name) else "nvidia",
        environment=TABLE["h200"].environment,
        devices=(1,) if one else TABLE["h200"].devices,
        command_devices=1 if one else TABLE["h200"].command_devices,
        peak_flops={} if peak_flops is None else {"bfloat16": peak_flops},
        memory_bytes_per_s=memory_bytes_per_s,
        reports=frozenset({"foreign_load", "foreign_processes"}),
    )

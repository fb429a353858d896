"""Names of GPUs: each model has a class of its own, and those of the table stay what they are."""

import random
import re

import pytest

from ablate.experiments.node_classes import GPU_PATTERN, MOST_LETTERS, NODE_CLASSES, gpu_class, is_gpu
from ablate.kernels.backends import NODE_CLASSES as TABLE
from ablate.kernels.backends import Lane

GIB = 2**30


@pytest.mark.parametrize(
    ("device", "name", "peak"),
    [
        ("NVIDIA H200", "h200", 989.5e12),
        ("NVIDIA H100 80GB HBM3", "h100", 989.5e12),
        ("NVIDIA H100 PCIe", "h100-pcie", 756e12),
        ("NVIDIA H100 NVL", "h100-nvl", None),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", 312e12),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie", 312e12),
        ("NVIDIA L40S", "l40s", 362.05e12),
        ("NVIDIA GeForce RTX 4090", "rtx-4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000-blackwell-max-q", None),
        ("NVIDIA B200", "b200", None),
        ("NVIDIA GH200 480GB", "gh200-480gb", None),
        ("Tesla V100-SXM2-32GB", "v100-32gb", None),
        ("NVIDIA TITAN RTX", "titan-rtx-24gb", None),
        ("NVIDIA H100", "h100-24gb", None),
        ("NVIDIA H200 MIG 1g.18gb", "h200-mig-1g-18gb", None),
    ],
)
def test_gpu_class_and_its_peak(device: str, name: str, peak: float | None) -> None:
    """A card without a peak of its own has none: not that of a card of a similar name."""
    found = gpu_class(device, 24 * GIB, probe="nvidia")
    assert (found.name, found.peak("bfloat16", 1)) == (name, peak)
    assert found.peak("float32", 1) is None
    assert NODE_CLASSES[name] is found


def test_any_drawn_name_makes_a_legal_class_that_the_table_does_not_have() -> None:
    """Two names differ in their class if they differ in a word that is not one of the maker's."""
    draw = random.Random(11)  # noqa: S311 - a seeded draw
    words = ["RTX", "5090", "Ti", "H100", "H200", "PCIe", "A6000", "SUPER", "Max-Q", "cpu", "TPU", "v6e", "90GB", "Ada"]
    names: dict[str, set[str]] = {}
    for _ in range(4000):
        chosen = draw.sample(words, draw.randint(1, 8))
        device = "NVIDIA " + " ".join(chosen) + draw.choice(["", " Generation", " GPU", " MIG 1g.10gb"])
        one = gpu_class(device, 80 * GIB, probe="nvidia")
        fits = [entry for entry in TABLE.values() if entry.probe == "nvidia" and entry.fits(device)]
        if fits and "MIG" not in device:
            assert one is fits[0]
            continue
        assert one.name not in TABLE
        assert re.search(GPU_PATTERN, one.name)
        assert len(one.name) <= MOST_LETTERS
        assert (one.lanes, one.device_type, one.probe) == ((Lane.REFERENCE,), "cuda", "nvidia")
        assert NODE_CLASSES[one.name] is one
        plain = re.sub("[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ").replace(" generation", ""))
        names.setdefault(one.name, set()).add(plain.removesuffix("-gpu"))
    assert len(names) > 2000
    assert max(map(len, names.values())) == 1


@pytest.mark.parametrize("name", ["gpu", "cpu2", "tpu-v5e", "xla-9", "A100", "a100_80", "a100-", "-a100", "", "1" * 33])
def test_a_name_that_no_gpu_has_is_no_class(name: str) -> None:
    assert not is_gpu(name)
    assert name not in NODE_CLASSES
    with pytest.raises(KeyError):
        NODE_CLASSES[name]


def test_the_table_is_all_that_is_listed() -> None:
    assert list(NODE_CLASSES) == list(TABLE)
    assert all(NODE_CLASSES[name] is entry for name, entry in TABLE.items())

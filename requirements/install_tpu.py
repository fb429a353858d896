"""Make the environment of the TPU lane: torch_xla 2.9 needs torch 2.9, so it is apart from the project's own .venv.

    python requirements/install_tpu.py .venv-tpu

Everything comes from tpu.lock without looking at dependencies: those of PyPI's torch would add 3.3 GB for CUDA. Where
PyTorch's own index can be reached, torch is the CPU build; elsewhere it is PyPI's, with stand-ins for CUDA's libraries.
"""

import re
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "tpu.lock"
COMPILER_LOCK = HERE / "tpu-compiler.lock"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FOR_CUDA_BUILD = re.compile("nvidia-(?!ml-py)")
"""Packages of CUDA; nvidia-ml-py asks the driver, and workers import it."""
CHECK = "from ablate.kernels.xla import device as xla_device; print(xla_device.device(), xla_device.versions())"


def main(folder: Path) -> None:
    """Create `folder` and install into it."""
    venv.create(folder, with_pip=True)
    pins = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    rest = [pin for pin in pins if pin != torch]
    if _cpu_build(folder, torch):
        _pip(folder, *(pin for pin in rest if not FOR_CUDA_BUILD.match(pin)))
    else:
        print(f"{CPU_INDEX} has no {torch} for here: PyPI's build and stand-ins for CUDA's libraries")  # noqa: T201
        _pip(folder, torch, *rest)
        site = next(folder.glob("lib/python3*/site-packages"))
        _run(folder, str(HERE / "cuda_stubs.py"), str(site))
    _pip(folder, "--no-build-isolation", "--editable", str(HERE.parent))
    _run(folder, "-c", CHECK)
    _pip(folder, "--upgrade", "--target", str(folder / "compiler"), "--requirement", str(COMPILER_LOCK))


def _cpu_build(folder: Path, torch: str) -> bool:
    """Install the CPU build and tell whether it could be had."""
    index = ("--index-url", CPU_INDEX, "--retries", "0", "--timeout", "15")
    done = subprocess.run(_pip_command(folder, *index, f"{torch}+cpu"), capture_output=True, check=False)
    return done.returncode == 0


def _pip(folder: Path, *arguments: str) -> None:
    done = subprocess.run(_pip_command(folder, *arguments), check=False)
    if done.returncode:
        raise SystemExit(f"pip could not install the TPU lane into {folder}; see above")


def _pip_command(folder: Path, *arguments: str) -> list[str]:
    python = str(folder / "bin" / "python")
    return [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *arguments]


def _run(folder: Path, *arguments: str) -> None:
    done = subprocess.run([str(folder / "bin" / "python"), *arguments], cwd=HERE.parent, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments[:2])} failed in {folder}; see above")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A fault of the assembler ptxas, up to CUDA 13.2, found in a kernel's machine code.

In some loops over the chunks, ptxas uses one register both for the start of shared memory and for an address that grows
with every chunk. From the second chunk on, the loop then reads beside a tile that never moves, and the results are
wrong. In these loops only numbers of tokens have addresses that keep growing, and tiles have not. So a matrix load or
store through such a register proves the fault. docs/kernels-correctness.md has the measurements.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo.cuda.host import attest

INSTRUCTION = re.compile(r"^[ \t]+/\*([0-9a-f]{4,})\*/[ \t]+(?:@!?U?P\w+[ \t]+)?(\S.*?)[ \t]*;", re.MULTILINE)
"""An instruction of `cuobjdump -sass`: address, text without its predicate."""
WRITES_NO_REGISTER = ("ST", "UTMA", "BAR", "SYNCS", "UBLK", "RED", "ATOM")
DESTINATION = re.compile(r"[A-Z0-9_.]+ (?:U?P\w+, )*(U?R\d+)\b")
ADDRESS_ARITHMETIC = ("LEA", "ULEA", "IADD3", "UIADD3", "VIADD", "IMAD", "LOP3", "ULOP3")
MATRIX_ACCESS = ("LDSM", "STSM")

Instruction = tuple[int, str]


def check(name: str, folder: Path) -> None:
    """Raise KernelUnsupported if kernel `name` in this folder of TileLang's cache has the fault, and delete the folder.

    A kernel is read once, a third of a second, and then marked as right. Without a disassembler nothing is checked.
    """
    mark, tool = folder / "machine_code_is_right", attest.disassembler()
    if tool is None or mark.exists():
        return
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(attest.cubin((folder / "executable.so").read_bytes()))
        file.flush()
        text = subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True, timeout=120
        ).stdout
    wrong = fault(text)
    if wrong is None:
        mark.touch()
        return
    shutil.rmtree(folder, ignore_errors=True)  # another rank may delete it, too
    raise KernelUnsupported(
        f"kernel '{name}' has wrong machine code ({wrong}), a fault of ptxas up to CUDA 13.2 in some loops; allowed: "
        "another chunk_size, pipeline_stages or rank, or an nvcc of CUDA 13.3 or later on PATH"
    )


def fault(disassembly: str) -> str | None:
    """Return the first matrix access of a loop over the chunks whose address keeps growing, None without one."""
    code = [(int(address, 16), text) for address, text in INSTRUCTION.findall(disassembly)]
    faults = (found for loop in _loops(code) for register in _growing(loop) for found in _accesses(loop, register))
    return next(faults, None)


def _loops(code: Sequence[Instruction]) -> Iterator[Sequence[Instruction]]:
    """Yield the instructions of every loop with a barrier, from the target of its backward branch to the branch."""
    places = {address: place for place, (address, _) in enumerate(code)}
    for place, (address, text) in enumerate(code):
        target = re.match(r"BRA(?:\.\w+)* (?:!?U?P\w+, )*(?:`\(.*\) )?0x([0-9a-f]+)$", text)
        if target and int(target[1], 16) < address:
            loop = code[places[int(target[1], 16)] : place]
            if any(part.startswith("BAR.SYNC") for _, part in loop):
                yield loop


def _destination(text: str) -> str | None:
    if text.startswith(WRITES_NO_REGISTER):
        return None
    found = DESTINATION.match(text)
    return found[1] if found else None


def _growing(loop: Sequence[Instruction]) -> Iterator[str]:
    """Yield the registers that the loop writes once, by adding a constant."""
    written: dict[str, list[str]] = {}
    for _, text in loop:
        register = _destination(text)
        if register is not None:
            written.setdefault(register, []).append(text)
    for register, texts in written.items():
        step = rf"(?:U?IADD3|VIADD) {register}, (?:U?P\w+, )?{register}, -?0x[0-9a-f]+(?:, U?RZ)?$"
        if len(texts) == 1 and re.match(step, texts[0]):
            yield register


def _accesses(loop: Sequence[Instruction], register: str) -> Iterator[str]:
    """Yield the loop's matrix accesses through the register, or through an address made from it."""
    for place, (_, text) in enumerate(loop):
        made = _destination(text)
        if made == register or not re.search(rf"\b{register}\b", text):
            continue
        if text.startswith(MATRIX_ACCESS):
            yield text
        elif made is not None and text.startswith(ADDRESS_ARITHMETIC):
            for _, later in loop[place + 1 :]:
                if later.startswith(MATRIX_ACCESS) and re.search(rf"\[[^\]]*\b{made}\b", later):
                    yield f"{text}; {later}"
                if _destination(later) == made:
                    break

"""AMD GPUs that the real client amdsmi sees, in a library that is compiled here.

The client looks up each function of AMD's library when it is imported. Those that no test needs say "not supported".
"""

import ctypes
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from ablate.workers.devices import amd_probe

_OWN = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { OK = 0, NOT_SUPPORTED = 2, NO_DRIVER = 18 };
typedef struct { char name[256], uuid[64], gfx[32], mode[32]; unsigned total, used, pids[8]; int num_pids; } Gpu;
static Gpu gpus[16];
static int num_gpus;

int amdsmi_init(unsigned long flags) {
    FILE *file = getenv("FAKE_AMD") ? fopen(getenv("FAKE_AMD"), "r") : NULL;
    char line[1024];
    (void)flags;
    if (!file) return NO_DRIVER;
    for (num_gpus = 0; fgets(line, sizeof line, file);) {
        Gpu *gpu = &gpus[num_gpus++];
        int at = 0;
        memset(gpu, 0, sizeof *gpu);
        sscanf(line, "%255[^|]|%63[^|]|%31[^|]|%31[^|]|%u|%u|%n", gpu->name, gpu->uuid, gpu->gfx, gpu->mode,
               &gpu->total, &gpu->used, &at);
        for (char *part = strtok(line + at, " \n"); part; part = strtok(NULL, " \n"))
            gpu->pids[gpu->num_pids++] = atoi(part);
    }
    fclose(file);
    return OK;
}

int amdsmi_shut_down(void) { return OK; }

int amdsmi_get_socket_handles(unsigned *count, void **out) {
    *count = 1;
    if (out) *out = gpus;
    return OK;
}

int amdsmi_get_processor_handles(void *socket, unsigned *count, void **out) {
    (void)socket;
    *count = num_gpus;
    for (int i = 0; out && i < num_gpus; i++) out[i] = &gpus[i];
    return OK;
}

int amdsmi_get_gpu_device_uuid(Gpu *gpu, unsigned *length, char *out) {
    snprintf(out, *length, "%s", gpu->uuid);
    return OK;
}

int amdsmi_get_gpu_compute_partition(Gpu *gpu, char *out, unsigned length) {
    if (!strcmp(gpu->mode, "-")) return NOT_SUPPORTED;
    snprintf(out, length, "%s", gpu->mode);
    return OK;
}
"""


@dataclass(frozen=True, kw_only=True)
class FakeAmd:
    """A GPU of AMD; `mode` is None for a card that cannot be divided."""

    name: str
    uuid: str
    gfx: str = "942"
    mode: str | None = "SPX"
    total_mib: int = 196592
    used_mib: int = 0
    pids: Sequence[int] = ()

    def line(self) -> str:
        pids = " ".join(map(str, self.pids))
        return f"{self.name}|{self.uuid}|{self.gfx}|{self.mode or '-'}|{self.total_mib}|{self.used_mib}|{pids}\n"


def _layout(name: str, text: str, fields: dict[str, str]) -> str:
    """Return C code that fills fields of a structure at the places that the client's own source gives."""
    place, code = 0, []
    body = re.search(rf"struct_{name}\._fields_ = \[(.*?)\n\]", text, re.DOTALL)
    assert body is not None
    for field, kind in re.findall(r"\('(\w+)', ([^\n]+)\),", body[1]):
        if field in fields:
            code.append(fields[field].replace("AT", f"((char *)out + {place})"))
        place += _size(kind, text)
    return " ".join(code)


def _size(kind: str, text: str) -> int:
    base, _, count = kind.partition(" * ")
    if base.startswith("ctypes."):
        return ctypes.sizeof(getattr(ctypes, base.removeprefix("ctypes."))) * int(count or 1)
    body = re.search(rf"^{base}\._fields_ = \[(.*?)\n\]", text, re.DOTALL | re.MULTILINE)
    assert body is not None
    return sum(_size(inner, text) for _, inner in re.findall(r"\('(\w+)', ([^\n]+)\),", body[1]))


@cache
def _load() -> ctypes.CDLL:
    spec = find_spec("amdsmi")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).with_name("amdsmi_wrapper.py").read_text(encoding="utf-8")
    chip = _layout(
        "amdsmi_asic_info_t",
        text,
        {
            "market_name": "strcpy(AT, gpu->name);",
            "target_graphics_version": "*(unsigned long long *)AT = strtoull(gpu->gfx, NULL, 16);",
        },
    )
    usage = _layout(
        "amdsmi_vram_usage_t",
        text,
        {"vram_total": "*(unsigned *)AT = gpu->total;", "vram_used": "*(unsigned *)AT = gpu->used;"},
    )
    driver = _layout("amdsmi_driver_info_t", text, {"driver_version": 'strcpy(AT, "6.12.12");'})
    row = _layout("amdsmi_proc_info_t", text, {"pid": "*(unsigned *)AT = gpu->pids[i];"})
    size = _size("struct_amdsmi_proc_info_t", text)
    own = f"""{_OWN}
int amdsmi_get_gpu_asic_info(Gpu *gpu, void *out) {{ {chip} return OK; }}
int amdsmi_get_gpu_vram_usage(Gpu *gpu, void *out) {{ {usage} return OK; }}
int amdsmi_get_gpu_driver_info(Gpu *gpu, void *out) {{ (void)gpu; {driver} return OK; }}
int amdsmi_get_gpu_process_list(Gpu *gpu, unsigned *count, char *rows) {{
    for (int i = 0; i < gpu->num_pids; i++) {{ void *out = rows + i * {size}; {row} }}
    *count = gpu->num_pids;
    return OK;
}}
"""
    names = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", text)) - set(
        re.findall(r"^int (\w+)\(", own, re.M)
    )
    own += "".join(f"int {name}(void) {{ return NOT_SUPPORTED; }}\n" for name in sorted(names))
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "amd.c"), Path(folder, "libamd_smi.so")
        source.write_text(own)
        command = ["cc", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{library.name}", "-o", library, source]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))


def put_amd(folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: Sequence[FakeAmd], *, driver: bool = True) -> None:
    """Let the machine have these GPUs of AMD, with a driver that answers or not."""
    _load()
    state = folder / "amd.txt"
    state.write_text("".join(gpu.line() for gpu in gpus))
    monkeypatch.setattr(amd_probe, "DRIVER", state)
    monkeypatch.setenv("FAKE_AMD", str(state if driver else folder / "absent"))

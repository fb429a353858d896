"""Clocks that can be set: a small library, preloaded into a process, shifts its time of day by a number in a file.

Monotonic clocks and waits stay as they are, as when somebody sets the clock of a machine.
"""

import shutil
import subprocess
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const long long *shift_ns;

__attribute__((constructor)) static void prepare(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(0, sizeof *shift_ns, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) shift_ns = page;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && shift_ns && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        long long sum = now->tv_sec * 1000000000LL + now->tv_nsec + *shift_ns;
        now->tv_sec = sum / 1000000000LL;
        now->tv_nsec = sum % 1000000000LL;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (out) *out = precise.tv_sec;
    return precise.tv_sec;
}
"""


class Clocks:
    """The clocks of one system, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        self._library = folder / "clock.so"
        compiler = shutil.which("cc")
        self.can_be_set = compiler is not None
        if compiler is not None:
            source = folder / "clock.c"
            source.write_text(_SOURCE)
            command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(self._library), str(source)]
            subprocess.run(command, check=True, capture_output=True)

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a process with the clock `name`, which is right at first."""
        if not self.can_be_set:
            return {}
        file = self._folder / name
        if not file.exists():
            file.write_bytes(bytes(8))
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(file)}

    def set(self, name: str, seconds: float) -> None:
        """Let a clock be `seconds` ahead; negative is behind."""
        with (self._folder / name).open("r+b", buffering=0) as file:
            file.write(round(seconds * 1e9).to_bytes(8, "little", signed=True))

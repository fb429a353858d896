"""Starts itself again with a library (LD_PRELOAD) that slows the C library's clocks down, as faketime does.

Report: gpu-mode/reference-kernels#162
Speed: invalid; the program's clock gives its window
"""

import os
import subprocess
import sys

SOURCE = """
#define _GNU_SOURCE
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>
int clock_gettime(clockid_t which, struct timespec *at) {
    static long long began[16];
    int answer = syscall(SYS_clock_gettime, which, at);
    long long now = at->tv_sec * 1000000000LL + at->tv_nsec;
    if (which < 0 || which > 15) return answer;
    if (!began[which]) began[which] = now;
    now = began[which] + (now - began[which]) / 10;
    at->tv_sec = now / 1000000000LL;
    at->tv_nsec = now % 1000000000LL;
    return answer;
}
"""

if "LD_PRELOAD" not in os.environ:
    library = f"{os.environ['TMPDIR']}/slow.so"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": library})

from honest import main  # noqa: E402 - in the second process only

main()

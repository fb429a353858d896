"""A small trainer that makes the trouble which its arguments name, and reports its value in the form that they name.

Usage in a trial: python train.py SEED TROUBLE, the trouble as JSON (drawing.py says what it may hold).
"""

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ablate

SEED, TROUBLE = int(sys.argv[1]), json.loads(sys.argv[2])
MARK = "ablate-trouble"
"""In the names of all files and in the command lines of all children."""
SEGMENT_KEYS = range(0x0AB1A7E0, 0x0AB1A7E0 + 16)
VALUE = 1.5 + SEED / 8
OLDER = 9.75
CHILD = """
import os, signal, time
{before}
print('ready', flush=True)
while {loud}:
    print('7 done')
time.sleep({seconds})
"""


def write(text: str | bytes) -> None:
    """Print text as C programs do: whole, without a newline of its own."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode() if isinstance(text, str) else text)
    sys.stdout.flush()


FORMS: Mapping[str, Callable[[float], str]] = {
    "plain": lambda value: f"METRIC val={value!r}\n",
    "exponent": lambda value: f"METRIC val={value:.17e}\n",
    "coloured": lambda value: f"\x1b[1;32mMETRIC val={value!r}\x1b[0m\n",
    "after a bar": lambda value: f"\r 50%|## |\r100%|####|\rMETRIC val={value!r}\n",
    "unended": lambda value: f"METRIC val={value!r}",
    "windows": lambda value: f"METRIC val={value!r}\r\n",
    "reported": lambda _value: "",
    "thousands": lambda value: f"METRIC val={1000 + value:,.3f}\n",
    "suffix": lambda value: f"METRIC val={value!r}k\n",
    "underscore": lambda _value: "METRIC val=1_500\n",
    "percent": lambda value: f"METRIC val={value!r}%\n",
    "hexadecimal": lambda _value: "METRIC val=0x1f\n",
    "tensor": lambda value: f"METRIC val=tensor({value!r})\n",
    "nothing": lambda _value: "METRIC val=\n",
    "none": lambda _value: "METRIC val=None\n",
    "nan": lambda _value: "METRIC val=nan\n",
    "c nan": lambda _value: "METRIC val=-nan\n",
    "infinity": lambda _value: "METRIC val=Infinity\n",
    "two points": lambda value: f"METRIC val={value!r}.5\n",
}


def noise(kind: str) -> None:
    """Print what programs print beside their results; every kind ends its line."""
    if kind == "bar":
        write("".join(f"\r {percent:3d}%|{'#' * (percent // 10)}" for percent in range(101)) + "\r" + " " * 40 + "\r")
    elif kind == "binary":
        write(os.urandom(300_000).replace(b"METRIC", b"metric") + b"\0\xff\xfe\x1b]0;title\x07\x1b[2J\n")
    elif kind == "long line":
        write("x" * 3_000_000 + "\n")
    elif kind == "warnings":
        write("UserWarning: this is deprecated\n" * 60_000)
    elif kind == "other metrics":
        write("".join(f"METRIC class_{number}={number / 7}\n" for number in range(300)))
    elif kind == "talk":
        write("METRICS val=3.0\nthe best val so far: 4.0\nval=5.0\nmetric val=6.0\n")


def children(kind: str) -> None:
    """Start processes that outlive this one, are stopped, were not waited for, or print beside it."""
    if kind == "zombie":
        subprocess.Popen(["true", MARK])
        return
    if kind == "none":
        return
    before = {
        "daemon": "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0)",
        "deaf": "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN)",
        "stopped": "print('ready', flush=True); os.kill(os.getpid(), signal.SIGSTOP)",
    }.get(kind, "")
    code = CHILD.format(before=before, loud=kind == "loud", seconds=0.2 if kind == "late" else 3600)
    output = None if kind in ("loud", "holds the output") else subprocess.DEVNULL
    ours, theirs = socket.socketpair()
    watched = code.replace("print('ready', flush=True)", f"os.write({theirs.fileno()}, b'r')")
    subprocess.Popen([sys.executable, "-c", watched, MARK], stdout=output, pass_fds=[theirs.fileno()])
    ours.recv(1)


def files(kind: str) -> None:
    """Leave files and segments that are awkward to remove or to find."""
    out = Path(ablate.trial().out)
    if kind == "closed folder":
        (out / MARK / "below").mkdir(parents=True)
        (out / MARK / "below" / "file").touch()
        (out / MARK).chmod(0)
    elif kind == "strange names":
        for name in (b"new\nline", b"\xff\xfe", b"-rf", b" ", b"\\", "\u202e".encode()):
            (out / os.fsdecode(name)).touch()
    elif kind == "pipes and links":
        os.mkfifo(out / f"{MARK}.fifo")
        (out / f"{MARK}.loop").symlink_to(f"{MARK}.loop")
        (out / f"{MARK}.root").symlink_to("/")
    elif kind == "deep":
        os.chdir(out)
        for _level in range(300):
            Path(MARK * 5).mkdir()
            os.chdir(MARK * 5)
    elif kind == "temporary":
        with tempfile.NamedTemporaryFile(prefix=MARK, delete=False) as file:
            file.write(bytes(100_000))
        tempfile.mkdtemp(prefix=MARK)
    elif kind == "segments":
        for key in SEGMENT_KEYS:
            ctypes.CDLL(None).shmget(key, 65536, 0o1600)
        ctypes.CDLL(None).semget(SEGMENT_KEYS[0], 1, 0o1600)
        ctypes.CDLL(None).msgget(SEGMENT_KEYS[0], 0o1600)


def processor_time() -> None:
    """Use more of it than allowed."""
    resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
    while True:
        pass


def planned() -> None:
    """Raise an exception whose message no terminal should see."""
    raise RuntimeError("planned \x1b[31m\x07 \udc80")


ENDS: Mapping[str, Callable[[], object]] = {
    "kill 0": lambda: (os.kill(0, signal.SIGTERM), time.sleep(60)),
    "processor time": processor_time,
    "abort": os.abort,
    "raise": planned,
    "exit 1": lambda: sys.exit(1),
    "exit 3": lambda: sys.exit(3),
    "exit 137": lambda: sys.exit(137),
    "exit with a text": lambda: sys.exit("no data"),
    "exit at once": lambda: os._exit(3),
    "return": lambda: None,
    "well by exit": lambda: sys.exit(0),
    "well by exit without a code": sys.exit,
}


def end(kind: str) -> None:
    """End this process as `kind` says: by a signal of that name, or in another way."""
    if kind in ENDS:
        ENDS[kind]()
        return
    os.kill(os.getpid(), signal.Signals[kind])
    time.sleep(60)


def main(trial: Any = None) -> None:
    """Make the trouble around the results."""
    children(TROUBLE["children"])
    files(TROUBLE["files"])
    noise(TROUBLE["before"])
    if TROUBLE["older"]:
        write(f"METRIC val={OLDER}\n")
        noise(TROUBLE["between"])
    write(FORMS[TROUBLE["form"]](VALUE))
    if TROUBLE["form"] == "reported" and trial is not None:
        trial.report(val=VALUE)
    if TROUBLE["form"] != "unended":
        noise(TROUBLE["after"])
    end(TROUBLE["end"])


if TROUBLE["inside"]:
    with ablate.trial(seed=SEED) as current:
        for step in current.steps():
            step.report(loss=1.0 / (SEED + step.index), tokens=10)
        main(current)
else:
    for step in ablate.steps(seed=SEED):
        step.report(loss=1.0 / (SEED + step.index), tokens=10)
    main()

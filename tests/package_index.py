"""An index of packages on this machine, as pip reads one."""

import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def package_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An index of packages with two versions of `colours`, one with a file that runs at a start; yield its requests."""
    asked: list[str] = []

    class Handler(_Quiet):
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

    for version in ("1.0", "2.0"):
        add_wheel(tmp_path / "index" / "simple" / "colours", version, hook=tmp_path / "ran")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "index")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield asked
    server.shutdown()
    server.server_close()


def add_wheel(folder: Path, version: str, *, hook: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"colours-{version}.dist-info"
    files = {
        "colours.py": f"VERSION = {version!r}\n",
        "colours.pth": f"import pathlib; pathlib.Path({str(hook)!r}).touch()\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: colours\nVersion: {version}\nRequires-Dist: absent\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"colours-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)

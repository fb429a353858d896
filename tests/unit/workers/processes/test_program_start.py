"""Commands that cannot start: each message names the file, its first line or the interpreter, and what to type."""

import errno
import os
from pathlib import Path

import pytest

from ablate.experiments.outcomes import FailureClass
from ablate.workers.commands.program_start import start_problem
from tests.programs import program_config, ran

FILES: dict[str, tuple[bytes, int]] = {
    "crlf.py": (b"#!/usr/bin/env python\r\nprint(1)\r\n", 0o755),
    "crlf.sh": (b"#!/bin/bash\r\necho 1\r\n", 0o755),
    "options.sh": (b"#!/bin/bash -e\r\necho 1\r\n", 0o755),
    "bom.py": (b"\xef\xbb\xbf#!/usr/bin/env python\nprint(1)\n", 0o755),
    "conda.py": (b"#!/home/alice/miniconda3/bin/python -u\nprint(1)\n", 0o755),
    "env.py": (b"#!/usr/bin/env -S VALUE=1 python9.9 -u\nprint(1)\n", 0o755),
    "folder.py": (b"#!/usr/bin\n", 0o755),
    "nothing.py": (b"#!\n", 0o755),
    "noexec.py": (b"print(1)\n", 0o644),
    "noexec.sh": (b"echo 1\n", 0o644),
    "noshebang.sh": (b"echo 1\n", 0o755),
    "empty": (b"", 0o755),
    "foreign": (b"\x7fELF" + bytes(60), 0o755),
    "good.sh": (b"#!/bin/sh\nexit 0\n", 0o755),
    "good.py": (b"#!/usr/bin/env python\n", 0o755),
    "split.py": (b"#!/usr/bin/env -S python -u\n", 0o755),
}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("./crlf.py", ("carriage return", r"'/usr/bin/env python\r'", "sed -i")),
        ("./crlf.sh", ("carriage return", r"'/bin/bash\r'", ".gitattributes")),
        ("./options.sh", ("carriage return", r"'/bin/bash -e\r'")),
        ("./bom.py", ("byte order mark",)),
        ("./conda.py", ("/home/alice/miniconda3/bin/python", "missing on the node", "python ./conda.py")),
        ("./env.py", ("'python9.9'", "is not in")),
        ("./folder.py", ("'/usr/bin'", "is no program")),
        ("./nothing.py", ("is no name",)),
        ("./noexec.py", ("chmod +x", "python ./noexec.py")),
        ("./noexec.sh", ("bash ./noexec.sh",)),
        ("./noshebang.sh", ("no first line such as #!/bin/sh", "bash ./noshebang.sh")),
        ("./empty", ("no first line",)),
        ("./foreign", ("another processor",)),
        ("crlf.sh", ("type ./crlf.sh",)),
        ("./folder", ("is a folder",)),
        ("./link", ("is a link to nowhere",)),
        ("./missing.sh", ("is missing", "git ignores")),
        ("nosuchprogram", ("no program nosuchprogram",)),
    ],
)
def test_a_command_that_cannot_start_says_why_and_what_to_type(
    tmp_path: Path, command: str, words: tuple[str, ...]
) -> None:
    folder = tmp_path / "code"
    (folder / "folder").mkdir(parents=True)
    (folder / "folder/file").touch()
    (folder / "link").symlink_to("nowhere")
    for name, (content, mode) in FILES.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(mode)
    result = ran(program_config(folder, command=(command,), needs="process"), tmp_path / "home")
    assert result.failure_class is FailureClass.USER_ERROR
    assert [one for one in words if one not in str(result.message)] == [], result.message


@pytest.mark.parametrize("name", ["good.sh", "good.py", "split.py"])
def test_a_script_that_can_start_has_no_problem(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name][0])
    (tmp_path / name).chmod(0o755)
    assert start_problem(f"./{name}", tmp_path, os.environ["PATH"]) is None


def test_the_kernels_own_reason_is_kept_where_nothing_else_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "good.sh").write_bytes(FILES["good.sh"][0])
    (tmp_path / "good.sh").chmod(0o755)
    problem = start_problem("./good.sh", tmp_path, "", OSError(errno.E2BIG, "Argument list too long"))
    assert problem == "the command cannot be started: ./good.sh: Argument list too long"

"""`make clients`: generate clients of the REST interface with two generators, and ask a question with each.

The service is real, and a thread answers for worker and background process. The generators lie in an environment of
their own, which also runs the programs with the generated clients: neither needs this project.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.answering import LESS_MEMORY, answering
from tests.api_stack import Api, served_api

HERE = Path(__file__).resolve().parent
GENERATORS = {
    "openapi-python-client": ("generate", "--path", "openapi.json", "--output-path", "ablate_opc", "--meta", "none"),
    "openapi-generator-cli": (
        *("generate", "-i", "openapi.json", "-g", "python", "-o", ".", "--package-name", "ablate_ogp"),
        *(
            "--global-property",
            "models,apis,supportingFiles,modelDocs=false,apiDocs=false,modelTests=false,apiTests=false",
        ),
    ),
}
PROGRAMS = {
    "openapi-python-client": "with_openapi_python_client.py",
    "openapi-generator-cli": "with_openapi_generator.py",
}
OWNER = "robot"
ANSWER = {"psiv-on": "better"}


def generate(bin_folder: Path, name: str, folder: Path) -> list[str]:
    """Generate a client into a folder that has the document; return the generator's warnings."""
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    command = [str(bin_folder / name), *GENERATORS[name]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{output}")
    return [line for line in output.splitlines() if "warning" in line.lower() or " WARN " in line]


def ask(bin_folder: Path, name: str, folder: Path, api: Api, token: str) -> None:
    """Run the program with the generated client and check its answer."""
    command = [str(bin_folder / "python"), str(HERE / PROGRAMS[name]), str(api.client.base_url), token, OWNER]
    environment = {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the program with the client of {name} ended with {done.returncode}:\n{done.stderr}")
    answer = json.loads(done.stdout)
    expected = {
        "words": ANSWER,
        "listed": [answer["id"]],
        "refused": ["#/verdict/primary"],
        "ran": [[block, arm] for block in (0, 1) for arm in ("baseline", "psiv-on")],
    }
    actual = {key: answer[key] for key in expected}
    actual["refused"] = [pointer.rpartition("/")[0] for pointer in answer["refused"]]
    if actual != expected or "hybrid-tiny" not in answer["recipes"]:
        raise SystemExit(f"the client of {name} has {answer}; expected {expected} and the recipe hybrid-tiny")


def main(bin_folder: Path) -> None:
    """Generate and try both clients. Raises SystemExit when one fails."""
    with tempfile.TemporaryDirectory() as home, served_api("sqlite", Path(home)) as api:
        token = api.token(OWNER, "submit")["Authorization"].removeprefix("Bearer ")
        document = api.client.get("/openapi.json").text
        with answering(api, LESS_MEMORY):
            for name in GENERATORS:
                folder, began = Path(home) / name, time.monotonic()
                folder.mkdir()
                (folder / "openapi.json").write_text(document, encoding="utf-8")
                warnings = generate(bin_folder, name, folder)
                ask(bin_folder, name, folder, api, token)
                took_s = time.monotonic() - began
                sys.stdout.write(f"{name}: generated and asked in {took_s:.1f} s, {len(warnings)} warnings\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

"""The MLflow server of the embedded stack: `python -m ablate.service.stack.mlflow_server PORT FOLDER PASSWORD_FILE`.

MLflow itself asks for no password, reads and writes artifacts wherever a run says, and offers a shell to its own
machine. So this process shuts itself in before it loads MLflow: it writes only its folder, connects to nothing, keeps
all artifacts in its folder, and answers nobody without the password.

`mlflow server` loads MLflow, creates its database, then starts uvicorn as a second process, which loads MLflow again.
This program does both in one process: half the start, and 250 MB less. The database is there before the first request.
"""

import base64
import hmac
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ablate.experiments.digest import IMPORT_ROOT, SOURCE_ROOT
from ablate.experiments.system.isolation import PLAIN_DEVICES, Isolation, system_folders
from ablate.experiments.system.kernel_limits import can_filter_calls, landlock_version
from ablate.service.settings import generated_secret
from ablate.service.stack.layout import MLFLOW_USER

_PACKAGES = ("experiments", "service")
_LIBRARIES = ("site-packages", "dist-packages")
"""Names of the folders with installed packages."""
_DATABASE, _ARTIFACTS = "mlflow.db", "mlflow-artifacts:/"
_log = logging.getLogger(__name__)


def main() -> None:
    """Create the database, or migrate it, then serve on the loopback interface until a signal ends this process."""
    port, folder, password_file = int(sys.argv[1]), Path(sys.argv[2]).resolve(), Path(sys.argv[3])
    listener = socket.create_server(("127.0.0.1", port))
    password = generated_secret(password_file)
    _shut_in(folder)
    _set(_options(folder))
    uvicorn.Server(uvicorn.Config(_Gate(_mlflow(folder), password))).run(sockets=[listener])


def _shut_in(folder: Path) -> None:
    """Close the rest of this machine to this process, except to read programs, where the kernel can do that."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    _set({"HOME": str(folder), "TMPDIR": str(temporary)})
    os.chdir(folder)
    if not (landlock_version() and can_filter_calls()):
        _log.warning("this kernel cannot isolate processes: whoever has the password reads all files of this user")
        return
    libraries = [Path(entry) for entry in sys.path if Path(entry).name in _LIBRARIES]  # also those that a .pth adds
    packages = (IMPORT_ROOT / "ablate", *(SOURCE_ROOT / name for name in _PACKAGES))
    readable = (*system_folders(), *packages, *libraries)
    Isolation(readable=readable, writable=(folder,), hidden=(folder.parent,), devices=PLAIN_DEVICES).enter()


def _set(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        os.environ[name] = value


def _options(folder: Path) -> dict[str, str]:
    """Return the variables by which `mlflow server` hands its own options on.

    It runs no jobs, and reports nothing to MLflow's makers.
    """
    store = f"sqlite:///{folder / _DATABASE}"
    return {
        "_MLFLOW_SERVER_FILE_STORE": store,
        "_MLFLOW_SERVER_REGISTRY_STORE": store,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": _ARTIFACTS,
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "artifacts"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }


def _mlflow(folder: Path) -> ASGIApp:
    """Load MLflow with its database, and with no other place for artifacts than its folder."""
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    _keep_artifacts_in(folder / "artifacts")
    if not (folder / _DATABASE).exists():
        _create_database(folder)
    initialize_backend_stores()
    loaded: ASGIApp = app
    return loaded


def _create_database(folder: Path) -> None:
    """Create MLflow's database under another name until it is complete: a killed migration never continues."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    unfinished = folder / f"{_DATABASE}.unfinished"
    unfinished.unlink(missing_ok=True)
    SqlAlchemyStore(f"sqlite:///{unfinished}", _ARTIFACTS).engine.dispose()
    unfinished.replace(folder / _DATABASE)


def _keep_artifacts_in(root: Path) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
    from mlflow.store.artifact.artifact_repository_registry import get_registered_artifact_repositories
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    repositories = get_registered_artifact_repositories()

    def own(location: str, **options: Any) -> LocalArtifactRepository:
        repository = LocalArtifactRepository(location, **options)
        if not Path(repository.artifact_dir).resolve().is_relative_to(root):
            raise MlflowException(
                f"artifacts are at mlflow-artifacts:/ only, not at {location!r}", INVALID_PARAMETER_VALUE
            )
        return repository

    repositories.clear()
    repositories.update({"": own, "file": own})


class _Gate:
    """Answers requests with the password only."""

    def __init__(self, app: ASGIApp, password: str) -> None:
        self._app = app
        self._expected = b"Basic " + base64.b64encode(f"{MLFLOW_USER}:{password}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        sent = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(sent, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            text = "MLflow's pages are at /mlflow/ of Ablate's pages, for people who are signed in: ablate open\n"
            refusal = PlainTextResponse(text, 401, {"WWW-Authenticate": 'Basic realm="MLflow of Ablate"'})
            await refusal(scope, receive, send)
        else:
            await send({"type": "websocket.close"})


if __name__ == "__main__":
    main()

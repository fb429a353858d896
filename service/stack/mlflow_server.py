"""The MLflow server of the embedded stack, in one process: `python -m service.stack.mlflow_server PORT`.

`mlflow server` loads MLflow, creates its database, then starts uvicorn as a second process, which loads MLflow again.
This program does both in one process: half the start, and 250 MB less. The database is there before the first request.
Its options are the variables by which `mlflow server` hands its own on, see `mlflow_environment`.
"""

import sys

import uvicorn
from mlflow.server.fastapi_app import app
from mlflow.server.handlers import initialize_backend_stores


def main() -> None:
    """Create the database, or migrate it, then serve on the loopback interface until a signal ends this process."""
    initialize_backend_stores()
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))


if __name__ == "__main__":
    main()

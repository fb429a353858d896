#!/bin/sh
# Starts the MLflow server with its database from a secret: in the environment, not in the list of processes.
# Its processes may take minutes to load on a busy machine; by default the one above them kills who is silent for 5 s.
set -eu
MLFLOW_BACKEND_STORE_URI=$(cat "${MLFLOW_DATABASE_URL_FILE:-/run/secrets/mlflow_database_url}")
export MLFLOW_BACKEND_STORE_URI
exec mlflow server --host 0.0.0.0 --port 8322 --workers "${MLFLOW_WORKERS:?how many processes answer}" \
    --uvicorn-opts "--timeout-worker-healthcheck 300" \
    --artifacts-destination /var/lib/mlflow/artifacts --allowed-hosts "${MLFLOW_ALLOWED_HOSTS:?names that people and the service use}"

#!/bin/sh
# Starts the MLflow server. The database address, a secret, is in its environment and not in the list of processes.
# On a busy machine its processes may load for minutes; by default their parent kills them after 5 s of silence.
set -eu
MLFLOW_BACKEND_STORE_URI=$(cat "${MLFLOW_DATABASE_URL_FILE:-/run/secrets/mlflow_database_url}")
export MLFLOW_BACKEND_STORE_URI
exec mlflow server --host 0.0.0.0 --port 8322 --workers "${MLFLOW_WORKERS:?how many processes answer}" \
    --uvicorn-opts "--timeout-worker-healthcheck 300" \
    --artifacts-destination /var/lib/mlflow/artifacts --allowed-hosts "${MLFLOW_ALLOWED_HOSTS:?names that people and the service use}"

#!/bin/sh
# Writes random secrets into ./secrets, or the folder in $1; keeps existing files.
set -eu
folder=${1:-secrets}
umask 077
mkdir -p "$folder"
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
put() { [ -s "$folder/$1" ] || printf '%s' "$2" > "$folder/$1"; }
for name in postgres_password ablate_database_password mlflow_database_password redis_password \
    ablate_admin_token ablate_worker_token mlflow_password; do
    put "$name" "$(random)"
done
put ablate_database_url "postgresql+psycopg://ablate:$(cat "$folder/ablate_database_password")@postgres:5432/ablate"
put mlflow_database_url "postgresql+psycopg://mlflow:$(cat "$folder/mlflow_database_password")@postgres:5432/mlflow"
put ablate_mlflow_url "http://ablate:$(cat "$folder/mlflow_password")@mlflow:8322"
put ablate_broker_url "redis://:$(cat "$folder/redis_password")@redis:6379/0"
chmod 644 "$folder"/*    # other users read them inside containers; only the owner can open the folder
chmod 700 "$folder"
echo "secrets are in $folder"

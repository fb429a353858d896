#!/bin/sh
# Runs once, when the volume of PostgreSQL is empty: creates a database and a role for the service and for MLflow.
set -eu
for name in ablate mlflow; do
    psql --quiet --set=ON_ERROR_STOP=1 --set=name="$name" --set=secret="$(cat "/run/secrets/${name}_database_password")" \
        --username "${POSTGRES_USER:-postgres}" --dbname postgres <<'SQL'
CREATE ROLE :"name" LOGIN PASSWORD :'secret';
CREATE DATABASE :"name" OWNER :"name";
SQL
done

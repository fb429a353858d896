#!/bin/sh
# Runs once, when the volume of PostgreSQL is empty: creates a database and a role for the service and for MLflow.
set -eu
for name in ablate mlflow; do
    SECRET="/run/secrets/${name}_database_password" psql --quiet --set=ON_ERROR_STOP=1 --set=name="$name" \
        --username "${POSTGRES_USER:-postgres}" --dbname postgres <<'SQL'
\set secret `cat "$SECRET"`
CREATE ROLE :"name" LOGIN PASSWORD :'secret';
CREATE DATABASE :"name" OWNER :"name";
SQL
done

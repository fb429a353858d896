#!/bin/sh
# First start: make the cluster and run the scripts, reachable by nobody else; then serve.
set -eu
data=/var/lib/postgresql/data
if [ ! -s "$data/PG_VERSION" ]; then
    initdb --pgdata "$data" --username postgres --pwfile "$POSTGRES_PASSWORD_FILE" --auth-host scram-sha-256 \
        --auth-local trust --encoding UTF8 > /dev/null
    echo "host all all all scram-sha-256" >> "$data/pg_hba.conf"
    pg_ctl --pgdata "$data" --wait --options "-c listen_addresses='' -c unix_socket_directories=/tmp" start > /dev/null
    for script in /docker-entrypoint-initdb.d/*.sh; do PGHOST=/tmp sh "$script"; done
    pg_ctl --pgdata "$data" --wait stop > /dev/null
fi
exec postgres -D "$data" -c "listen_addresses=*" -c unix_socket_directories=/tmp,/var/run/postgresql

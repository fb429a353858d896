#!/bin/sh
# Starts nginx with the addresses of all API processes and of MLflow, and gives it new ones every second. nginx would look
# names up within requests, which then wait for 5 s or more whenever one answer of the name server is lost.
look() {    # NAME PORT: write the servers of a name if they changed; a name without an address keeps the earlier ones
    servers=$(getent ahostsv4 "$1" | awk -v port="$2" '!seen[$1]++ {print "server " $1 ":" port " fail_timeout=2s;"}' | sort)
    [ -n "$servers" ] || servers=$(cat "/tmp/$1.servers" 2> /dev/null || echo "server 127.0.0.1:9;")
    [ "$servers" != "$(cat "/tmp/$1.servers" 2> /dev/null)" ] || return 1
    echo "$servers" > "/tmp/$1.servers"
}
look api 8321
look mlflow 8322
while sleep 1; do
    changed=no
    look api 8321 && changed=yes
    look mlflow 8322 && changed=yes
    [ $changed = no ] || kill -HUP 1
done &
exec nginx -e /dev/stderr -c /etc/nginx/ablate.conf -g 'daemon off;'

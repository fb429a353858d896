#!/bin/sh
# `docker` as the pages type it, where there is only podman. What podman 4 lacks is done here: chains of dependencies
# cannot be started, so none are asked for; nobody waits for health, so it is asked for.
set -eu
[ "$1" = compose ] || exec podman "$@"
verb=$2
shift 2
case $verb in
    run) exec podman-compose run --no-deps "$@" ;;
    up) ;;
    *) exec podman-compose "$verb" "$@" ;;
esac
wait=no
for word; do
    shift
    if [ "$word" = --wait ]; then wait=yes; else set -- "$@" "$word"; fi
done
podman-compose up --no-deps --no-build "$@"
[ $wait = no ] || for name in $(podman ps --format '{{.Names}}' --filter label=com.docker.compose.project=ablate); do
    for _ in $(seq 300); do
        code=0
        podman healthcheck run "$name" > /dev/null 2>&1 || code=$?
        [ $code -eq 1 ] || break    # 0: healthy; 125: it has no check
        sleep 1
    done
    [ $code -ne 1 ] || { echo "$name is not healthy" >&2; exit 1; }
done

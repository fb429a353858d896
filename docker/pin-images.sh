#!/bin/sh
# Pulls the foreign images of compose.yaml and writes their digests into .env, or the file in $1. Compose and builds then
# take exactly these images. Run it again to take newer ones. POSTGRES_IMAGE=registry.example.org/postgres:16 and its
# like take another source.
set -eu
file=$(realpath -m "${1:-$(dirname "$0")/../.env}")
cd "$(dirname "$0")/.."
pins=
for entry in $(sed -n 's/.*${\([A-Z]*_IMAGE\):-\([^}]*\)}.*/\1=\2/p' compose.yaml | sort -u); do
    name=${entry%%=*}
    eval "image=\${$name:-${entry#*=}}"
    docker pull --quiet "$image" > /dev/null
    repository=$(printf '%s' "${image%@*}" | sed 's|:[^/:]*$||')
    digest=
    # An engine may know several digests of an image, for example of its form before a push: the registry knows one.
    for known in $(docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$image" | awk -F@ -v name="$repository" \
        '$1 == name || $1 == "docker.io/library/" name || $1 == "docker.io/" name {print $2}'); do
        if docker pull --quiet "$repository@$known" > /dev/null 2>&1; then digest=$known; break; fi
    done
    [ -n "$digest" ] || { echo "$image has no digest that its registry knows" >&2; exit 1; }
    pins="$pins$name=$repository@$digest
"
done
kept=$([ ! -e "$file" ] || grep -v '^[A-Z]*_IMAGE=' "$file" || true)
printf '%s%s' "${kept:+$kept
}" "$pins" > "$file"
printf '%s' "$pins"

#!/bin/sh
# Installs Debian's Chromium for the page tests, where we may; otherwise says so and lets the tests skip themselves.
set -u

for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null 2>&1; then
        echo "Browser for the page tests: $(command -v "$name")"
        exit 0
    fi
done

if ! command -v apt-get >/dev/null 2>&1; then
    echo "No Chromium here and no apt-get to install it with: the page tests will be skipped."
    exit 0
fi

if [ "$(id -u)" -eq 0 ]; then
    as_root=""
elif sudo -n true >/dev/null 2>&1; then
    as_root="sudo -n"
else
    echo "No Chromium here and no right to install it: the page tests will be skipped."
    exit 0
fi

log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
install() {
    $as_root apt-get -o Acquire::Retries=3 update &&
        $as_root apt-get -o Acquire::Retries=3 install -y --no-install-recommends chromium
}
# A mirror may fail for a moment: once more after a pause.
if { install || { sleep 15; install; }; } >"$log" 2>&1; then
    echo "Installed Chromium for the page tests."
else
    echo "Installing Chromium failed, the page tests will be skipped; apt-get said (whole output in $log):"
    tail -n 3 "$log"
fi
exit 0

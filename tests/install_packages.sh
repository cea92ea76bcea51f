#!/usr/bin/env bash
# Installs the system packages named as arguments, as root on Debian and Ubuntu; on other systems it
# prints the missing ones, and pytest skips and lists the tests that need them.
set -euo pipefail

missing=()
for package in "$@"; do
    state=$(dpkg-query --show --showformat '${Status}' "$package" 2>/dev/null || true)
    [[ $state == "install ok installed" ]] || missing+=("$package")
done
((${#missing[@]})) || exit 0
if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    echo "tests: not installed, as that needs root on Debian or Ubuntu: ${missing[*]}" >&2
    exit 0
fi
echo "tests: installing ${missing[*]} (apt-get); no service of theirs is started" >&2

# The standard way to keep packages' services from starting: https://manpages.debian.org/invoke-rc.d
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
get() {
    DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@" >/dev/null
}
get update
get install -y --no-install-recommends "${missing[@]}"
# Nor at the next boot, when it was not there before.
if [[ " ${missing[*]} " == *" openssh-server "* ]] && command -v systemctl >/dev/null; then
    systemctl disable --quiet ssh.service 2>/dev/null || true
fi

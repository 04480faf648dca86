#!/bin/sh
# Installs the missing packages that a make target needs, on Debian and Ubuntu, after naming them. On other systems,
# without root and sudo, or with SETUP=no, prints a line for each missing thing and fails.
#
#     scripts/setup.sh build|test
. "$(dirname "$0")/shell/help.sh"
set -eu

want=${1:?usage: scripts/setup.sh build|test}
check=$(dirname "$0")/check.sh
missing=$("$check" packages "$want" | tr ' ' '\n' | sort -u | tr '\n' ' ')
missing=$(echo $missing)
[ -n "$missing" ] || exit 0

sudo=
[ "$(id -u)" -eq 0 ] || sudo=sudo
if [ "${SETUP:-}" = no ] || ! command -v apt-get >/dev/null 2>&1 ||
    { [ -n "$sudo" ] && ! command -v sudo >/dev/null 2>&1; }; then
    "$check" need "$want"
    exit 1
fi
echo "missing packages, now installed (SETUP=no: not): ${sudo:+sudo }apt-get install $missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
$sudo env DEBIAN_FRONTEND=noninteractive \
    sh -c "apt-get update -q && apt-get install -y -q --no-install-recommends $missing" \
    >"$log" 2>&1 || {
    tail -n 5 "$log" >&2
    echo "error: apt-get failed; please install these packages yourself: $missing" >&2
    exit 1
}

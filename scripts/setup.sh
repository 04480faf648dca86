#!/bin/sh
# Installs the missing packages that a make target needs, on Debian and Ubuntu. On other systems, or without
# root and sudo, prints the names of the packages and fails.
#
#     scripts/setup.sh build|test
set -eu

want=${1:?usage: scripts/setup.sh build|test}
missing=

# need PACKAGE CODE FLAGS: adds the package to the missing ones unless this C program builds
need() {
    printf '%s\n' "$2" | ${CC:-cc} -xc - -o /dev/null $3 2>/dev/null || missing="$missing $1"
}

command -v "${CC:-cc}" >/dev/null 2>&1 || missing="$missing gcc"
need libc6-dev '#include <stdio.h>
#include <linux/limits.h>
int main(void) { return 0; }' '-fopenmp -lm'
if [ "$want" = test ]; then
    need libcurl4-openssl-dev '#include <curl/curl.h>
int main(void) { return !curl_version(); }' -lcurl
    need libblosc-dev '#include <blosc.h>
int main(void) { return !blosc_get_version_string(); }' -lblosc
    need libssl-dev '#include <openssl/evp.h>
int main(void) { return !EVP_sha256(); }' -lcrypto
    mpi="$(mpicc --showme:compile 2>/dev/null || :) $(mpicc --showme:link 2>/dev/null || :)"
    need libopenmpi-dev '#include <mpi.h>
int main(void) { return MPI_Finalize(); }' "$mpi"
    command -v mpirun >/dev/null 2>&1 || missing="$missing openmpi-bin"
    command -v python3 >/dev/null 2>&1 || missing="$missing python3"
    command -v openssl >/dev/null 2>&1 || missing="$missing openssl"
fi
[ -n "$missing" ] || exit 0

sudo=
[ "$(id -u)" -eq 0 ] || sudo=sudo
if ! command -v apt-get >/dev/null 2>&1 || { [ -n "$sudo" ] && ! command -v sudo >/dev/null 2>&1; }; then
    echo "error: please install these packages (Debian names):$missing" >&2
    exit 1
fi
echo "installing:$missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
$sudo env DEBIAN_FRONTEND=noninteractive \
    sh -c "apt-get update -q && apt-get install -y -q --no-install-recommends $missing" \
    >"$log" 2>&1 || {
    tail -n 5 "$log" >&2
    echo "error: apt-get failed; please install these packages yourself:$missing" >&2
    exit 1
}

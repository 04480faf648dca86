#!/bin/sh
# Installs what a make target needs and this machine lacks, after naming it: packages of Debian and Ubuntu, and for tests the
# Python packages of requirements.txt, where python3 has not all of them, into a virtual environment: build/python. test-all
# adds PyTorch (for CPUs, or where that index is not reached PyPI's, 7 GB), transformers and lm_eval where 10 GB are free:
# build/hf. SETUP=no: nothing is installed.
#
# On other systems, without root and sudo, or with SETUP=no, prints a line for each missing program or library and fails. Of
# Python packages that cannot be installed it prints one line: tests skip what needs them.
#
#     scripts/setup.sh build|test|test-all
. "$(dirname "$0")/shell/help.sh"
set -eu

UV=0.13.9 # installs Python packages
want=${1:-}
case $want in
build | test | test-all) ;;
*) die "usage: scripts/setup.sh build|test|test-all" ;;
esac
check=$(dirname "$0")/check.sh requirements=$(dirname "$0")/requirements.txt

# install PACKAGES...: by apt-get
install() {
    sudo=
    [ "$(id -u)" -eq 0 ] || sudo=sudo
    if [ "${SETUP:-}" = no ] || ! command -v apt-get >/dev/null 2>&1 ||
        { [ -n "$sudo" ] && ! command -v sudo >/dev/null 2>&1; }; then
        "$check" need "${want%-all}"
        return
    fi
    echo "missing packages, now installed (SETUP=no: not): ${sudo:+sudo }apt-get install $*"
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    $sudo env DEBIAN_FRONTEND=noninteractive \
        sh -c "apt-get update -q && apt-get install -y -q --no-install-recommends $*" \
        >"$log" 2>&1 || {
        tail -n 5 "$log" >&2
        die "apt-get failed; please install these packages yourself: $*"
    }
}

# has PYTHON PACKAGES: it finds all of them
has() { "$1" -c 'import sys, importlib.util as i; sys.exit(None in map(i.find_spec, sys.argv[1:]))' $2 2>/dev/null; }

# whole FOLDER PACKAGES: the environment has them in the versions of requirements.txt. The copy of that is the last file of an
# environment to be written: without it the installation was interrupted
whole() { cmp -s "$requirements" "$1/requirements.txt" && has "$1/bin/python3" "$2"; }

# environment FOLDER PACKAGES: makes it, unless it is whole
environment() {
    mkdir -p build
    exec 9>"$1.lock" # of two makes in this folder one waits for the other
    flock 9
    if whole "$1" "$2"; then return; fi
    echo "missing Python packages, now installed in $1 (SETUP=no: not):" $2
    pip="$1/bin/pip --disable-pip-version-check install -q --retries 1 -c $requirements"
    uv="$1/bin/uv pip install -q --no-cache --python $1/bin/python3 -c $requirements" # unpacks in a fifth of pip's time
    {
        rm -f "$1/requirements.txt" && python3 -m venv --clear "$1" && {
            $pip "uv==$UV" || uv=$pip
            [ "$1" != build/hf ] || $uv --index-url https://download.pytorch.org/whl/cpu torch || :
            $uv $2 || $pip $2
        } && cp "$requirements" "$1"
    } >"$1.log" 2>&1 || {
        rm -rf "$1"
        echo "these packages could not be installed, and tests will skip what needs them: $(grep . "$1.log" | tail -n 1)"
        return 1
    }
}

# room: for PyTorch and its wheels
room() {
    [ "$(df -Pk . | awk 'NR == 2 { print $4 }')" -ge $((10 << 20)) ] && return
    echo "less than 10 GB are free here: PyTorch, transformers and lm_eval are not installed, and tests will skip what needs them"
    return 1
}

missing=$("$check" packages "${want%-all}" | tr ' ' '\n' | sort -u | tr '\n' ' ')
missing=$(echo $missing)
[ -z "$missing" ] || install $missing
[ "$want" != build ] && [ "${SETUP:-}" != no ] || exit 0
packages=$(sed -n 's/==.*//p' "$requirements")
small=$(echo "$packages" | grep -vxE 'torch|transformers|lm_eval|accelerate|pytablewriter|peft')
if [ "$want" = test-all ]; then
    if has python3 "$packages" || whole build/hf "$packages" || { room && environment build/hf "$packages"; }; then exit 0; fi
fi
has python3 "$small" || whole build/hf "$packages" || environment build/python "$small" || :

#!/bin/sh
# What this machine has of the software that train_fox uses, what is missing, and the command that installs it. Installs
# nothing.
#
#     scripts/check.sh                            all of it (make check); exit code 1 if the CPU trainer cannot be built
#     scripts/check.sh need build|test|gpu        a line for each missing thing, and then exit code 1
#     scripts/check.sh packages build|test        names of missing Debian packages, for setup.sh
#
# build: `make quickstart`; test: `make test`; gpu: the GPU trainer on this machine's GPU. CC, NVCC, CUDA_HOME, NCCL_HOME and
# PYTHON are those of the Makefile.
. "$(dirname "$0")/shell/help.sh"
set -u
mode=${1:-all} wanted=${2:-}
CC=${CC:-cc} PYTHON=${PYTHON:-python3}
NVCC=${NVCC:-$([ -n "${CUDA_HOME:-}" ] && echo "$CUDA_HOME/bin/nvcc" || command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
cuda=${NVCC%/*}/..
oldest_cuda=12.5 oldest_nccl=2.27
code=0
case $mode:$wanted in
all: | need:build | need:test | need:gpu | packages:build | packages:test) ;;
*) die "usage: scripts/check.sh [need build|test|gpu | packages build|test]" ;;
esac

has() { command -v "$1" >/dev/null 2>&1; }
compiles() { printf '%s\n' "$1" | $CC -xc - -o /dev/null $2 2>/dev/null; } # CODE FLAGS
first_line() { "$@" 2>/dev/null | sed -n 1p; }
older() { [ "$1" != "$2" ] && [ "$(printf '%s\n' "$1" "$2" | sort -V | sed -n 1p)" = "$1" ]; }
# macro HEADER NAME FOLDERS...: a number that a header defines
macro() {
    header=$1 name=$2
    shift 2
    printf '#include <%s>\nvalue %s\n' "$header" "$name" | $CC -xc -E "$@" - 2>/dev/null | sed -n 's/^value \([0-9][0-9]*\)$/\1/p'
}

# install PACKAGES: the command for this machine
install() {
    sudo=$([ "$(id -u)" = 0 ] || echo 'sudo ')
    if has apt-get; then echo "${sudo}apt-get install $1"; else echo "install $1 (names of Debian)"; fi
}

# title GROUP TEXT: items of a group follow
title() {
    group=$1
    [ "$mode" != all ] || echo "$2"
}
# found NAME TEXT
found() { [ "$mode" != all ] || printf '  %-13s %s\n' "$1" "$2"; }
# missing NAME TEXT COMMAND [PACKAGES]
missing() {
    case $mode:$wanted:$group in
    all:*) printf '  %-13s MISSING: %s\n  %-13s %s\n' "$1" "$2" '' "$3" ;;
    need:"$group":* | need:test:build | need:gpu:build) echo "error: missing $1: $2: $3" >&2 ;;
    packages:"$group":* | packages:test:build) echo "${4:-}" ;;
    *) return ;;
    esac
    [ "$mode:$group" != all:build ] && [ "$mode" != need ] || code=1
}
# either NAME FOUND TEXT WHAT PACKAGES: found if FOUND is true, else missing
either() { if $2; then found "$1" "$3"; else missing "$1" "$4" "$(install "$5")" "$5"; fi; }

title build "the CPU trainer (make quickstart)"
either compiler "has ${CC%% *}" "$(first_line $CC --version)" "no C compiler '$CC'" gcc
openmp() {
    compiles '#include <omp.h>
#include <stdio.h>
#include <linux/limits.h>
int main(void) { return omp_get_max_threads() < 1; }' '-fopenmp -lm'
}
either OpenMP openmp "and the C library's headers" "a C program with OpenMP does not compile" "gcc libc6-dev"
either make "has make" "$(first_line make --version)" "no make" make

title test "all tests (make test), data/longcrawl64"
# library NAME PACKAGE CODE FLAGS
library() {
    if compiles "$3" "$4"; then
        found "$1" "the library and its headers"
    else
        missing "$1" "a program that uses it does not compile" "$(install "$2")" "$2"
    fi
}
library libcurl libcurl4-openssl-dev '#include <curl/curl.h>
int main(void) { return !curl_version(); }' -lcurl
library c-blosc libblosc-dev '#include <blosc.h>
int main(void) { return !blosc_get_version_string(); }' -lblosc
library OpenSSL libssl-dev '#include <openssl/evp.h>
int main(void) { return !EVP_sha256(); }' -lcrypto
either openssl "has openssl" "$(first_line openssl version)" "no program openssl" openssl
either "C++ compiler" "has c++" "which compiles the headers as C++17" "no c++" g++
either xz "has xz" "which packs corpora" "no program xz" xz-utils
either Python "has python3" "$(first_line python3 --version)" "no python3" python3
venv() { python3 -c 'import ensurepip' >/dev/null 2>&1; }
# without these tests skip what needs Python packages, or several hosts
[ "$mode" = need ] || {
    either venv venv "which makes build/python" "no virtual environments of Python" python3-venv
    either ip "has ip" "which makes hosts for tests" "no program ip" iproute2
}
mpi="$(mpicc --showme:compile 2>/dev/null || :) $(mpicc --showme:link 2>/dev/null || :)"
library OpenMPI libopenmpi-dev '#include <mpi.h>
int main(void) { return MPI_Finalize(); }' "$mpi"
either mpirun "has mpirun" "$(first_line mpirun --version)" "no program mpirun, which starts several ranks" openmpi-bin

title gpu "the GPU trainer (make train_foxcu)"
by_pip="python3 -m venv ~/cuda && ~/cuda/bin/pip install"
other_ways="(no root; other ways: dev/INSTALL.md)"
toolkit=
if has "$NVCC"; then
    toolkit=$("$NVCC" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
    if older "$toolkit" $oldest_cuda; then
        missing CUDA "$NVCC is of CUDA $toolkit, and $oldest_cuda is the oldest that works" \
            "$by_pip 'cuda-toolkit[nvcc,cudart,cublas,nvtx,cccl]==13.0.*' $other_ways"
    else
        found CUDA "$toolkit: $NVCC"
    fi
    either "C++ compiler" "has g++" "$(first_line g++ --version)" "nvcc needs g++" g++
    lt=$(ls "$cuda"/include/cublasLt.h "$cuda"/targets/*/include/cublasLt.h /usr/include/cublasLt.h 2>/dev/null | sed -n 1p)
    if [ -n "$lt" ]; then
        lt=${lt%/*}
        found cuBLAS "$(macro cublasLt.h CUBLAS_VER_MAJOR -I"$lt").$(macro cublasLt.h CUBLAS_VER_MINOR -I"$lt"): $lt"
    else
        missing cuBLAS "no cublasLt.h beside $NVCC" "$by_pip 'cuda-toolkit[cublas]==$toolkit.*' $other_ways"
    fi
else
    missing CUDA "no nvcc in PATH, CUDA_HOME or /usr/local/cuda" \
        "$by_pip 'cuda-toolkit[nvcc,cudart,cublas,nvtx,cccl]==13.0.*' $other_ways"
fi
gpus=$(nvidia-smi --query-gpu=compute_cap,name,memory.total --format=csv,noheader 2>/dev/null | sed -n '/^[0-9]/p')
driver=$(nvidia-smi 2>/dev/null | sed -n 's/.*Driver Version: *\([0-9.]*\).*CUDA Version: *\([0-9.]*\).*/\1 \2/p')
if [ -z "$driver" ]; then
    missing driver "nvidia-smi finds none" \
        "$(install nvidia-open), from NVIDIA's repository (dev/INSTALL.md); containers: docker --gpus all, apptainer --nv"
elif [ -n "$toolkit" ] && older "${driver#* }" "${toolkit%%.*}.0"; then
    missing driver "${driver% *} runs programs of CUDA ${driver#* } at most, and $NVCC makes those of $toolkit" \
        "$(install nvidia-open), or build with CUDA ${driver#* } (dev/INSTALL.md)"
else
    found driver "${driver% *}, for CUDA up to ${driver#* }"
fi
if [ -z "$gpus" ]; then
    missing GPU "nvidia-smi lists none" "./train_fox trains on the CPU; ./train_fox --dry-run --gpu NAME plans for a GPU"
else
    good=$(echo "$gpus" | sed -n 's/^\([89]\|[1-9][0-9]\)\.[0-9], *//p')
    if [ -n "$good" ]; then
        capabilities=$(echo "$gpus" | sed 's/,.*//' | sort -u | tr '\n' ' ')
        found GPU "$(echo "$good" | sed -n 1p); $(echo "$gpus" | wc -l) of compute capability $capabilities"
    else
        old=$(echo "$gpus" | sed -n 's/^\([^,]*\), *\([^,]*\),.*/\2 has compute capability \1/p' | sed -n 1p)
        missing GPU "$old, and bf16 needs 8.0" "./train_fox trains on the CPU"
    fi
fi

title ranks "several GPUs (make train_foxcu USE_NCCL=1 USE_MPI=1)"
nccl="-I${NCCL_HOME:-$cuda}/include -I$cuda/include"
version=$(macro nccl.h NCCL_MAJOR $nccl).$(macro nccl.h NCCL_MINOR $nccl)
if [ "$version" = . ]; then
    missing NCCL "no nccl.h in the compiler's path or NCCL_HOME" "$by_pip 'nvidia-nccl-cu13==2.28.*' $other_ways"
elif older "$version" $oldest_nccl; then
    missing NCCL "$version is older than $oldest_nccl" "$by_pip 'nvidia-nccl-cu13==2.28.*' $other_ways"
else
    found NCCL "$version"
fi

[ "$mode" = all ] || exit $code
title optional "not needed"
cudnn=$(macro cudnn.h CUDNN_MAJOR -I"$cuda/include").$(macro cudnn.h CUDNN_MINOR -I"$cuda/include")
if [ "$cudnn" = . ]; then
    missing cuDNN "no cudnn.h: --attention cudnn (USE_CUDNN=1) is all that uses it" "dev/INSTALL.md"
else
    found cuDNN "$cudnn"
fi
packages="numpy matplotlib tokenizers pyarrow zstandard"
# finds them without importing them, which takes a second
has_packages() { "$1" -c 'import sys, importlib.util as i; sys.exit(None in map(i.find_spec, sys.argv[1:]))' $packages >/dev/null 2>&1; }
if has_packages build/python/bin/python || has_packages "$PYTHON"; then
    found scripts/ "what its Python uses"
else
    missing scripts/ "Python packages of make_shards.py and compare.py" "$PYTHON -m venv build/python && build/python/bin/pip install -c scripts/requirements.txt $packages"
fi
exit $code

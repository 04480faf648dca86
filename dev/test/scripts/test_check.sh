#!/usr/bin/env bash
# scripts/check.sh and setup.sh on machines that lack things: programs in a folder that is all of PATH. The compiler there
# accepts programs but for the headers that MISSING names; apt-get writes down what it was asked for.
cd "$(dirname "$0")/../../.." || exit 1
scratch=$PWD/build/test/check
. dev/test/check.sh
unset PYTHON # check.sh looks for packages in it
mkdir -p "$scratch/all" "$scratch/bin"
for tool in sh sed sort tr id ls head tail env mktemp rm wc cat grep dirname mkdir flock cmp cp awk; do ln -s "$(command -v $tool)" "$scratch/all/"; done

# program NAME TEXT: a program of the machines, which prints
program() { printf '#!/bin/sh\n%s\n' "$2" >"$scratch/all/$1" && chmod +x "$scratch/all/$1"; }
program cc 'case $* in --version) echo "cc 12.2"; exit ;; esac
code=$(cat)
for header in $MISSING; do case $code in *"$header"*) exit 1 ;; esac; done
case $* in *-E*) echo "$code" | sed "s/^value NCCL_MAJOR/value 2/; s/^value NCCL_MINOR/value ${NCCL_MINOR:-28}/; s/^value CU[A-Z_]*/value 13/" ;; esac'
for name in make openssl mpirun g++ c++ xz ip; do program $name "echo $name 1.0"; done
# python3 has the packages in $HAS, or all of them. An environment that it makes has all, and a pip that runs $PIP and
# installs uv
program python3 'case $* in
*find_spec*) shift 2; for name; do case " ${HAS-$*} " in *" $name "*) ;; *) exit 1 ;; esac; done ;;
*ensurepip*) [ ! "$NO_VENV" ] ;;
*"-m venv"*) echo "venv $4" >>"$LOG"; mkdir -p "$4/bin"; cp "$TOOLS/pip" "$4/bin"; cp "$TOOLS/mpicc" "$4/bin/python3" ;;
*) echo python3 1.0 ;;
esac'
program pip 'echo "${0##*/} $*" >>"$LOG"; eval "$PIP"; case $* in *uv==*) cp "$0" "${0%pip}uv" ;; esac'
export TOOLS=$scratch/all
program mpicc ''
program nvcc 'echo "Cuda compilation tools, release ${CUDA:-13.0}, V${CUDA:-13.0}.88"'
program nvidia-smi 'case $* in
*query*) echo "${EXCUSE:-${CAPABILITY:-9.0}, NVIDIA H100 80GB HBM3, 81559 MiB}" ;;
*) echo "| NVIDIA-SMI 580.95 Driver Version: 580.95.05 CUDA Version: ${DRIVER:-13.0} |" ;;
esac'
program df 'echo "Filesystem 1024-blocks Used Available Capacity Mounted on
/dev/vda 1 1 ${FREE:-20000000} 1% /"'
program sudo 'exec "$@"'
program apt-get 'echo "$*" >>"$LOG"'
mkdir -p "$scratch/all/../include" && touch "$scratch/include/cublasLt.h"
export LOG=$scratch/apt.log

# machine "PROGRAMS..." COMMAND...: runs the command on a machine without these programs
machine() {
    rm -rf "$scratch/bin"
    cp -a "$scratch/all" "$scratch/bin"
    for name in $1; do rm "$scratch/bin/$name"; done
    shift
    env -u CC -u NVCC -u CUDA_HOME -u NCCL_HOME PATH="$scratch/bin" "$@"
}
line() { sed -n "/^  $1 /{N;p;}" "$scratch/stdout"; }

check "all is there" machine "" scripts/check.sh
if grep MISSING "$scratch/stdout" | grep -v cuDNN; then fail "something is missing"; else pass; fi
for part in "13.0: $scratch/bin/nvcc" "580.95.05, for CUDA up to 13.0" "NVIDIA H100 80GB HBM3, 81559 MiB; 1 of compute capability 9.0"; do
    said "$part"
done
for group in build test gpu; do
    check "need $group" machine "" scripts/check.sh need $group
    equals "" "$(cat "$scratch/stderr")"
done

# the packages of scripts/ may be in the environment that the pages and the scripts' errors name
mkdir -p "$scratch/environment/build/python/bin"
check "no packages" machine "python3" env -C "$scratch/environment" "$PWD/scripts/check.sh"
said "python3 -m venv build/python && build/python/bin/pip install -c scripts/requirements.txt numpy"
cp "$TOOLS/mpicc" "$scratch/environment/build/python/bin/python"
check "in build/python" machine "python3" env -C "$scratch/environment" "$PWD/scripts/check.sh"
said "what its Python uses"

# what is missing, with the command; make check fails only where the CPU trainer cannot be built
check "no CUDA, no driver" machine "nvcc nvidia-smi" env NVCC="$scratch/none" scripts/check.sh
said "MISSING: no nvcc in PATH, CUDA_HOME or /usr/local/cuda"
said "pip install 'cuda-toolkit[nvcc,cudart,cublas,nvtx,cccl]==13.0.*'"
said "MISSING: nvidia-smi finds none"
said "apt-get install nvidia-open"
if machine "cc" scripts/check.sh >"$scratch/stdout"; then fail "without a compiler"; else pass; fi
said "MISSING: no C compiler 'cc'"
said "apt-get install gcc"
if MISSING=omp.h machine "" scripts/check.sh >"$scratch/stdout"; then fail "without OpenMP"; else pass; fi
said "apt-get install gcc libc6-dev"
MISSING="curl.h blosc.h" check "libraries" machine "mpirun" scripts/check.sh
for package in libcurl4-openssl-dev libblosc-dev openmpi-bin; do said "apt-get install $package"; done

# too old
gpu() { machine "" env "$1" scripts/check.sh need gpu; }
dies "error: missing GPU: nvidia-smi lists none" gpu EXCUSE="No devices were found"
dies "is of CUDA 12.4, and 12.5 is the oldest" gpu CUDA=12.4
check "CUDA 12.8 with the driver of 12.6" machine "" env CUDA=12.8 DRIVER=12.6 scripts/check.sh need gpu
dies "580.95.05 runs programs of CUDA 12.4 at most, and $scratch/bin/nvcc makes those of 13.0" gpu DRIVER=12.4
dies "NVIDIA H100 80GB HBM3 has compute capability 7.5, and bf16 needs 8.0" gpu CAPABILITY=7.5
check "12.0" gpu CAPABILITY=12.0
check "NCCL" machine "" env NCCL_MINOR=26 scripts/check.sh
said "MISSING: 2.26 is older than 2.27"
if NCCL_HOME=$scratch/none make build/gpu/flags >"$scratch/stdout" 2>&1; then fail "NCCL_HOME without NCCL"; else pass; fi
said "NCCL_HOME=$scratch/none: has no include/nccl.h"
dies "missing C++ compiler: nvcc needs g++" machine "g++" scripts/check.sh need gpu

dies "error: usage: scripts/setup.sh build|test|test-all" scripts/setup.sh tests
# setup.sh installs after it has said what
unset SETUP # of `SETUP=no make test`
export MISSING="curl.h openssl/evp.h"
check "setup.sh" machine "openssl ip" scripts/setup.sh test
said "missing packages, now installed (SETUP=no: not): "
said "apt-get install iproute2 libcurl4-openssl-dev libssl-dev openssl"
same <(cat "$LOG") <(echo "update -q
install -y -q --no-install-recommends iproute2 libcurl4-openssl-dev libssl-dev openssl")
rm "$LOG"
check "all that make quickstart needs is there" machine "openssl" scripts/setup.sh build
equals "" "$(cat "$scratch/stdout")"

# with SETUP=no, or without a way to install: one line for each thing, and nothing is installed
refused() {
    if machine "$@" >"$scratch/stdout" 2>"$scratch/stderr"; then fail "exit code 0: $*"; else pass; fi
    equals 3 "$(grep -c '^error: missing ' "$scratch/stderr")"
    equals 3 "$(wc -l <"$scratch/stderr")"
    said "error: missing libcurl: a program that uses it does not compile: " stderr
    if [ -e "$LOG" ]; then fail "something is installed: $(cat "$LOG")"; else pass; fi
}
refused "openssl" env SETUP=no scripts/setup.sh test
refused "openssl apt-get" scripts/setup.sh test
said "install libcurl4-openssl-dev (names of Debian)" stderr
unset MISSING

# Python packages: the environment is made once, again where that was interrupted, and where requirements.txt has changed
mkdir -p "$scratch/tree"
cp -r scripts "$scratch/tree"
# packages WANT HAS [VARIABLE...]: setup.sh on a machine whose python3 has these packages; what it did is in $LOG
packages() {
    rm -f "$LOG"
    machine "" env -C "$scratch/tree" HAS="$2" "${@:3}" scripts/setup.sh $1 >"$scratch/stdout" 2>"$scratch/stderr" || fail "setup.sh $1: exit code $?"
    equals "" "$(cat "$scratch/stderr")"
    touch "$LOG"
}
small="matplotlib numpy tensorboard tokenizers huggingface_hub pyarrow zstandard safetensors"
packages test "$small" && equals "" "$(cat "$LOG" "$scratch/stdout")"
packages build "" && equals "" "$(cat "$LOG" "$scratch/stdout")"
packages test "" SETUP=no && equals "" "$(cat "$LOG" "$scratch/stdout")"
packages test "numpy" PIP='echo error: no network >&2; exit 1' && said "$small"
said "could not be installed, and tests will skip what needs them: error: no network"
equals "no environment" "$(ls -d "$scratch/tree/build/python" 2>/dev/null || echo no environment)"
machine "" env -C "$scratch/tree" HAS= PIP='kill -9 $PPID' scripts/setup.sh test >"$scratch/stdout" 2>&1
for reason in "interrupted" "requirements.txt has changed"; do
    packages test "numpy" && equals "venv build/python" "$(head -n 1 "$LOG")"
    equals "$small" "$(sed -n 's/^uv .*requirements.txt //p' "$LOG")"
    packages test "numpy" && equals "" "$(cat "$LOG" "$scratch/stdout")"
    echo "# a comment" >>"$scratch/tree/scripts/requirements.txt"
done
echo "# without uv" >>"$scratch/tree/scripts/requirements.txt"
packages test "numpy" PIP='case $* in *uv==*) exit 1 ;; esac' && equals "$small" "$(sed -n '$s/^pip .*requirements.txt //p' "$LOG")"
packages test-all "$small" FREE=10000000 && said "less than 10 GB are free here" && equals "" "$(cat "$LOG")"
packages test-all "$small" && said "installed in build/hf"
equals "transformers torch lm_eval accelerate" "$(grep -oE 'torch$|transformers|lm_eval|accelerate' "$LOG" | sort -ru | xargs)"
packages test-all "" && equals "" "$(cat "$LOG" "$scratch/stdout")"
packages test "" && equals "" "$(cat "$LOG" "$scratch/stdout")"
packages test "$small" NO_VENV=1 && equals "install -y -q --no-install-recommends python3-venv" "$(tail -n 1 "$LOG")"
rm "$LOG"

# gpu_quickstart.sh stops before it builds or downloads
if machine "nvidia-smi" scripts/gpu_quickstart.sh >"$scratch/stdout" 2>"$scratch/stderr"; then fail "without a GPU"; else pass; fi
said "error: missing driver: nvidia-smi finds none" stderr
said "error: missing GPU: nvidia-smi lists none" stderr
equals "" "$(cat "$scratch/stdout")"
report

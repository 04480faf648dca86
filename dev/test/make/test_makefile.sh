#!/usr/bin/env bash
# The build. ARCHS selects the targets of the GPU build: 90 becomes sm_90a, and PTX of the sm_80 kernels is always
# included. The Hopper header refuses to compile for plain sm_90. Two makes may build in one folder, whose path may have
# spaces. Needs neither a GPU nor nvcc.
scratch=build/test/makefile
. dev/test/check.sh
unset MAKEFLAGS MAKELEVEL

# targets ARCHS WANT: the code=... arguments of the command that builds the trainer, in order
targets() {
    check "make -n ARCHS='$1'" make -n train_foxcu -W train_fox.cu NVCC=nvcc ARCHS="$1"
    equals "$2" "$(grep '^nvcc' "$scratch/stdout" | grep -o 'code=[a-z]*_[0-9a-z]*' | sed 's/code=//' | tr '\n' ' ' | sed 's/ $//')"
}

targets "80 90" "sm_80 sm_90a compute_80"
targets "90" "sm_90a compute_80"
targets "90a" "sm_90a compute_80"
targets "80 86 89 90 100 103 120" "sm_80 sm_86 sm_89 sm_90a sm_100 sm_103 sm_120 compute_80"

# script PATH: makes a program of standard input
script() { { echo '#!/bin/sh' && cat; } >"$1" && chmod +x "$1"; }

# An edit of a test that is part of a program of several builds it again
for source in trainer/trainer llmc/checkpoint model/model; do
    program=build/test/${source#*/}_tests_sanitized
    check "make -pq" sh -c 'make -pq '$program' || [ $? = 1 ]'
    grep "^$program:" "$scratch/stdout" | tr ' ' '\n' >"$scratch/needed"
    for name in $(sed -n 's/^#include ".*\(test_.*\.c\)"/\1/p' dev/test/${source}_tests.c); do said "/$name" needed; done
done

# The GPUs that nvidia-smi lists. One that fails says so on standard output.
mkdir "$scratch/bin"
architectures() { # WANT
    check "make -n" env PATH="$PWD/$scratch/bin:$PATH" make -n train_foxcu -W train_fox.cu NVCC='nvcc -ccbin g++'
    equals "$1" "$(grep '^nvcc' "$scratch/stdout" | grep -o 'code=sm_[0-9a-z]*' | xargs)"
}
script "$scratch/bin/nvcc" </dev/null
script "$scratch/bin/nvidia-smi" <<<'printf "9.0\n12.0\n9.0\n"'
architectures "code=sm_120 code=sm_90a"
script "$scratch/bin/nvidia-smi" <<<'echo "NVIDIA-SMI has failed because it could not reach driver 13.0"; exit 9'
architectures "code=sm_80 code=sm_90a"
script "$scratch/bin/nvidia-smi" <<<'printf "No devices were found\n"; exit 6'
architectures "code=sm_80 code=sm_90a"

# The make that builds a test asks the shell nothing again
script "$scratch/bin/mpicc" <<<"echo >>'$PWD/$scratch/asked'"
check "make -n" env PATH="$PWD/$scratch/bin:$PATH" make -n run/build/test/test_numbers_sanitized
said "PROBED=1"
equals 2 "$(wc -l <"$scratch/asked")"
rm "$scratch/bin/mpicc"

# Libraries in a source folder with a space in its path, which nvcc passes on to a shell
tree="$scratch/a tree"
mkdir -p "$tree/nccl/include" "$tree/cuda/bin" "$tree/cuda/lib"
touch "$tree/nccl/include/nccl.h" "$tree/cuda/lib/libcublasLt.so.13"
cp -r Makefile llmc train_fox.c train_fox.cu "$tree"
check "a path with a space" make -n -C "$tree" train_foxcu CUDA_HOME=cuda NCCL_HOME=nccl NEED_NVCC=
for path in cuda/bin/../lib nccl/lib; do said "-Xlinker '-rpath=\"$PWD/$tree/$path\"'"; done

# A second make, in a compiler of the first that has written half of its output; and as the first renames a file
script "$tree/cc" <<'END'
for word; do case $word in -E) exec cc "$@" ;; esac; done
while [ "$1" != -o ]; do shift; done
echo half >"$2"
[ "$SECOND" ] || SECOND=1 make CC='./cc -g' train_fox
[ "$SECOND" ] || cp train_fox seen
echo whole >"$2"
END
check "two makes, while the first compiles" make -C "$tree" CC='./cc -g' train_fox
equals "whole whole" "$(xargs <"$tree/seen") $(xargs <"$tree/train_fox")"
mkdir "$tree/bin"
script "$tree/bin/mv" <<END
[ "\$SECOND" ] || SECOND=1 make CC='./cc -g' train_fox || exit
exec $(command -v mv) "\$@"
END
rm -r "$tree/build" "$tree/train_fox"
check "two makes, while the first renames" env PATH="$PWD/$tree/bin:$PATH" make -C "$tree" CC='./cc -g' train_fox
equals "whole" "$(cat "$tree/train_fox")"
equals "" "$(find "$tree" -name '*.new')"

# Without nvcc one line says what to install.
for target in train_foxcu test_foxcu cuda-check; do
    make $target NVCC=/nowhere/nvcc >/dev/null 2>"$scratch/stderr"
    equals 2 $?
    equals 1 "$(grep -c '^error: nvcc was not found: install the CUDA Toolkit, 12.5 or later .* or set NVCC=' "$scratch/stderr")"
    equals 1 "$(grep -cv '^make' "$scratch/stderr")"
done

# preprocess ARCH DEFINE...: preprocesses the Hopper header as the device compiler does; needs no CUDA headers
preprocess() { cc -E -x c++ -D__CUDA_ARCH__="$1" "${@:2}" llmc/cuda/mma_sm90.cuh; }
preprocess 900 >/dev/null 2>"$scratch/stderr"
said "the Hopper kernels need sm_90a" stderr
for target in "900 -D__CUDA_ARCH_FEAT_SM90_ALL" 800 890 1000 1030 1200; do
    preprocess $target >/dev/null 2>"$scratch/stderr"
    equals 0 "$(grep -c "Hopper kernels need" "$scratch/stderr")"
done

# What make cuda-check reads of ptxas: each kernel is held to the limit, on each architecture.
spills() { printf "ptxas info    : Compiling entry function '%s' for '%s'\n    8 bytes stack frame, %s bytes spill stores, 4 bytes spill loads\n" "$@"; }
spills _Z6kernelv sm_80 40 _Z6kernelv sm_120 4 _Z13ssd_dq_kernelILi1EEv sm_100 44 >"$scratch/ptxas.txt"
check "few spills" dev/test/check_ptxas.sh "$scratch/ptxas.txt"
said "3 kernels: none spills more than 40 bytes"
spills _Z6kernelv sm_80 40 _Z6kernelv sm_120 44 _Z13ssd_dq_kernelILi1EEv sm_120 48 >"$scratch/ptxas.txt"
dev/test/check_ptxas.sh "$scratch/ptxas.txt" >"$scratch/stdout" 2>&1
equals 1 $?
said "_Z6kernelv, sm_120: 44 bytes spilled"
said "_Z13ssd_dq_kernelILi1EEv, sm_120: 48 bytes spilled"
report

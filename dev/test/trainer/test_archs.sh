#!/usr/bin/env bash
# ARCHS selects the targets of the GPU build: 90 becomes sm_90a, and PTX of the sm_80 kernels is always
# included. The Hopper header refuses to compile for plain sm_90. Needs neither a GPU nor nvcc.
scratch=build/test/archs
. dev/test/check.sh
mkdir -p "$scratch"
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
report

#!/usr/bin/env bash
# What ARCHS makes of the GPU build: Hopper's code is always sm_90a, PTX of the sm_80 kernels always goes along, and a
# compiler that is asked for plain sm_90 all the same stops. Needs neither a GPU nor nvcc.
scratch=build/test/archs
. dev/test/check.sh
mkdir -p "$scratch"
unset MAKEFLAGS MAKELEVEL

# targets ARCHS WANT: the code=... of the command that builds the trainer, in order
targets() {
    check "make -n ARCHS='$1'" make -n train_foxcu -W train_fox.cu NVCC=nvcc ARCHS="$1"
    equals "$2" "$(grep '^nvcc' "$scratch/stdout" | grep -o 'code=[a-z]*_[0-9a-z]*' | sed 's/code=//' | tr '\n' ' ' | sed 's/ $//')"
}

targets "80 90" "sm_80 sm_90a compute_80"
targets "90" "sm_90a compute_80"
targets "90a" "sm_90a compute_80"
targets "80 86 89 90 100 103 120" "sm_80 sm_86 sm_89 sm_90a sm_100 sm_103 sm_120 compute_80"

# preprocess ARCH DEFINE...: what the device compiler sees of the Hopper header; its CUDA headers may be missing
preprocess() { cc -E -x c++ -D__CUDA_ARCH__="$1" "${@:2}" llmc/cuda/mma_sm90.cuh; }
preprocess 900 >/dev/null 2>"$scratch/stderr"
said "the Hopper kernels need sm_90a" stderr
for target in "900 -D__CUDA_ARCH_FEAT_SM90_ALL" 800 890 1000 1030 1200; do
    preprocess $target >/dev/null 2>"$scratch/stderr"
    equals 0 "$(grep -c "Hopper kernels need" "$scratch/stderr")"
done
report

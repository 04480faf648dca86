#!/usr/bin/env bash
# What the GPU trainer $1 does without a GPU: --help, --version and --dry-run work, anything else is one line. On a
# machine with GPUs they are hidden.
scratch=build/test/without_gpu
. dev/test/check.sh
mkdir -p "$scratch"
export CUDA_VISIBLE_DEVICES=
trainer=$1

for help in -h --help; do
    check "$help" "$trainer" $help
    said "--warmup-tokens N"
done
check "--version" "$trainer" --version
for part in "$(basename "$trainer") " "CUDA " NCCL cuDNN MPI "GPU code sm_"; do said "$part"; done
check "--dry-run" "$trainer" --dry-run --model fox-pro-760m
said "759512640"
said "no GPU or no driver was found here"
for level in none qkv block; do said "--recompute $level"; done
equals "" "$(cat "$scratch/stderr")"
check "--dry-run with a sample" "$trainer" --dry-run --model fox-pro-760m --data none --sample-every 1 --generate 60000
said "a sample's state            9115.8 MiB"
check "--dry-run --ranks" "$trainer" --dry-run --model transformer-llama-360m --ranks 8 --recompute block
said "planned for recompute block"
dies "./train_fox" "$trainer" --model fox-pro-125m --bench 1
dies "which model?" "$trainer"
# recurrent models: exact parameter counts, and a sample's state
check "--dry-run deltanet" "$trainer" --dry-run --model deltanet-760m --data none --sample-every 1 --generate 100
said "757635072"
check "--dry-run mamba2" "$trainer" --dry-run --model mamba2-760m
said "780113664"
dies "heads of 128 channels, not 64" "$trainer" --dry-run --model deltanet-125m --set num_heads=12
dies "--attention cudnn: Mamba2ForCausalLM has no attention" "$trainer" --dry-run --model mamba2-125m --attention cudnn
report

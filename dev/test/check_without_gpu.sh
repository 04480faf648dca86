#!/usr/bin/env bash
# What the GPU trainer $1 does without a GPU: --help, --version and --dry-run work, anything else is one line. On a
# machine with GPUs they are hidden.
scratch=build/test/without_gpu
. dev/test/check.sh
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
for level in none fused qkv block; do said "--recompute $level"; done
equals "" "$(cat "$scratch/stderr")"
check "--dry-run with a sample" "$trainer" --dry-run --model fox-pro-760m --data none --sample-every 1 --generate 60000
said "samples, requests       8.90 GiB"
check "--dry-run --ranks" "$trainer" --dry-run --model transformer-llama-360m --ranks 8 --recompute block
said "planned for recompute block"

# The plan for a GPU of another machine, and the CPU trainer's: everything but samples and requests the same
planned() { "$@" --dry-run --gpu H100 | sed 's/activations, about/activations       /'; }
while read -r options; do
    planned "$trainer" $options | grep -v "samples, requests" >"$scratch/gpu"
    planned ./train_fox $options >"$scratch/cpu"
    check "$options" grep "^  activations  *[1-9]" "$scratch/gpu"
    same "$scratch/gpu" "$scratch/cpu"
done <<'END'
--model fox-pro-125m --micro-batch 2
--model fox-pro-125m --recompute qkv
--model fox-pro-760m --recompute block --ranks 8
--model fox-pro-760m --seq-len 65536
--model fox-pro-760m --fp8
--model fox-pro-760m --fp8 --ranks 8 --sequence-ranks 4
--model transformer-llama-360m --fp8 --micro-batch 2
--model fox-pro-760m --set num_kv_heads=6 --fp8 --recompute qkv
--model transformer-llama-360m --set num_kv_heads=4 --recompute block
--model fox-llama-360m
--model fox-pro-local-360m --micro-batch 2 --recompute qkv
--model transformer-pro-125m --set layer_types=attention:window=512:norope,attention --seq-len 65536 --recompute block
--model transformer-llama-760m --ranks 2
--model transformer-pro-360m --seq-len 2048 --micro-batch 4 --recompute qkv
--model fox-pro-nano --recompute block
--model transformer-llama-micro --set document_reset=true --recompute block
--model transformer-swa-micro --set document_reset=true --batch-tokens 6000 --micro-batch 3 --seq-len 1000
--model fox-pro-125m --seq-len 1Mi --batch-tokens 1Mi --recompute block --sequence-ranks 2
--model fox-pro-760m --ranks 8 --sequence-ranks 4 --recompute none --micro-batch 2
--model fox-pro-local-125m --seq-len 256Ki --batch-tokens 1Mi --ranks 4 --sequence-ranks 2 --recompute qkv
--model fox-pro-125m --set layer_types=attention,attention:rope --seq-len 256Ki --batch-tokens 256Ki --sequence-ranks 2
--model transformer-llama-760m --sequence-ranks 3 --recompute qkv --batch-tokens 960Ki --seq-len 61440
END
dies "--attention cudnn: these kernels have no --sequence-ranks: use --attention fox" \
    "$trainer" --dry-run --model transformer-pro-125m --attention cudnn --sequence-ranks 2
dies "--sequence-ranks 2: this model has no attention" "$trainer" --dry-run --model mamba2-125m --sequence-ranks 2
dies "--sequence-ranks 2: 1 rank cannot be groups" "$trainer" --model fox-pro-125m --bench 1 --sequence-ranks 2
check "--dry-run of a window" "$trainer" --dry-run config --model transformer-swa-760m
said '"window_size": 2048'
dies "--attention cudnn: these kernels have no window: use --attention fox" \
    "$trainer" --dry-run --model transformer-swa-760m --attention cudnn
dies "--fp8: A100 has compute capability 8.0, and FP8 begins with 8.9" \
    "$trainer" --dry-run --model fox-pro-125m --fp8 --gpu A100
dies "--fp8: Mamba2ForCausalLM has no GEMMs in FP8" "$trainer" --dry-run --model mamba2-125m --fp8
dies "--attention cudnn: these kernels have no document_reset: use --attention fox" \
    "$trainer" --dry-run --model transformer-pro-125m --set document_reset=true --attention cudnn
for model in fox-pro transformer-pro deltanet gated-deltanet hgrn2 mamba2 fox-gdn samba2 fox-pro-local transformer-pro-local; do
    check "$model, packed documents" "$trainer" --dry-run --model $model-125m --set document_reset=true
done
dies "./train_fox" "$trainer" --model fox-pro-125m --bench 1
dies "which model?" "$trainer"
# recurrent models: exact parameter counts, and a sample's state
check "--dry-run deltanet" "$trainer" --dry-run --model deltanet-760m --data none --sample-every 1 --generate 100
said "757635072"
check "--dry-run mamba2" "$trainer" --dry-run --model mamba2-760m
said "780113664"
check "--dry-run hgrn2" "$trainer" --dry-run --model hgrn2-760m --gpu H100
said "756820992"
dies "heads of 128 channels, not 64" "$trainer" --dry-run --model deltanet-125m --set num_heads=12
check "--dry-run gated-deltanet" "$trainer" --dry-run --model gated-deltanet-760m
said "771867258"
dies "heads of 128 keys, not 256: use ./train_fox" "$trainer" --dry-run --model gated-deltanet-125m --set head_dim=256
dies "heads of 128 or 256 values, not 512" "$trainer" --dry-run --model gated-deltanet-125m --set expand_v=4
dies "--attention cudnn: Mamba2ForCausalLM has no attention" "$trainer" --dry-run --model mamba2-125m --attention cudnn
report

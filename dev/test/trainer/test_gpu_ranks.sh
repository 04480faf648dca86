#!/usr/bin/env bash
# Tests ./train_foxcu under mpirun on two GPUs, and on four where there are as many: the same losses as on one GPU,
# --deterministic with the same bits, checkpoints that any number of ranks resumes, and a run that ends when one of its
# ranks does; the same of ranks that share sequences. PARTS="shared shared_evaluated ..." runs these parts alone. With
# one GPU ONE_GPU=1 takes build/gpu/train_fox_one_gpu, whose ranks share it (dev/test/one_gpu), and where there is no
# mpirun torchrun's variables.
scratch=build/test/gpu_ranks
. dev/test/check.sh

export OMP_NUM_THREADS=2
trainer=./train_foxcu killed_code=137
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | grep -cx '[0-9][0-9]*')
if [ "${ONE_GPU:-}" ]; then
    trainer=build/gpu/train_fox_one_gpu
elif [ "$gpus" -lt 2 ]; then
    skip "fewer than two GPUs: make build/gpu/train_fox_one_gpu, and set ONE_GPU=1"
    report
fi
command -v mpirun >/dev/null || killed_code=1
make_files

# A small model with head size 64; 20 steps of 12 sequences.
tiny="--model fox-pro-nano --set num_hidden_layers=2 --set intermediate_size=72 --seq-len 256 --batch-tokens 3072
    --micro-batch 1 --warmup-tokens 12288 --deterministic --shuffle --data $scratch/files/shards/text.bin"
# on RANKS COMMAND...
on() {
    local ranks=$1
    shift
    if [ "$ranks" = 1 ]; then
        CUDA_VISIBLE_DEVICES=0 "$@"
    elif command -v mpirun >/dev/null; then
        mpirun --bind-to none -np "$ranks" "$@"
    else
        launch "$ranks" "$@"
    fi
}
# launch RANKS COMMAND...: the exit code of rank 0
launch() {
    local ranks=$1 code=0 rank pids=() port=$((20000 + RANDOM % 10000))
    for ((rank = 0; rank < ranks; rank++)); do
        WORLD_SIZE=$ranks RANK=$rank LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
            "${@:2}" &
        pids+=($!)
    done
    wait "${pids[0]}" || code=$?
    if [ $code = 0 ] || [ $code = 75 ]; then wait "${pids[@]:1}"; else kill -9 "${pids[@]:1}" 2>/dev/null; fi
    wait "${pids[@]:1}" 2>/dev/null
    return $code
}
# train RANKS OUT OPTION...
train() { on "$1" $trainer $tiny --max-tokens 61440 --lr 5e-3 --timeout 20 --out "$scratch/$2" "${@:3}"; }
resume() { on "$1" $trainer --resume --timeout 20 --out "$scratch/$2" "${@:3}"; }

# same_weights OUT OUT [STEP]: the checkpoints of step 20, or STEP, have the same bytes
same_weights() { same_bytes "${3:-20}" "$scratch/$1" "$scratch/$2"; }

same_losses() {
    check "one GPU" train 1 one
    check "two GPUs" train 2 two
    said "2 ranks with 6 micro-batches a step"
    check "which path moves gradients" grep -qE '"device":"[^"]*: [^"]*gradients by (copy engines|NCCL), ' "$scratch/two/log.jsonl"
    check "none on one GPU" sh -c '! grep -q "gradients by" "$1"' sh "$scratch/one/log.jsonl"
    near 2e-3 one two
    check "again" train 2 again
    same_weights two again
    check "--recompute block" train 2 block --recompute block
    same_weights two block
}

# --eval on two GPUs, which share nine sequences, and on one
evaluated() {
    for ranks in 1 2; do
        check "--eval on $ranks" on $ranks $trainer --init "$scratch/one/step_00000020" --deterministic \
            --eval "$scratch/eval$ranks.json" --val-data $scratch/files/shards/text.bin --seq-len 40 --val-tokens 360 \
            --micro-batch 2 --timeout 20
    done
    check "the same losses" "$python" -c 'import json, sys
one, two = (json.load(open(path)) for path in sys.argv[1:])
assert one["sequences"] == two["sequences"] == 9 and one["loss"] == two["loss"] and one["pruned"] == two["pruned"]' \
        "$scratch/eval1.json" "$scratch/eval2.json"
}

# trains_the_same NAME OPTION...: one rank and two have the same losses, and two that stop and go on the same bits
trains_the_same() {
    local name=$1 ranks
    shift
    for ranks in 1 2; do
        check "$name" train $ranks "$name$ranks" "$@"
    done
    near 2e-3 "${name}1" "${name}2"
    check "stop" train 2 "$name.stopped" "$@" --max-steps 7
    check "go on" resume 2 "$name.stopped"
    same_weights "${name}2" "$name.stopped"
}

# The gate's bias alone is the gate. A rank that kept its old biases would compute other bits than one that has read
# them from the checkpoint.
biases() { trains_the_same bias --set fgate_type=bias_only; }

# The embedding's gradient, with that of a tied lm_head, is complete only at the end of the backward pass.
tied() { trains_the_same tied --set tie_word_embeddings=true; }

# Layers of different kinds
stack() { trains_the_same stack --model fox-gdn-nano --set num_hidden_layers=4; }

# --fp8: scales are those of all ranks' batches, so after the same weights the same on any number of ranks.
in_fp8() {
    local ranks wide="--fp8 --set intermediate_size=80"
    if ! $trainer $tiny $wide --dry-run >/dev/null 2>&1; then
        skip "--fp8, which these GPUs do not have"
        return
    fi
    for ranks in 1 2; do
        check "--fp8 on $ranks" train $ranks fp8_$ranks $wide
        check "its first step" train $ranks fp8_first$ranks $wide --max-steps 1
        grep '"fp8"' "$scratch/fp8_first$ranks/step_00000001/trainer.json" >"$scratch/scales$ranks"
    done
    check "scales" test -s "$scratch/scales1"
    same "$scratch/scales1" "$scratch/scales2"
    near 5e-2 fp8_1 fp8_2
    check "again" train 2 fp8_again $wide
    same_weights fp8_2 fp8_again
    check "--fp8 to step 7" train 2 fp8_stopped $wide --max-steps 7
    check "resumed" resume 2 fp8_stopped
    same_weights fp8_2 fp8_stopped
    check "sequences on two" train 2 fp8_shared $wide --sequence-ranks 2
    near 5e-2 fp8_1 fp8_shared
    check "again" train 2 fp8_shared_again $wide --sequence-ranks 2
    same_weights fp8_shared fp8_shared_again
}

resumed() {
    check "stop on two" train 2 resumed --max-steps 7
    check "go on with one" resume 1 resumed --max-steps 13
    check "and with two" resume 2 resumed
    near 2e-3 one resumed
    check "stop on two" train 2 stopped --max-steps 7
    check "go on with two" resume 2 stopped
    same_weights two stopped
}

# Two GPUs that share each sequence: the losses of one GPU in every family, the same bits again and at every level of
# recomputation
shared() {
    for model in fox-pro fox-llama transformer-pro transformer-llama transformer-swa; do
        check "$model on one" train 1 "$model.1" --model $model-nano
        check "$model, sequences on two" train 2 "$model.2" --model $model-nano --sequence-ranks 2
        said "2 ranks in groups of 2, which share sequences: 128 tokens and 1 head a rank; groups with 12 micro-batches"
        near 2e-3 "$model.1" "$model.2"
    done
    check "its share of attention" grep -q '"attention_share": *0\.[5-9]' "$scratch/fox-pro.2/log.jsonl"
    for level in none fused qkv block; do
        check "--recompute $level" train 2 "shared.$level" --sequence-ranks 2 --recompute $level
        same_weights fox-pro.2 "shared.$level"
    done
    check "two sequences a micro-batch" train 2 shared.two --sequence-ranks 2 --micro-batch 2
    near 2e-3 fox-pro.1 shared.two
    check "a window" train 1 window.1 --set window_size=100
    check "a window, sequences on two" train 2 window.2 --set window_size=100 --sequence-ranks 2
    near 2e-3 window.1 window.2
    check "windows and RoPE by layer" train 1 layers.1 --set layer_types=attention:window=100,attention:rope
    check "these, sequences on two" train 2 layers.2 --set layer_types=attention:window=100,attention:rope --sequence-ranks 2
    near 2e-3 layers.1 layers.2
    check "packed documents" train 1 documents.1 --set document_reset=true
    check "packed documents, sequences on two" train 2 documents.2 --set document_reset=true --sequence-ranks 2
    near 2e-3 documents.1 documents.2
    check "bias_only on one" train 1 shared.bias1 --set fgate_type=bias_only
    check "bias_only on two" train 2 shared.bias2 --set fgate_type=bias_only --sequence-ranks 2
    near 2e-3 shared.bias1 shared.bias2
    check "stop" train 2 shared.bias.stopped --set fgate_type=bias_only --sequence-ranks 2 --max-steps 7
    check "go on" resume 2 shared.bias.stopped
    same_weights shared.bias2 shared.bias.stopped
    check "--bench" on 2 $trainer $tiny --bench 2 --sequence-ranks 2
    said "on 2 GPUs, 2 for a sequence"
}

# Sequences of several chunks (llmc/sequence/split.h)
shared_chunks() {
    check "a long sequence" "$python" -c 'import sys
sys.path.insert(0, "dev/test")
import cli_files
cli_files.shard(sys.argv[1], cli_files.tokens(4 * 65536 + 1, 257), vocab=257)' "$scratch/long.bin"
    local long="--seq-len 64Ki --batch-tokens 64Ki --max-tokens 1280Ki --lr 1e-3 --data $scratch/long.bin" model level
    for model in fox-pro transformer-llama; do
        # shellcheck disable=SC2086
        check "$model on one" train 1 "long.$model.1" --model $model-nano $long
        # shellcheck disable=SC2086
        check "$model in chunks on two" train 2 "long.$model.2" --model $model-nano $long --sequence-ranks 2
        near 2e-3 "long.$model.1" "long.$model.2"
    done
    for level in none block; do
        # shellcheck disable=SC2086
        check "again, --recompute $level" train 2 "long.$level" $long --sequence-ranks 2 --recompute $level
        same_weights long.fox-pro.2 "long.$level"
    done
    # without --deterministic ranks get the heads that balance the blocks of the step before
    local heads="--set num_heads=4 --set hidden_size=256 --set fgate_bias_init=true --set decay_time_min=2
        --set decay_time_max=65536"
    # shellcheck disable=SC2086
    check "heads that forget apart on one" train 1 assigned.1 $long $heads
    # shellcheck disable=SC2086
    check "heads assigned by their work" on 2 $trainer ${tiny/--deterministic/} $long $heads --timeout 20 \
        --out "$scratch/assigned.2" --sequence-ranks 2
    near 2e-3 assigned.1 assigned.2
    if $trainer $tiny --fp8 --set intermediate_size=80 --dry-run >/dev/null 2>&1; then
        for ranks in 1 2; do
            # shellcheck disable=SC2086
            check "--fp8 on $ranks" train $ranks long.fp8_$ranks $long --fp8 --set intermediate_size=80 --sequence-ranks $ranks
        done
        near 5e-2 long.fp8_1 long.fp8_2
    fi
}

# Layers with halos (llmc/sequence/halo.cuh). Most tokens are those two before, which 20 steps learn: so a lost halo is
# seen where a rank's tokens begin. A gate is its bias, which begins at 0 and moves by less than 0.1 in 20 steps: so 128
# tokens of every layer, of a log gate of some -0.7, forget what is before them. Fewer than 8192 tokens a rank have no halo.
halos="--set fgate_type=bias_only --seq-len 16Ki --batch-tokens 32Ki --max-tokens 640Ki --data $scratch/copied.bin"
copied() {
    check "data that repeats" "$python" -c 'import sys
sys.path.insert(0, "dev/test")
import cli_files
noise = cli_files.tokens(2 * (16 * 16384 + 1), 257)
ids = noise[::2]
for i, drawn in enumerate(noise[1::2]):
    if i > 1 and drawn < 200:
        ids[i] = ids[i - 2]
cli_files.shard(sys.argv[1], ids, vocab=257)' "$scratch/copied.bin"
}
# halos_evaluated OUT RANKS: --eval of the checkpoint of step 20, to OUT.evalRANKS.json
halos_evaluated() {
    check "--eval of $1 on $2" on "$2" $trainer --init "$scratch/$1/step_00000020" --deterministic \
        --eval "$scratch/$1.eval$2.json" --val-data "$scratch/copied.bin" --seq-len 16Ki --val-tokens 256Ki \
        --micro-batch 1 --timeout 20 --sequence-ranks "$2"
}
# halos_trained NAME OPTION...: validations and samples of a run, and a stop, change no bit. A validation has the loss of
# --eval, which has that of one GPU at every position
halos_trained() {
    local name=$1
    shift
    # shellcheck disable=SC2086
    check "$name" train 2 "$name" $halos --sequence-ranks 2 --val-data "$scratch/copied.bin" --val-tokens 256Ki \
        --val-every 6 --sample-every 9 --generate 8 "$@"
    said "2 ranks in groups of 2, which share sequences: 8192 tokens and 1 head a rank; groups with 2 micro-batches"
    said "sample: "
    # shellcheck disable=SC2086
    check "stop" train 2 "$name.stopped" $halos --sequence-ranks 2 --max-steps 7 "$@"
    check "go on" resume 2 "$name.stopped"
    same_weights "$name" "$name.stopped"
    halos_evaluated "$name" 1
    halos_evaluated "$name" 2
    check "its positions" "$python" dev/test/trainer/ranks.py positions \
        "$scratch/$name.eval1.json" "$scratch/$name.eval2.json" 2
    check "its validation" "$python" dev/test/trainer/ranks.py validated \
        "$scratch/$name/log.jsonl" "$scratch/$name.eval2.json" 5e-5
}
shared_halos() {
    copied
    # shellcheck disable=SC2086
    check "halos: one GPU" train 1 halos.1 $halos
    halos_trained halos.2
    near 2e-2 halos.2 halos.1
    # training in FP8 exchanges heads, its validations have halos
    local wide="--fp8 --set intermediate_size=80" steps last
    if $trainer $tiny $wide --dry-run >/dev/null 2>&1; then
        # shellcheck disable=SC2086
        halos_trained halos.fp8 $wide
    else
        skip "halos with --fp8, which these GPUs do not have"
    fi
    # a run that is killed, while its hosts wait for answers, goes on with the bits of one that is not
    # shellcheck disable=SC2086
    start halos.killed $halos --lr 5e-3 --max-tokens 1Gi --save-every 2 --sequence-ranks 2
    kill -9 "$(rank_of halos.killed 1)"
    ended halos.killed $killed_code
    equals 1 "$(grep -c '^error: rank 1 ' "$scratch/halos.killed.err")"
    steps=("$scratch"/halos.killed/step_*)
    last=$((10#${steps[-1]##*_} + 3))
    check "go on" resume 2 halos.killed --max-steps $last
    # shellcheck disable=SC2086
    check "the same without an end" train 2 halos.whole $halos --max-tokens 1Gi --sequence-ranks 2 --max-steps $last
    same_weights halos.killed halos.whole $last
}

# Four GPUs: two groups, each of which shares its sequences, and one group of four
shared_groups() {
    if [ ! "${ONE_GPU:-}" ] && [ "$gpus" -lt 4 ]; then
        skip "groups that share sequences: fewer than four GPUs"
        return
    fi
    local tiny="$tiny --set num_heads=4 --set hidden_size=256"
    check "on one" train 1 groups.1
    check "two groups of two" train 4 groups.2 --sequence-ranks 2
    said "4 ranks in groups of 2, which share sequences: 128 tokens and 2 heads a rank; groups with 6 micro-batches"
    near 2e-3 groups.1 groups.2
    check "again" train 4 groups.2again --sequence-ranks 2
    same_weights groups.2 groups.2again
    check "a group of four" train 4 groups.4 --sequence-ranks 4
    said "4 ranks in groups of 4, which share sequences: 64 tokens and 1 head a rank; groups with 12 micro-batches"
    near 2e-3 groups.1 groups.4
    check "again, --recompute block" train 4 groups.4block --sequence-ranks 4 --recompute block
    same_weights groups.4 groups.4block
    check "stop in twos" train 4 groups --sequence-ranks 2 --max-steps 5
    check "go on in a group of four" resume 4 groups --sequence-ranks 4 --max-steps 10
    check "with two" resume 2 groups --sequence-ranks 2 --max-steps 15
    check "data parallel" resume 4 groups --sequence-ranks 1
    near 2e-3 groups groups.1
    local ranks
    [ -f "$scratch/copied.bin" ] || copied
    local halos="$halos --seq-len 32Ki --batch-tokens 64Ki"
    # shellcheck disable=SC2086
    check "halos: one GPU" train 1 groups.halos1 $halos
    for ranks in 2 4; do
        # shellcheck disable=SC2086
        check "halos in groups of $ranks" train 4 groups.halos$ranks $halos --sequence-ranks $ranks
        said "$((32768 / ranks)) tokens and"
        near 2e-2 groups.halos$ranks groups.halos1
    done
    # shellcheck disable=SC2086
    check "again, --recompute block" train 4 groups.halos4block $halos --sequence-ranks 4 --recompute block
    same_weights groups.halos4 groups.halos4block 10
    for ranks in 1 4; do
        check "--eval of halos on $ranks" on $ranks $trainer --init "$scratch/groups.halos4/step_00000010" \
            --deterministic --eval "$scratch/groups.halos$ranks.json" --val-data "$scratch/copied.bin" --seq-len 32Ki \
            --val-tokens 256Ki --micro-batch 1 --timeout 20 --sequence-ranks $ranks
    done
    check "its positions" "$python" dev/test/trainer/ranks.py positions \
        "$scratch/groups.halos1.json" "$scratch/groups.halos4.json" 4
}

# --eval with the sequences of shared() on two GPUs, and on one
shared_evaluated() {
    for ranks in 1 2; do
        check "--eval on $ranks" on $ranks $trainer --init "$scratch/fox-pro.1/step_00000020" --deterministic \
            --eval "$scratch/shared$ranks.json" --val-data $scratch/files/shards/text.bin --seq-len 40 \
            --val-tokens 360 --micro-batch 2 --timeout 20 --sequence-ranks $ranks
    done
    check "the same losses" "$python" -c 'import json, sys
one, two = (json.load(open(path)) for path in sys.argv[1:])
assert one["sequences"] == two["sequences"] == 9 and one["targets"] == two["targets"]
assert all(abs(a - b) < 2e-2 for a, b in zip(one["loss"], two["loss"])), max(abs(a - b) for a, b in zip(one["loss"], two["loss"]))
assert abs(one["loss_mean"] - two["loss_mean"]) < 2e-3' "$scratch/shared1.json" "$scratch/shared2.json"
}

# A run goes on with sequences on one GPU, on two, and data parallel
shared_resumed() {
    check "stop with sequences on two" train 2 shared --sequence-ranks 2 --max-steps 5 --val-data $scratch/files/shards/text.bin
    dies "--sequence-ranks 2: 1 rank cannot be groups of so many; start a multiple of it, or give --sequence-ranks 1" \
        resume 1 shared
    check "go on with one" resume 1 shared --sequence-ranks 1 --max-steps 10
    check "data parallel" resume 2 shared --max-steps 15
    check "and with sequences on two" resume 2 shared --sequence-ranks 2
    near 2e-3 shared fox-pro.1
    check "stop" train 2 shared.stopped --sequence-ranks 2 --max-steps 7
    check "go on" resume 2 shared.stopped
    said "2 ranks in groups of 2"
    same_weights fox-pro.2 shared.stopped
}

# A rank that ends takes all with it, and one line says which. start OUT OPTION...: begins a long run and waits for step 5
start() {
    # shellcheck disable=SC2086
    on 2 $trainer $tiny --out "$scratch/$1" --max-tokens 1Gi --timeout 5 \
        --log-every 1 "${@:2}" >"$scratch/$1.out" 2>"$scratch/$1.err" &
    job=$!
    for _ in $(seq 600); do
        grep -q 'step *5/' "$scratch/$1.out" && return
        read -rt 0.1 <> <(:) # waits
    done
    fail "$1: no step within 60 s"
}
# ended OUT CODE: within 20 s
ended() {
    local code=0
    rm -f "$scratch/late"
    ( for _ in $(seq 200); do read -rt 0.1 <> <(:); done; echo ", after 20 s" >"$scratch/late"; kill -9 $job ) 2>/dev/null &
    local killer=$!
    wait $job || code=$?
    kill $killer 2>/dev/null
    equals "$2" "$code$(cat "$scratch/late" 2>/dev/null)"
}
running() { pgrep -f "^[^ ]*$(basename $trainer) .*$scratch/${1:-}"; }
rank_of() { running "$1" | while read -r p; do
    tr '\0' '\n' <"/proc/$p/environ" 2>/dev/null | grep -qxE "(OMPI_COMM_WORLD_)?RANK=$2" && echo "$p"; done; }

failures() {
    start killed
    kill -9 "$(rank_of killed 1)"
    ended killed $killed_code
    equals 1 "$(grep -c '^error: rank 1 ' "$scratch/killed.err")"
    start stuck
    kill -STOP "$(rank_of stuck 1)"
    ended stuck 1
    equals 1 "$(grep -c '^error: rank 1 .*stopped or is unreachable' "$scratch/stuck.err")"
    start usr1
    kill -USR1 "$(rank_of usr1 1)"
    ended usr1 75
    check "a checkpoint" ls "$scratch"/usr1/step_*/model.safetensors
    equals "" "$(running)"
}

shared_failures() {
    start shared.killed --sequence-ranks 2
    kill -9 "$(rank_of shared.killed 1)"
    ended shared.killed $killed_code
    equals 1 "$(grep -c '^error: rank 1 ' "$scratch/shared.killed.err")"
    start shared.stuck --sequence-ranks 2
    kill -STOP "$(rank_of shared.stuck 1)"
    ended shared.stuck 1
    equals 1 "$(grep -c '^error: rank 1 .*stopped or is unreachable' "$scratch/shared.stuck.err")"
    start shared.usr1 --sequence-ranks 2
    kill -USR1 "$(rank_of shared.usr1 1)"
    ended shared.usr1 75
    check "a checkpoint" ls "$scratch"/shared.usr1/step_*/model.safetensors
    equals "" "$(running)"
}

parts="same_losses evaluated biases tied stack in_fp8 resumed failures shared shared_chunks shared_halos shared_groups
    shared_evaluated shared_resumed shared_failures"
for part in ${PARTS:-$parts}; do $part; done
report

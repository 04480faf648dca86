#!/usr/bin/env bash
# The recurrent mixers' models, and the presets of stacks, under the CPU trainer: a run that is stopped and resumed ends in
# the bytes of one that is not, several ranks train what one trains, and --generate, --dump, --bench, of stacks --eval,
# --requests and --maps work. Extension, gradients and the model's results are tested in C.
scratch=build/test/mixers
. dev/test/check.sh

export OMP_NUM_THREADS=1
unset RANK WORLD_SIZE SLURM_PROCID
make_files
steps=6
batches="--seq-len 16 --batch-tokens 64 --micro-batch 1 --warmup-tokens 64 --max-tokens $((steps * 64)) --data $shards/text.bin"

# model FAMILY: its options, of a small model
model() { echo "--model $1-nano --set hidden_size=32 --set num_hidden_layers=2 --set num_heads=2 $(keys $1)"; }
keys() {
    case $1 in
    mamba2) echo "--set state_size=16" ;;
    hgrn2) echo "--set intermediate_size=32 --set use_lower_bound=true" ;;
    gated-deltanet) echo "--set intermediate_size=32 --set head_dim=8" ;;
    *) echo "--set intermediate_size=32" ;;
    esac
}

train() { ./train_fox $small $batches --out "$@"; }
last() { step "$1" $steps; }

runs() {
    check "$1: a run" train "$scratch/$1" --val-data "$shards/val.bin"
    equals "" "$(cat "$scratch/stderr")"
    check "$1: stop" train "$scratch/$1.stopped" --max-steps 3
    check "$1: resume" ./train_fox --resume --out "$scratch/$1.stopped"
    same_bytes $steps "$scratch/$1" "$scratch/$1.stopped"
    check "$1: two ranks" mpirun --bind-to none -np 2 ./train_fox $small $batches --out "$scratch/$1.ranks"
    check "$1: their weights" python3 dev/test/trainer/ranks.py close "$(last "$scratch/$1")" "$(last "$scratch/$1.ranks")" 1e-3
}

one_thing_and_exit() {
    check "$1: --generate" ./train_fox --init "$(last "$scratch/$1")" --prompt text --generate 20
    cp "$scratch/stdout" "$scratch/first"
    check "$1: again" ./train_fox --init "$(last "$scratch/$1")" --prompt text --generate 20
    same "$scratch/stdout" "$scratch/first"
    check "$1: --dump" ./train_fox $small $batches --dump "$scratch/$1.dump"
    said "mean loss 5."
    check "$1: --bench" ./train_fox $small $batches --bench 1
    said "GFLOP/s of the model"
    dies "no config key is called 'use_rope'" ./train_fox $small --set use_rope=true --dry-run
}

# One command each for a preset of a stack, whose maps are of its layers with attention alone.
stack() {
    local folder attention maps=$scratch/$1.maps refused="this model has recurrent layers, which ranks cannot share"
    small="--model $1-nano --set hidden_size=32 --set intermediate_size=32"
    [ $1 != fox-gdn ] || small="$small --set gated_deltanet_head_dim=8"
    [ $1 != samba2 ] || small="$small --set mamba2_state_size=16"
    runs $1
    folder=$(last "$scratch/$1")
    printf '{"type":"%s}\n' 'score","context":"One","continuation":" two"' 'generate","prompt":"a","max_tokens":9' |
        ./train_fox --init "$folder" --requests - >"$scratch/answers" 2>"$scratch/stderr"
    equals 2 "$(grep -c '"tokens"' "$scratch/answers")"
    check "$1: --eval" ./train_fox --init "$folder" --eval "$scratch/$1.json" --val-data "$shards/val.bin" --seq-len 16
    check "$1: --maps" ./train_fox --init "$folder" --maps "$maps" --val-data "$shards/val.bin" --seq-len 16
    case $1 in
    fox-gdn) attention="3" ;;
    samba2) attention="1 3" ;;
    *) attention="0 1 2 3" refused="1 rank cannot be groups" ;;
    esac
    equals "$attention" "$(PYTHONPATH=dev/test python3 -c 'import cli_files, sys
print(*sorted({name.split(".")[0] for name in cli_files.read(sys.argv[1])[0] if name.endswith(".cum_logf")}))' "$maps")"
    dies "--sequence-ranks 2: $refused" ./train_fox $small $batches --sequence-ranks 2 --out "$scratch/shared"
}

# flash-linear-attention's HGRN2 has lower bounds only where it uses them.
no_lower_bounds() {
    small="--model hgrn2-nano --set hidden_size=32 --set num_hidden_layers=2 --set num_heads=2 --set intermediate_size=32"
    local from to=$scratch/theirs
    from=$(last "$scratch/unbounded")
    check "without lower bounds" train "$scratch/unbounded"
    cp -r "$from" "$to"
    check "take them out" python3 dev/test/cli_files.py drop "$to/model.safetensors" model.lower_bounds
    for folder in "$from" "$to"; do
        check "--dump of $folder" ./train_fox --init "$folder" $batches --dump "$scratch/dump.$(basename "$(dirname "$folder")")"
        check "train from $folder" ./train_fox --init "$folder" $batches --max-steps 2 --out "$scratch/from.$(basename "$folder")"
    done
    same "$scratch/dump.unbounded" "$scratch/dump.$(basename "$scratch")"
    same "$scratch/from.$(basename "$from")/step_00000002/model.safetensors" "$scratch/from.theirs/step_00000002/model.safetensors"
    check "on two ranks" mpirun --bind-to none -np 2 ./train_fox --init "$to" $batches --max-steps 2 --out "$scratch/from.ranks"
    check "the same weights" python3 dev/test/trainer/ranks.py close "$scratch/from.theirs/step_00000002" \
        "$scratch/from.ranks/step_00000002" 1e-3
    from=$(last "$scratch/hgrn2")
    rm -r "$to"
    cp -r "$from" "$to"
    check "take them out" python3 dev/test/cli_files.py drop "$to/model.safetensors" model.lower_bounds
    dies "tensor 'model.lower_bounds' is missing" ./train_fox --init "$to" $batches --dump "$scratch/dump"
}

# Folders of flash-linear-attention's first months have the MLP's input projections as one matrix.
joined_mlp() {
    small=$(model gated-deltanet)
    local from to=$scratch/joined
    from=$(last "$scratch/gated-deltanet")
    cp -r "$from" "$to"
    check "join them" python3 dev/test/cli_files.py join "$to/model.safetensors"
    for folder in "$from" "$to"; do
        check "--dump of $folder" ./train_fox --init "$folder" $batches --dump "$scratch/mlp.$(basename "$folder")"
    done
    same "$scratch/mlp.$(basename "$from")" "$scratch/mlp.joined"
    check "on two ranks" mpirun --bind-to none -np 2 ./train_fox --init "$to" $batches --max-steps 2 --out "$scratch/mlp.ranks"
    check "on one" ./train_fox --init "$from" $batches --max-steps 2 --out "$scratch/mlp.one"
    check "the same weights" python3 dev/test/trainer/ranks.py close "$scratch/mlp.one/step_00000002" \
        "$scratch/mlp.ranks/step_00000002" 1e-3
    check "drop one" python3 dev/test/cli_files.py drop "$to/model.safetensors" model.layers.1.mlp.gate_proj.weight
    dies "tensor 'model.layers.1.mlp.gate_proj.weight' is missing" ./train_fox --init "$to" $batches --dump "$scratch/dump"
    check "drop one" python3 dev/test/cli_files.py drop "$from/model.safetensors" model.layers.1.mlp.up_proj.weight
    dies "tensor 'model.layers.1.mlp.up_proj.weight' is missing" ./train_fox --init "$from" $batches --dump "$scratch/dump"
}

for family in deltanet gated-deltanet hgrn2 mamba2; do
    small=$(model $family)
    runs $family
    one_thing_and_exit $family
done
for family in fox-gdn samba2 fox-pro-local transformer-pro-local; do stack $family; done
no_lower_bounds
joined_mlp
report

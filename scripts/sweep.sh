#!/usr/bin/env bash
# Trains families x learning rates x seeds, one run a GPU at a time, each in a folder of its own:
#
#   MODELS="fox-pro-125m transformer-pro-125m" LRS="1e-3 2e-3" SEEDS="1 2 3" OUT=out/sweep \
#       scripts/sweep.sh --data 'data/web_train_*.bin' --val-data 'data/web_val_*.bin' --max-tokens 1e9
#   scripts/compare.py out/sweep/*/ --out out/sweep/compare
#
# The arguments are options of the trainer, of all runs. GPUS="0 2" names the GPUs (by default CUDA_VISIBLE_DEVICES, or
# all); without a GPU, or with TRAINER=./train_fox, runs are on the CPU, one after the other. LRS may be left out: the
# presets' own.
#
#   runs     |MODELS| x |LRS| x |SEEDS|, each as long as the trainer's --dry-run says, on |GPUS| of them at a time
#   disk     KEEP checkpoints a run (1), of 12 bytes a parameter
#
# The same command goes on after an interruption: it skips runs that ended with the same options and data and still
# have that checkpoint, and resumes the others. A sweep leaves a run that another one trains until it has done its
# others, and then waits for it. Ctrl-C, SIGTERM or SIGUSR1 ends the sweep with a checkpoint of each run, and exit code
# 75. A run that fails does not keep the others from running; OUT/RUN/output.txt says why, and the sweep's exit code
# is 1.
set -u
die() {
    echo "error: $1" >&2
    exit 1
}
[ -n "${MODELS:-}" ] || die "MODELS is not set: as in MODELS='fox-pro-125m transformer-pro-125m'"
for word; do # would make folders' names untrue
    case ${word%%=*} in
    --model) die "--model: MODELS names the models" ;;
    --seed) die "--seed: SEEDS names the seeds" ;;
    --out) die "--out: OUT names the folder of the runs" ;;
    --lr) die "--lr: LRS names the learning rates" ;;
    esac
done
LRS=${LRS:-preset} SEEDS=${SEEDS:-1} OUT=${OUT:-out/sweep}
if [ -z "${TRAINER:-}" ]; then
    GPUS=${GPUS:-${CUDA_VISIBLE_DEVICES:-}} GPUS=${GPUS//,/ }
    GPUS=${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | tr '\n' ' ')}
    TRAINER=$([ -n "${GPUS// /}" ] && echo ./train_foxcu || echo ./train_fox)
fi
[ -x "$TRAINER" ] || die "$TRAINER is not built: make ${TRAINER#./}"
[ -n "${GPUS:-}" ] || GPUS=cpu

runs=()
for seed in $SEEDS; do
    for lr in $LRS; do
        for model in $MODELS; do runs+=("$model $lr $seed"); done
    done
done
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT

# list_data OPTIONS...: name, size and time of the files of --data and --val-data
list_data() {
    local word before='' globs='' glob
    for word; do
        case $before in --data | --val-data) globs+=$word, ;; esac
        case $word in --data=* | --val-data=*) globs+=${word#*=}, ;; esac
        before=$word
    done
    while read -rd, glob; do compgen -G "$glob"; done <<<"$globs" | sort -u | xargs -rd '\n' stat -Lc '%n %s %Y'
}
data=$(list_data "$@")

# background COMMAND...: runs it, and passes an interruption of the sweep on to it. Sets code to its exit code
background() {
    "$@" &
    child=$!
    [ -z "$stopping" ] || kill -USR1 $child
    while :; do # a signal ends `wait` before the child does
        wait $child
        code=$?
        [ $code -gt 128 ] && kill -0 $child 2>/dev/null || break
    done
    child=
}

# state_of FOLDER COMMAND...: what a run that is done is recognized by: command, data, and the newest checkpoint's record
state_of() {
    local newest
    newest=$(ls -d "$1"/step_*/trainer.json 2>/dev/null | tail -n 1)
    [ -n "$newest" ] && printf '%s\n' "${*:2}" "$data" "$newest $(cksum <"$newest")"
}

# train GPU FOLDER MODEL LR SEED OPTIONS...: one run. Sets code to its exit code
train() {
    local gpu=$1 out=$2 model=$3 lr=$4 seed=$5 command now
    shift 5
    command=("$TRAINER" --model "$model" --seed "$seed" --keep "${KEEP:-1}" --out "$out" --resume)
    [ "$lr" = preset ] || command+=(--lr "$lr")
    command+=("$@")
    if now=$(state_of "$out" "${command[@]}") && [ "$(cat "$out/done" 2>/dev/null)" = "$now" ]; then
        echo "done already: $out"
        code=0
        return
    fi
    echo "training: $out${gpu:+ ($gpu)}"
    [ "$gpu" = cpu ] || export CUDA_VISIBLE_DEVICES=$gpu
    background "${command[@]}" >>"$out/output.txt" 2>&1
    [ $code != 0 ] || state_of "$out" "${command[@]}" >"$out/done"
}

# take I WAIT GPU OPTIONS...: run I, with a lock against other sweeps, which is waited for where WAIT is 1, and which
# lasts as long as the trainer if the sweep is killed. False: another sweep has the run
take() {
    local i=$1 wait=$2 gpu=$3 code=1 model lr seed out
    shift 3
    read -r model lr seed <<<"${runs[i]}"
    out=$OUT/${model}_lr-${lr}_seed-$seed
    if mkdir -p "$out" && { exec 9>"$out/sweep.lock"; } 2>/dev/null; then
        if ! flock -n 9; then
            [ "$wait" = 1 ] || return 1
            echo "waiting for another sweep: $out"
            background flock 9
        fi
        if [ -n "$stopping" ]; then code=75; else train "$gpu" "$out" "$model" "$lr" "$seed" "$@"; fi
        exec 9>&-
    fi
    [ $code != 75 ] || { touch "$state/interrupted"; stopping=1; return 0; }
    [ $code = 0 ] || { echo "FAILED with exit code $code: $out/output.txt"; touch "$state/failed"; }
}

# work GPU OPTIONS...: takes runs that no other worker has taken
work() {
    local gpu=$1 i child='' stopping='' later=()
    shift
    trap 'stopping=1; [ -z "$child" ] || kill -USR1 $child' USR1
    for i in "${!runs[@]}"; do
        [ -z "$stopping" ] || return
        mkdir "$state/$i" 2>/dev/null || continue
        take "$i" 0 "$gpu" "$@" || later+=("$i")
    done
    for i in "${later[@]}"; do
        [ -z "$stopping" ] || return
        take "$i" 1 "$gpu" "$@"
    done
}

workers=()
trap 'touch "$state/interrupted"; kill -USR1 "${workers[@]}" 2>/dev/null' INT TERM USR1
for gpu in $GPUS; do
    work "$gpu" "$@" &
    workers+=($!)
done
for worker in "${workers[@]}"; do
    while kill -0 "$worker" 2>/dev/null; do wait "$worker"; done
done
[ ! -e "$state/interrupted" ] || exit 75
[ ! -e "$state/failed" ] || exit 1

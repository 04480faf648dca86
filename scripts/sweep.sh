#!/usr/bin/env bash
# Trains models x settings x learning rates x seeds, one run a GPU at a time, each in a folder of its own:
#
#   MODELS="fox-pro-125m transformer-pro-125m" LRS="1e-3 2e-3" SEEDS="1 2 3" OUT=out/sweep \
#       scripts/sweep.sh --data 'data/web_train_*.bin' --val-data 'data/web_val_*.bin' --max-tokens 1e9
#   scripts/compare.py out/sweep/*/ --out out/sweep/compare
#
# The arguments are options of the trainer, of all runs. GPUS="0 2" names the GPUs (by default CUDA_VISIBLE_DEVICES, or
# all); without a GPU, or with TRAINER=./train_fox, runs are on the CPU, one after the other.
#
#   MODELS   presets, with settings if there are any: fox-pro-125m,use_rope=true. A name in front of a model is its
#            folders': rope:fox-pro-125m,use_rope=true
#   SETS     settings that each model is trained with, as in SETS="preset use_rope=true num_heads=6,qk_norm=false":
#            keys of config.json and options of the trainer, --NAME=VALUE, joined by commas. preset (default): none.
#            layer_types keeps its own commas: layer_types=deltanet*3,attention:window=64,num_heads=6
#   LRS      learning rates; preset (default): the model's own; "grid START": a search
#   SEEDS    1 by default
#
#   runs     |MODELS| x |SETS| x |LRS| x |SEEDS|, each as long as the trainer's --dry-run says, on |GPUS| at a time
#   disk     KEEP checkpoints a run (1), of 12 bytes a parameter
#
# LRS="grid 1e-3" searches {1, 2, 5} x 10^i for each model with each of SETS. The first seed trains at 5e-4, 1e-3 and
# 2e-3, then at the next rate beyond the best one until the best one is inside. The best one has the lowest held-out
# loss at the end, or without --val-data the lowest training loss; a run that diverges is the worst. The chosen rate is
# printed and written to OUT/MODEL_lr.json, and the other seeds train at it.
#
# The same command goes on after an interruption: it skips runs that ended with the same options and data and still
# have that checkpoint, and resumes the others. A sweep leaves a run that another one trains until it has done its
# others, and then waits for it. Ctrl-C, SIGTERM, SIGUSR1, SIGQUIT or a terminal that closes ends the sweep with a checkpoint
# of each run, and exit code 75. A run that fails does not keep the others from running; OUT/RUN/output.txt says why, and
# the sweep's exit code is 1: it is 0 only when every run has ended. A pipe that closes on its output does not end it.
. "$(dirname "$0")/shell/help.sh"
. "$(dirname "$0")/shell/trainer.sh"
set -u
trap '' PIPE
[ -n "${MODELS:-}" ] || die "MODELS is not set: as in MODELS='fox-pro-125m transformer-pro-125m'"
LRS=${LRS:-preset} SETS=${SETS:-preset} SEEDS=${SEEDS:-1} OUT=${OUT:-out/sweep}
for list in MODELS SETS LRS SEEDS; do
    [[ ${!list} =~ [^[:space:]] ]] || die "$list is blank: it says what is trained"
done

# refuse_fixed WORDS...: options that would make folders' names untrue, or with which runs would end untrained
refuse_fixed() {
    local word
    for word; do
        case ${word%%=*} in
        --model) die "--model: MODELS names the models" ;;
        --seed) die "--seed: SEEDS names the seeds" ;;
        --out) die "--out: OUT names the folder of the runs" ;;
        --lr) die "--lr: LRS names the learning rates" ;;
        --dry-run | --bench | --dump) die "${word%%=*}: trains nothing: give it to the trainer itself" ;;
        esac
    done
}
refuse_fixed "$@"
read -r search start more <<<"$LRS"
[ "$search" != grid ] || { [ -n "$start" ] && [ -z "$more" ]; } ||
    die "LRS='$LRS': a search has one start: LRS='grid 1e-3'"
points=()  # MODEL[,SETTING...]
checked=() # the trainer's options among settings, rates and seeds
declare -A names=() owners=() # of a point: what its files and folders begin with; and the point of that
for model in $MODELS; do
    named=$model
    [[ ! $model =~ ^([^:,]*):(.*) ]] || named=${BASH_REMATCH[1]} model=${BASH_REMATCH[2]}
    for set in $SETS; do
        set=${set#preset} point=$model${set:+,$set} name=$named${set:+,$set}
        name=${name//,--/,} name=${name//=/-} name=${name/,/_} name=${name//,/+} name=${name//\*/x} name=${name//:/.}
        [ "${owners[$name]:-$point}" = "$point" ] || die "$name: the name of two models: $point and ${owners[$name]}"
        points+=("$point") names[$point]=$OUT/$name owners[$name]=$point
        model_options "$point"
        for setting in "${settings[@]}"; do
            refuse_fixed "$setting"
            case $setting in
            */* | --data=* | --val-data=*) die "$setting: files are options of all runs: give it as an argument" ;;
            --?*=*) checked+=("$setting") ;;
            ?*=*) ;;
            *) die "$setting: not a setting, KEY=VALUE or --NAME=VALUE" ;;
            esac
        done
    done
done
choose_trainer
[ -x "$TRAINER" ] || die "$TRAINER is not built: make ${TRAINER#./}"
[ "$search" = grid ] && rates=$start || rates=${LRS//preset/}
for rate in $rates; do checked+=("--lr=$rate"); done
for seed in $SEEDS; do checked+=("--seed=$seed"); done
check_options "$TRAINER" "${checked[@]}" --keep="${KEEP:-1}" "$@"
same=$(LC_ALL=C printf '%.17g\n' $rates 2>/dev/null | sort | uniq -d)
[ -z "$same" ] || die "LRS='$LRS': has one rate twice"
check_models "${points[*]}" "$@"
[[ ${GPUS:-} =~ [^[:space:]] ]] || GPUS=cpu

# add_run POINT LR SEED [search]
runs=()
declare -A added=()
add_run() {
    [ -n "${added["$1 $2 $3"]:-}" ] || runs+=("$*")
    added["$1 $2 $3"]=1
}

folder() { echo "${names[$1]}_lr-$2_seed-$3"; } # of POINT LR SEED [search]

say() { echo "$*" 2>/dev/null; } # also where nobody reads it

state=$(mktemp -d) || die "no folder for temporary files: TMPDIR=${TMPDIR:-/tmp}"
trap 'rm -rf "$state"' EXIT

# list_data OPTIONS...: name, size and time of the files of --data and --val-data
list_data() {
    local word before='' globs='' glob files=''
    for word; do
        case $before in --data | --val-data) globs+=$word, ;; esac
        case $word in --data=* | --val-data=*) globs+=${word#*=}, ;; esac
        before=$word
    done
    while read -rd, glob; do
        [[ ! $glob =~ ^(.+):[0-9.]+([eE][-+]?[0-9]+)?$ ]] || glob=${BASH_REMATCH[1]} # a part of a mixture has a weight
        files+=$(ls -d "$glob" 2>/dev/null || compgen -G "$glob")$'\n' || die "'$glob': no file matches"
    done <<<"$globs"
    sed '/^$/d' <<<"$files" | sort -u | xargs -rd '\n' stat -Lc '%n %s %Y'
}
data=$(list_data "$@") || exit 1
mkdir -p "$OUT" 2>/dev/null || die "OUT: $OUT: cannot be made"

# background COMMAND...: runs it for run i, and passes an interruption of the sweep on to it. Sets code to its exit code
background() {
    "$@" &
    child=$!
    [ "$1" = flock ] || echo $child >"$state/$i/child" # a trainer
    [ -z "$stopping" ] || kill -USR1 $child
    while :; do # a signal ends `wait` before the child does
        wait $child
        code=$?
        [ $code -gt 128 ] && kill -0 $child 2>/dev/null || break
    done
    child=
}

# state_of FOLDER COMMAND...: what a run that is done is recognized by: command, data and the newest checkpoint's record
state_of() {
    local newest
    newest=$(ls -d "$1"/step_*/trainer.json 2>/dev/null | tail -n 1)
    [ -n "$newest" ] && printf '%s\n' "${*:2}" "$data" "$newest $(cksum <"$newest")"
}

# has_diverged FOLDER: whether the run that has just failed ended by a loss or gradient that is not finite, or 0
has_diverged() {
    grep '^error: ' "$1/output.txt" | tail -n 1 | grep -q '^error: step [0-9]*: the \(loss\|gradient\) is '
}

# train GPU FOLDER "POINT LR SEED [search]" OPTIONS...: one run. Sets code to its exit code, or if it is of a search
# and has diverged, to 0, and diverged
train() {
    local gpu=$1 out=$2 point lr seed search settings options command now
    read -r point lr seed search <<<"$3"
    shift 3
    model_options "$point"
    command=("$TRAINER" "${options[@]:0:2}" --seed "$seed" --keep "${KEEP:-1}" --out "$out" --resume)
    [ "$lr" = preset ] || command+=(--lr "$lr")
    command+=("$@" "${options[@]:2}")
    diverged=
    if now=$(state_of "$out" "${command[@]}") && [ "$(cat "$out/done" 2>/dev/null)" = "$now" ]; then
        say "done already: $out"
        code=0
        return
    fi
    now=$(printf '%s\n' "${command[@]}" "$data")
    if [ -n "$search" ] && [ "$(cat "$out/diverged" 2>/dev/null)" = "$now" ]; then
        say "diverged already: $out"
        code=0 diverged=diverged
        return
    fi
    say "training: $out${gpu:+ ($gpu)}"
    [ "$gpu" = cpu ] || export CUDA_VISIBLE_DEVICES=$gpu
    background "${command[@]}" >>"$out/output.txt" 2>&1
    [ $code != 0 ] || state_of "$out" "${command[@]}" >"$out/done"
    [ $code = 1 ] && [ -n "$search" ] && has_diverged "$out" || return 0
    say "diverged: $out"
    echo "$now" >"$out/diverged"
    code=0 diverged=diverged
}

# take I WAIT GPU OPTIONS...: run I, with a lock against other sweeps, which is waited for where WAIT is 1, and which
# lasts as long as the trainer if the sweep is killed. False: another sweep has the run
take() {
    local i=$1 wait=$2 gpu=$3 code=1 diverged='' out reason before
    shift 3
    out=$(folder ${runs[i]})
    before=$(wc -c 2>/dev/null <"$out/output.txt" || echo 0) # of earlier attempts
    if mkdir -p "$out" 2>/dev/null && { exec 9>"$out/sweep.lock"; } 2>/dev/null; then
        if ! flock -n 9; then
            [ "$wait" = 1 ] || return 1
            say "waiting for another sweep: $out"
            background flock 9
        fi
        if [ -n "$stopping" ]; then code=75; else train "$gpu" "$out" "${runs[i]}" "$@"; fi
        exec 9>&-
    fi
    [ $code != 75 ] || { touch "$state/interrupted"; stopping=1; return 0; }
    if [ $code != 0 ]; then
        reason=$(tail -c +$((before + 1)) "$out/output.txt" 2>/dev/null | grep '^error: ' | tail -n 1)
        [ -e "$out/output.txt" ] || reason="cannot be written"
        say "FAILED with exit code $code: $out/output.txt${reason:+: $reason}"
        touch "$state/$i/failed"
        return 0
    fi
    touch "$state/$i/${diverged:-trained}"
}

# work GPU OPTIONS...: takes runs that no other worker has taken
work() {
    local gpu=$1 i child='' stopping='' later=()
    shift
    trap : INT TERM HUP QUIT # Ctrl-C goes to all processes of the terminal: live on until the trainer has saved
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
trap 'touch "$state/interrupted"; kill -USR1 "${workers[@]}" 2>/dev/null' INT TERM HUP QUIT USR1

# train_all OPTIONS...: the runs that have not been taken yet. Sets failed unless every run has ended
failed=
train_all() {
    local gpu worker i
    workers=()
    for gpu in $GPUS; do
        work "$gpu" "$@" &
        workers+=($!)
    done
    [ ! -e "$state/interrupted" ] || kill -USR1 "${workers[@]}" 2>/dev/null
    for worker in "${workers[@]}"; do
        while kill -0 "$worker" 2>/dev/null; do wait "$worker"; done
    done
    for i in "${!runs[@]}"; do
        [ ! -e "$state/$i/trained" ] && [ ! -e "$state/$i/diverged" ] || continue
        failed=1
        [ -e "$state/$i/failed" ] || end_orphan "$i"
    done
    [ ! -e "$state/interrupted" ] || exit 75
}

# end_orphan I: of a worker that was killed: tells it, and its trainer to save and end, which holds the lock of run I
end_orphan() {
    local out child
    out=$(folder ${runs[$1]})
    read -r child 2>/dev/null <"$state/$1/child" && ! flock -n "$out/sweep.lock" true && kill -USR1 "$child" 2>/dev/null &&
        child="; its trainer, process $child, is told to save and end" || child=''
    [ -e "$state/interrupted" ] && [ -z "$child" ] || say "NOT TRAINED: $out: the process that runs it was killed$child"
}

# choose_rate POINT: adds the runs that its learning rate is still to be chosen by, or those of other seeds at that rate
declare -A searched=()
choose_rate() {
    local point=$1 first known=() i of lr seed answer file
    read -r first _ <<<"$SEEDS"
    [ -z "${searched[$point]:-}" ] || return 0
    for i in "${!runs[@]}"; do
        read -r of lr seed _ <<<"${runs[i]}"
        [ "$of" = "$point" ] || continue
        if [ -e "$state/$i/trained" ]; then
            known+=("$lr=$(folder ${runs[i]})")
        elif [ -e "$state/$i/diverged" ]; then
            known+=("$lr=diverged")
        else
            say "no learning rate of $point: a run failed"
            searched[$point]=1
            return
        fi
    done
    file=${names[$point]}_lr.json
    if ! answer=$(flock "$OUT" python3 "${0%/*}/sweep/learning_rate.py" --out "$file" "$start" "${known[@]}"); then
        failed=1
        searched[$point]=1
        return
    fi
    case $answer in
    next:*) for lr in ${answer#next:}; do add_run "$point" "$lr" "$first" search; done ;;
    chosen:*)
        searched[$point]=1
        lr=$(sed -n 's/^chosen: //p' <<<"$answer")
        say "learning rate of $point: $lr; ${answer#*$'\n'}; $file"
        for seed in $SEEDS; do
            [ "$seed" = "$first" ] || add_run "$point" "$lr" "$seed"
        done
        ;;
    esac
}

if [ "$search" = grid ]; then
    count=-1
    while [ ${#runs[@]} != $count ]; do # until no search needs another run
        count=${#runs[@]}
        for point in "${points[@]}"; do choose_rate "$point"; done
        [ ${#runs[@]} = $count ] || train_all "$@"
    done
else
    for seed in $SEEDS; do
        for lr in $LRS; do
            for point in "${points[@]}"; do add_run "$point" "$lr" "$seed"; done
        done
    done
    train_all "$@"
fi
[ ! -e "$state/interrupted" ] || exit 75
[ -z "$failed" ] || exit 1

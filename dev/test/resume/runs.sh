# Runs to stop and resume, for the tests in this folder, which set `scratch` and then source this file
. dev/test/check.sh

export OMP_NUM_THREADS=1

make_files

# Steps of two micro-batches each. The long run trains on two epochs of shuffled data.
long=120
short=20
# options_of WIDTH
options_of() {
    options="--model fox-pro-nano --set hidden_size=$1 --set num_hidden_layers=1 --set num_heads=2
        --set intermediate_size=$1 --seq-len 16 --batch-tokens 64 --micro-batch 2 --warmup-tokens 640 --shuffle
        --data $shards/text.bin"
}

# run STEPS OUT OPTION...
run() { "$trainer" $options --max-tokens $(($1 * 64)) --out "${@:2}"; }
resume() { "$trainer" --resume --out "$@"; }
ends_same() { same_bytes $1 "$2" "$scratch/$1"; } # STEPS OUT: as the uninterrupted run

# uninterrupted: the runs that others are compared with
uninterrupted() {
    check "a long run" run $long "$scratch/$long" --val-data "$shards/val.bin"
    equals "" "$(cat "$scratch/stderr")"
    check "a short one" run $short "$scratch/$short"
}

# sizes: smaller models where the trainer is slow
sizes() { case $trainer in *sanitized) options_of 16 ;; *) options_of 32 ;; esac }

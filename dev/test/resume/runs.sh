# Runs to stop and resume, for the tests in this folder, which set `scratch` and then source this file
. dev/test/check.sh

shards=$scratch/files/shards
export OMP_NUM_THREADS=1

rm -rf "$scratch"
mkdir -p "$scratch"
python=$(python3 -c 'import sys; print(sys.executable)') || { fail "python3 is missing"; report; }
check "make the files" files make "$scratch/files"

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
checkpoints() { (cd "$1" && echo .tmp-* step_*) | sed 's/\.tmp-\* //; s/step_0*\([0-9]\)/\1/g'; }

# ends_same STEPS OUT: with the bytes of the uninterrupted run
ends_same() {
    local last
    last=step_$(printf %08d "$1")
    same "$2/$last/model.safetensors" "$scratch/$1/$last/model.safetensors"
    same "$2/$last/optimizer.safetensors" "$scratch/$1/$last/optimizer.safetensors"
}

# ends_same_as OUT OTHER: with the bytes of another run's step 20
ends_same_as() {
    same "$1/step_00000020/model.safetensors" "$2/step_00000020/model.safetensors"
    same "$1/step_00000020/optimizer.safetensors" "$2/step_00000020/optimizer.safetensors"
}

# uninterrupted: the runs that others are compared with
uninterrupted() {
    check "a long run" run $long "$scratch/$long" --val-data "$shards/val.bin"
    equals "" "$(cat "$scratch/stderr")"
    check "a short one" run $short "$scratch/$short"
}

# sizes: smaller models where the trainer is slow
sizes() { case $trainer in *sanitized) options_of 16 ;; *) options_of 32 ;; esac }

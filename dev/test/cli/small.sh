# A small model and its files, for the tests in this folder, which set `scratch` and then source this file
. dev/test/check.sh

files=$scratch/files
fixture=dev/test/fixtures/model/fox-pro
out=$scratch/out
export OMP_NUM_THREADS=1

make_files

# A small model, trained for 20 steps.
sizes="--set hidden_size=16 --set num_hidden_layers=1 --set num_heads=2 --set intermediate_size=16"
tiny="--model fox-pro-nano $sizes"
batches="--seq-len 16 --batch-tokens 64 --max-tokens 1280 --warmup-tokens 128"

run() { "$trainer" "$@"; }
train() { run $tiny $batches --out "$out" "$@"; }
train_on() { train --data "$shards/$1.bin" "${@:2}"; }
init() { run --init "$1" $batches --data "$shards/forty.bin" --out "$out" "${@:2}"; }
no_checkpoint() { equals "" "$(find "$out" -name '*step_*' 2>/dev/null)"; }

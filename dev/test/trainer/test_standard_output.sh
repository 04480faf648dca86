#!/usr/bin/env bash
# A program whose standard output is full or closed ends with one error and exit code 1, whatever it was to print; and no
# file of it gets what it prints. A training with --out goes on: log.jsonl has its lines.
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/standard_output
rm -rf $scratch
mkdir -p $scratch
. dev/test/check.sh
export OMP_NUM_THREADS=1

# with HOW COMMAND...: the command with its standard output, or input, so
with() { eval '"${@:2}"' "$1"; }
# lost COMMAND...: what it prints is lost, and it says so
lost() {
    for how in '>/dev/full' '>&-'; do dies "cannot write" with "$how" "$@"; done
}

tiny="--model fox-pro-nano --set hidden_size=32 --set num_heads=2 --set num_hidden_layers=1 --seq-len 16 --batch-tokens 32"
text() { data/text_to_shards --tokenizer byte --out "$scratch/$1" llmc/base/text.h; }
check "data" text data
shard=$scratch/data_train_000000.bin step=$scratch/run/step_00000001
check "a model" ./train_fox $tiny --data $shard --max-steps 1 --out $scratch/run
echo '{"id":1,"type":"score","context":[1],"continuation":[2]}' >$scratch/requests

for program in ./train_fox data/text_to_shards data/ids_to_shards data/longcrawl64; do
    [ -x $program ] || { skip "$program is not built"; continue; }
    lost $program --help
    lost $program --version
done
lost ./train_fox $tiny --dry-run
lost ./train_fox $tiny --bench 1
lost ./train_fox --init $step --generate 3 --prompt a
lost ./train_fox --init $step --requests $scratch/requests
lost ./train_fox --init $step --seq-len 16 --eval $scratch/eval.json --val-data $shard
lost ./train_fox --init $step --seq-len 16 --maps $scratch/maps --val-data $shard
lost ./train_fox --init $step --seq-len 16 --batch-tokens 16 --dump $scratch/dump --data $shard
for how in '>/dev/full' '>&-'; do # after its warning that nothing is kept
    with "$how" ./train_fox $tiny --data $shard --max-steps 1 2>$scratch/stderr
    equals 1 $?
    said "error: cannot write everything to standard output" stderr
done
for how in '>/dev/full' '>&-' '>&- 2>&- <&-'; do
    rm -rf $scratch/again
    check "a training $how" with "$how" ./train_fox $tiny --data $shard --max-steps 1 --out $scratch/again
    same $step/model.safetensors $scratch/again/step_00000001/model.safetensors
done
lost text other
same $shard $scratch/other_train_000000.bin
printf '\2\0\0\0\1\0\0\0\1\0\0\0\4\0\0\0\0\0\0\0' >$scratch/records # a document of one token, the end
ids() { data/ids_to_shards --out $scratch/ids --vocab-size 2 --end-of-text 0 <$scratch/records; }
lost ids
equals "0 1" "$(od -An -tu2 -j1024 $scratch/ids_train_000000.bin | xargs)"
equals "" "$(cat $scratch/*.lock)"

# a closed standard input has no requests and no prompts, but is no end of them
dies "cannot read" with '<&-' ./train_fox --init $step --requests -
dies "cannot read" with '<&-' ./train_fox --init $step --generate 3 --prompt -
dies "the token ids end too early" with '<&-' data/ids_to_shards --out $scratch/none --vocab-size 2

# the reader of a pipe may stop when it has enough
check "a pipe that is read in part" bash -o pipefail -c './train_fox --help | head -n 1'
check "data for a pipe that is read in part" bash -o pipefail -c \
    'data/text_to_shards --tokenizer byte --out build/test/standard_output/pipe llmc/base/text.h | :'
same $shard $scratch/pipe_train_000000.bin
report

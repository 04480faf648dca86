#!/usr/bin/env bash
# scripts/make_shards.py on folders laid out as FineWeb (parquet) and SlimPajama (jsonl.zst), with a tokenizer of 70,000 words:
# documents packed or cut, uint32 shards, and a model that trains on them, resumes, and keeps the tokenizer. PYTHON: a python
# with scripts/requirements.txt.
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/corpora
. dev/test/check.sh
export OMP_NUM_THREADS=1 # threads of small models mostly wait for each other
python=${PYTHON:-python3}
if ! $python -c 'import numpy, pyarrow, tokenizers, zstandard' 2>$scratch/stderr; then
    skip "make_shards.py: $(tail -n 1 $scratch/stderr)"
    report
fi
inputs() { $python dev/test/data/shard_inputs.py "$@"; }
check "corpora" inputs corpora $scratch
check "tokenizers" inputs tokenizers $scratch
shards() { $python scripts/make_shards.py --tokenizer $scratch/words.json --out "$scratch/shards/$1" "${@:2}"; }

# the documents of both corpora are the same, so are the shards
check "FineWeb, packed" shards fineweb --val-fraction 0.1 $scratch/fineweb/sample/10BT
said "for the trainer: --set vocab_size=70000 --set bos_token_id=1 --set eos_token_id=1"
said "train: "
options=$(sed -n 's/.*for the trainer: //p' $scratch/stdout)
check "SlimPajama, packed" shards all $scratch/slimpajama/train
check "FineWeb, packed" shards all2 $scratch/fineweb/sample/10BT
same $scratch/shards/all_train_000000.bin $scratch/shards/all2_train_000000.bin
check "SlimPajama, cut" shards cut --doc-len 64 $scratch/slimpajama/train
documents=$(inputs documents $scratch/slimpajama/train 64)
said "train: $documents documents, $((documents * 64)) tokens"
equals "2 70000" "$(inputs hash $scratch/shards/cut_train_000000.bin | cut -d' ' -f1,2)"
equals 64 "$(od -An -tu4 -j12 -N4 $scratch/shards/cut_train_000000.bin | xargs)"

# ids beyond uint16 reach the model: it trains on them, resumes, and its checkpoint has the tokenizer
check "ids beyond 65,536" test "$(od -An -tu4 -v -w4 -j1024 $scratch/shards/all_train_000000.bin | awk '$1 > 65535' | wc -l)" -gt 100
fox() {
    ${TRAIN_FOX:-./train_fox} --model fox-pro-nano $options --set hidden_size=32 --set num_hidden_layers=1 --set num_heads=2 \
        --seq-len 64 --batch-tokens 256 --max-tokens 2048 --val-tokens 512 --lr 1e-2 "$@"
}
sed 's/"truncation": {[^}]*}/"truncation": null/' $scratch/words.json >$scratch/exported.json # training cuts no text
for kind in fineweb cut; do
    val=$([ $kind = cut ] && echo cut_train || echo fineweb_val)
    data=(--data "$scratch/shards/${kind}_train_*.bin" --val-data "$scratch/shards/${val}_*.bin" --out $scratch/run/$kind)
    check "train on $kind" fox "${data[@]}" --max-steps 4
    same $scratch/exported.json $scratch/run/$kind/step_00000004/tokenizer.json
    check "resume on $kind" ${TRAIN_FOX:-./train_fox} --resume --out $scratch/run/$kind
    said "step 8/8  validation loss"
    losses=$(sed -n 's/.*"loss":\([0-9.]*\).*/\1/p; s/.*"loss": \([0-9.]*\).*/\1/p' $scratch/run/$kind/log.jsonl | sed -n '1p;8p' | xargs)
    check "the loss begins at ln 70000 = 11.156: $losses" awk -v l="$losses" 'BEGIN { split(l, x, " ")
        exit !(x[1] > 11.0 && x[1] < 11.4 && x[2] < x[1] - 0.1) }'
done
dies "its vocabulary of 70000 is larger than the model's 257" ${TRAIN_FOX:-./train_fox} --model fox-pro-nano --seq-len 64 \
    --batch-tokens 256 --data "$scratch/shards/cut_train_*.bin"
report

#!/usr/bin/env bash
# --pack of data/ids_to_shards, data/text_to_shards and scripts/make_shards.py. PYTHON: a python with tokenizers.
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/packing
. dev/test/check.sh
python=${PYTHON:-python3}
packed() { python3 dev/test/data/packed.py "$@"; }
write() { data/ids_to_shards --out $scratch/a --vocab-size 10 --end-of-text 9 "$@"; }
# rows T SAID EXPECTED RECORD...: of documents of one id, which ids_to_shards packs into rows of T
rows() {
    python3 dev/test/data/shard_inputs.py records $scratch/records "${@:4}" 4:
    check "--pack $1" write --pack "$1" <$scratch/records
    said "$2"
    equals "$3" "$(od -An -tu2 -v -j1024 $scratch/a_train_000000.bin | xargs)"
}

# documents of exactly T, of one token, empty; of more than T, in two records, and the rest of it
rows 4 "packed into 2 rows of 4 tokens: cropped 0 tokens (0.000%), padded none" "1 1 1 1 3 3 9 2" \
    2:1,1,1,1 2:2 2: 2:3,3
equals "1 8 4 10" "$(od -An -td4 -v -j4 -N16 $scratch/a_train_000000.bin | xargs)" # version, tokens, D, vocabulary
rows 4 "2 rows of 4 tokens: cropped 1 token (12.500%)" "1 2 3 4 5 6 7 9" 2:1,2,3,4,5,6 0:7 2:8
rows 4 "cropped 0 tokens" "1 1 1 1 2 2 2 2" 2:1,1,1,1,2,2,2,2
rows 1 "cropped 0 tokens" "1 1 2" 2:1,1 2:2
# as they come: 1 1 1 1 1 9 2 2 | 3 3 9 4 4 ..., which loses 3 and, at the end, 4
rows 8 "2 rows of 8 tokens: cropped 0 tokens" "1 1 1 1 1 9 3 3 2 2 2 2 2 9 4 4" 2:1,1,1,1,1 2:2,2,2,2,2 2:3,3 2:4,4
# the last document of a row is cropped: the shortest where none fits; another where this loses less, but not where the
# row is filled without
rows 6 "1 row of 6 tokens: cropped 5 tokens (50.000%)" "2 2 2 2 9 1" 2:1,1,1 2:2,2,2,2 2:3,3,3
rows 10 "1 row of 10 tokens: cropped 6 tokens (40.000%)" "1 1 1 1 1 1 9 2 2 2" 2:1,1,1,1,1,1 2:2,2,2,2 2:3 2:4,4,4,4
rows 10 "1 row of 10 tokens: cropped 4 tokens" "1 1 1 1 1 1 9 3 9 4" 2:1,1,1,1,1,1 2:2,2,2,2 2:3 2:4
rows 10 "2 rows of 10 tokens: cropped 0 tokens" "1 1 1 1 1 1 9 3 3 9 2 2 2 2 9 4 4 4 4 9" \
    2:1,1,1,1,1,1 2:2,2,2,2 2:3,3 2:4,4,4,4
# the buffer is full at 64 rows: what comes later is in none of them
python3 dev/test/data/shard_inputs.py records $scratch/records $(printf '2:1 %.0s' {1..96}) 2:2,2 4:
check "a full buffer" write --pack 3 <$scratch/records
equals "1 9 1" "$(od -An -tu2 -v -j1024 -N6 $scratch/a_train_000000.bin | xargs)"

# a command that fails at once leaves nothing
dies "the token ids end too early" data/ids_to_shards --out $scratch/new/a --vocab-size 10 --end-of-text 9 <<<1
check "no folder" test ! -e $scratch/new

# no token is lost but those that are counted, no document is in both splits, and a mask stays with its token
for case in "600 64" "600 1000" "40000 8"; do
    set -- $case
    packed ids $scratch/ids "$@" || fail "ids"
    convert() { data/ids_to_shards --out $scratch/$1 --vocab-size 1073741825 --end-of-text 1073741824 "${@:2}"; }
    check "documents" convert b --pack $2 <$scratch/ids
    check "rows of $2" packed check $scratch/b "$@" "$(sed -n 's/.*cropped \([0-9]*\) .*/\1/p' $scratch/stdout)"
    check "again" convert c --pack $2 <$scratch/ids
    same $scratch/{b,c}_train_000000.bin
    same $scratch/{b,c}_val_000000.bin
done
python3 dev/test/data/shard_inputs.py records $scratch/records 2:1,2147483650 2:2147483651 4:
check "--masked" write --masked --pack 4 <$scratch/records
equals "1 2147483650 9 2147483651" "$(od -An -tu4 -v -j1024 $scratch/a_train_000000.bin | xargs)"

# text_to_shards: the same rows; a trainer reads them
mkdir -p $scratch/in
for name in 1:first 2:capital 3:deep; do printf ${name#*:} >$scratch/in/${name%:*}; done
bytes() { data/text_to_shards --tokenizer byte --out $scratch/bytes "$@"; }
check "text" bytes --pack 3 $scratch/in
said "18 tokens of 16 bytes, 1.000 bytes/token; train: 3 documents, 18 tokens, 1 shard"
said "packed into 6 rows of 3 tokens: cropped 0 tokens (0.000%), padded none"
equals "f i r c a p i t a d e e s t 256 l 256 p" \
    "$(od -An -tu2 -v -j1024 $scratch/bytes_train_000000.bin | xargs -n 1 | awk '{ printf ($1 > 255 ? "%d " : "%c "), $1 + 0 }' | xargs)"
check "folders" bytes --document folder --pack 5 --val-fraction 0.1 llmc/base llmc/model
check "the trainer" ./train_fox --model fox-pro-nano --set hidden_size=32 --set num_heads=2 --set num_hidden_layers=1 \
    --seq-len 5 --batch-tokens 10 --max-steps 1 --val-tokens 10 \
    --data $scratch/bytes_train_000000.bin --val-data $scratch/bytes_val_000000.bin
dies "no row of 100 tokens; lower --pack" bytes --pack 100 $scratch/in
dies "the train split has no row of 100 tokens; lower --pack" write --pack 100 <$scratch/records
bytes_of() { bytes "$@" $scratch/in; }
for program in bytes_of write; do
    dies "--pack and --doc-len: only one of them" $program --pack 4 --doc-len 4
    dies "cannot hold one document of 9" $program --pack 9 --shard-tokens 8
done

if $python -c 'import tokenizers' 2>$scratch/stderr; then
    python3 dev/test/data/shard_inputs.py tokenizers $scratch || fail "tokenizers"
    check "make_shards.py" $python scripts/make_shards.py --tokenizer $scratch/byte.json --out $scratch/python --pack 3 $scratch/in
    said "packed into 6 rows of 3 tokens"
    check "text" bytes --pack 3 $scratch/in
    same $scratch/bytes_train_000000.bin $scratch/python_train_000000.bin
else
    skip "make_shards.py: $(tail -n 1 $scratch/stderr)"
fi
report

#!/usr/bin/env bash
# PREFIX_tokenizer.json of data/text_to_shards: it is replaced with the shards, and stays with them after an error.
scratch=build/test/tokenizer_file
. dev/test/check.sh

vocab=dev/test/fixtures/gpt2/vocab.bpe
echo "a text" >"$scratch/text"

convert() { data/text_to_shards --out "$scratch/s" "$@" "$scratch/text"; }

# tokens N: so many names in the tokenizer
tokens() {
    equals "$1" "$(python3 -c 'import json, sys; print(len(json.load(open(sys.argv[1]))["model"]["vocab"]))' "$scratch/s_tokenizer.json")"
}

check "bytes" convert --tokenizer byte
tokens 257
cp "$scratch/s_train_000000.bin" "$scratch/before"
dies "none of its files has 100 tokens" convert --tokenizer gpt2 --vocab $vocab --doc-len 100
tokens 257
mkdir "$scratch/s_train_tokenizer.json.tmp"
dies "s_train_tokenizer.json.tmp: cannot create" convert --tokenizer gpt2 --vocab $vocab
rmdir "$scratch/s_train_tokenizer.json.tmp"
tokens 257
same "$scratch/s_train_000000.bin" "$scratch/before"
check "GPT-2" convert --tokenizer gpt2 --vocab $vocab
tokens 50257
differ "$scratch/s_train_000000.bin" "$scratch/before"
equals "" "$(find "$scratch" -name '*.tmp')"
report

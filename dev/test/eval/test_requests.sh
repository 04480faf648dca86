#!/usr/bin/env bash
# --requests against a second implementation (requests.py), and what --generate takes: prompts of standard input, several
# samples, stop strings. Tests ./train_fox, or the program that TRAIN_FOX names; errors also with sanitizers.
scratch=build/test/requests
. dev/test/check.sh
sanitized=${TRAIN_FOX:-build/test/train_fox_sanitized}
# a cache of gigabytes has as many of AddressSanitizer's bytes, which it writes when the cache is freed: a smaller one
export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}max_allocation_size_mb=100:allocator_may_return_null=1
export OMP_NUM_THREADS=1
trainer_files
tiny="--model fox-pro-nano --set hidden_size=32 --set num_hidden_layers=2 --set num_heads=2 --set intermediate_size=32"
batches="--seq-len 16 --batch-tokens 64 --max-tokens 1280 --warmup-tokens 128 --lr 0.02"
check "make a text" python3 dev/test/eval/requests.py text "$scratch" - -
cat >"$scratch/in_training" <<'END'
{"type": "score", "context": "One two", "continuation": " three"}
{"type": "score", "context": "One two", "continuation": " "}
{"type": "score", "context": "One two", "continuation": ""}

{"type": "rolling", "text": "A text of more than one window of the model."}
{"type": "rolling", "text": "x"}
{"type": "generate", "prompt": "On", "max_tokens": 9, "temperature": 0}
{"type": "generate", "prompt": "On", "max_tokens": 9, "temperature": 0, "expected": ""}
{"type": "generate", "prompt": [79, 110], "max_tokens": 9, "seed": 5, "expected": [256]}
END
check "train" "$trainer" $tiny $batches --data "$scratch/text.bin" --out "$scratch/out" --eval-every 15 \
    --eval-requests "$scratch/in_training"
init=$scratch/out/step_00000020

check "requests in training" python3 dev/test/eval/requests.py in_training "$scratch" "$init" "$scratch/out/log.jsonl" \
    "$scratch/in_training" 1e-4 "$trainer"
for case in score rolling generate expected mixed reused errors stream many; do
    check "$case" python3 dev/test/eval/requests.py $case "$scratch" "$init" "$trainer"
done
check "documents" python3 dev/test/eval/requests.py documents "$scratch" "$init" "$trainer" --set document_reset=true
for case in score rolling errors generate expected mixed stream; do
    check "$case, sanitized" python3 dev/test/eval/requests.py $case "$scratch" "$init" "$sanitized"
done

dies "--requests: with which model? give --init DIR" "$trainer" $tiny --requests -
dies "--requests none: cannot open: No such file" "$trainer" --init "$init" --requests none
dies "--requests $scratch: cannot read: Is a directory" "$trainer" --init "$init" --requests "$scratch"
dies "each do one thing and exit" "$trainer" --init "$init" --requests - --bench 1
echo '{"type":"rolling","text":"x"}' >"$scratch/one"
dies "cannot write answers to standard output" sh -c '"$@" >/dev/full' - "$trainer" --init "$init" --requests "$scratch/one"
check "no requests" "$trainer" --init "$init" --requests /dev/null
equals "" "$(cat "$scratch/stdout")"
said "0 answers, 0 errors, in" stderr

# Under a limit of memory: where one is enough, all larger ones are. A cache that takes the last of it leaves nothing for
# threads and texts.
if [ -z "${TRAIN_FOX:-}" ]; then
    printf '{"type":"rolling","text":"%0300d"}\n{"type":"generate","prompt":"%0300d","max_tokens":20,"temperature":1}\n' 1 2 >"$scratch/two"
    enough=""
    for limit in $(seq 24 12 204) $(seq 260 61 1300); do
        OMP_NUM_THREADS=2 prlimit --as=$((limit << 20)) "$trainer" --init "$init" --requests "$scratch/two" \
            >"$scratch/stdout" 2>"$scratch/stderr" && enough=$limit
        [ -n "$enough" ] && equals "$limit 2" "$enough $(wc -l <"$scratch/stdout")"
    done
    check "enough memory" test -n "$enough"
fi

# --generate
text() {
    check "--generate ${*:2}" "$trainer" --init "$init" --generate 12 "${@:2}"
    cp "$scratch/stdout" "$scratch/$1"
}
text alone --prompt One
text three --prompt One --samples 3
equals "--- sample 1 of 3" "$(head -n 1 "$scratch/three")"
equals 3 "$(grep -ac '^One' "$scratch/three")"
equals "$(tail -c +19 "$scratch/three" | head -c "$(wc -c <"$scratch/alone")" | cksum)" "$(cksum <"$scratch/alone")"
printf 'One\n\nTwo' >"$scratch/prompts"
check "prompts of standard input" sh -c '"$@" <"'"$scratch/prompts"'"' - "$trainer" --init "$init" --generate 12 --prompt -
mv "$scratch/stdout" "$scratch/lines"
text empty --prompt ''
text two --prompt Two
cat "$scratch/alone" "$scratch/empty" "$scratch/two" >"$scratch/want"
same "$scratch/lines" "$scratch/want"
dies "--samples 0" "$trainer" --init "$init" --generate 3 --samples 0
dies "--min-p 2" "$trainer" --init "$init" --generate 3 --min-p 2

# --vocab of a model of bytes is refused
vocab=dev/test/fixtures/gpt2/vocab.bpe
no_vocab() { dies "--vocab: this model reads bytes: leave it out" "$@" --vocab $vocab; }
no_vocab "$trainer" --init "$init" --prompt One --generate 3
no_vocab "$trainer" --init "$init" --requests "$scratch/one"
no_vocab "$trainer" $tiny $batches --data "$shards/text.bin" --out "$scratch/none"
no_vocab "$trainer" $tiny $batches --dry-run
no_vocab "$trainer" --resume --out "$scratch/out"

# GPT-2's vocabulary: text with the tokenizer.json of the folder or --vocab, escaped or not; ids without either
rm -rf "$scratch/out"
check "train on tokens of GPT-2" "$trainer" $tiny --set vocab_size=50257 --set hidden_size=8 $batches --max-steps 2 \
    --data "$shards/gpt2.bin" --out "$scratch/out" --vocab $vocab
init=$scratch/out/step_00000002
cat >"$scratch/texts" <<'END'
{"id":1,"type":"score","context":"A \"naïve\"\n","continuation":" reply\t€"}
{"id":2,"type":"rolling","text":"A \"naïve\"\n reply\t€"}
{"id":3,"type":"generate","prompt":"A","max_tokens":3,"temperature":0}
END
cat >"$scratch/escaped" <<'END'
{"id":1,"type":"score","context":"A \\\"na\\u00efve\\\"","continuation":"\\n reply\\t\\u20ac"}
{"id":2,"type":"rolling","text":"A \\\"na\\u00efve\\\"\\n reply\\t\\u20ac"}
{"id":3,"type":"generate","prompt":"A","max_tokens":3,"temperature":0}
END
answers() { "$trainer" --init "$init" "$@" 2>"$scratch/stderr" | sort; }
answers --json-escape --requests "$scratch/texts" >"$scratch/one"
answers --requests "$scratch/escaped" >"$scratch/two"
same "$scratch/one" "$scratch/two"
equals 2 "$(grep -c '"logprob":-[0-9.]*' "$scratch/one")"
answers --requests "$scratch/texts" >"$scratch/two"
differ "$scratch/one" "$scratch/two"
check "the text of --prompt" "$trainer" --init "$init" --prompt A --generate 3 --temperature 0
equals A "$(head -c 1 "$scratch/stdout")"
mv "$init/tokenizer.json" "$scratch/gpt2.json"
answers --vocab $vocab --requests "$scratch/texts" >"$scratch/one"
same "$scratch/one" "$scratch/two"
answers --requests "$scratch/texts" >"$scratch/two"
equals 3 "$(grep -c 'give token ids, as scripts/prompt.py does' "$scratch/two")"
dies "--vocab FILE is missing: GPT-2's vocab.bpe, in the repository $vocab, to read the prompt" "$trainer" --init "$init" --prompt A --generate 3
echo '{"type":"generate","prompt":[1,2],"max_tokens":3}' >"$scratch/ids"
equals '{"text":null,"tokens":' "$(answers --requests "$scratch/ids" | head -c 22)"

# samples and requests while training, by the tokenizer beside the data
cp "$shards/gpt2.bin" "$scratch/g_train_000000.bin"
cp "$scratch/gpt2.json" "$scratch/g_tokenizer.json"
check "samples" "$trainer" $tiny --set vocab_size=50257 --set hidden_size=8 $batches --max-steps 1 \
    --data "$scratch/g_train_000000.bin" --sample-every 1 --prompt "A text" --generate 3
said "sample: A text"
sampled() { "$trainer" $tiny $batches --max-steps 1 --data "$shards/text.bin" --prompt - --generate 3 "$@"; }
for mode in "" --dry-run; do
    dies "--prompt -: a sample while training has one text, and no standard input: give --prompt TEXT" \
        sampled --sample-every 1 $mode
done
check "requests" "$trainer" $tiny --set vocab_size=50257 --set hidden_size=8 $batches --max-steps 1 \
    --data "$scratch/g_train_000000.bin" --eval-every 1 --eval-requests "$scratch/texts" --out "$scratch/g"
equals "$(grep -o '"logprob".*"tokens":[0-9]*' "$scratch/one" | sed 's/.*://')" \
    "$(grep -oE '"(score|rolling)":[^}]*' "$scratch/g/log.jsonl" | sed 's/.*"tokens":\([0-9]*\).*/\1/')"

# a tokenizer that this program does not have
sed 's/"normalizer": null/"normalizer": {"type": "NFC"}/' "$scratch/gpt2.json" >"$init/tokenizer.json"
dies "tokenizer.json: is neither the byte tokenizer nor GPT-2's, which are all that this program reads: scripts/prompt.py" \
    "$trainer" --init "$init" --prompt A --generate 3
answers --requests "$scratch/texts" >"$scratch/two"
equals 3 "$(grep -c 'give token ids, as scripts/prompt.py does' "$scratch/two")"
equals '{"text":null,"tokens":' "$(answers --requests "$scratch/ids" | head -c 22)"
echo '{' >"$init/tokenizer.json"
dies "tokenizer.json: " "$trainer" --init "$init" --prompt A --generate 3

# dev/INFERENCE.md has a row for every member
members=$(sed -n '/ members\[\]/,/};/p' llmc/serve/request.h | grep -o '"[a-z_]*"' | tr -d '"' | sort -u)
equals 14 "$(echo "$members" | wc -l)"
for member in $members; do
    check "$member in dev/INFERENCE.md" grep -q "^| \`$member\` |" dev/INFERENCE.md
done
report

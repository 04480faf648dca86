#!/usr/bin/env bash
# scripts/short_context.sh: its trial run, for real but for its length; with TEXT the encoding and the training, by programs
# that write down their arguments; the numbers at its top.
cd "$(dirname "$0")/../../.." || exit 1
root=$PWD scratch=$PWD/build/test/short_context
. dev/test/check.sh
unset PYTHON # the script would start it in place of bin/python3
mkdir -p "$scratch/bin" "$scratch/data" "$scratch/scripts"
export OMP_NUM_THREADS=1
trainer=$(realpath "${TRAIN_FOX:-./train_fox}")
[ -x "$trainer" ] || { fail "$trainer is not built"; report; }

# program PATH TEXT
program() { printf '#!/bin/sh\n%s\n' "$2" >"$scratch/$1" && chmod +x "$scratch/$1"; }
program bin/make 'echo "$*" >>make.log'
program bin/python3 'echo "$*" >>python.log
touch data/short_train_000000.bin ${HELD_OUT-data/short_val_000000.bin}
echo "3.9 characters a token; for the trainer: --set vocab_size=32000 --set bos_token_id=2 --set eos_token_id=2"'
program train_foxcu 'echo "$*" >>trainer.log'
ln -s "$trainer" "$scratch/train_fox"
ln -s "$root/data/text_to_shards" "$root/data/corpus.sh" "$scratch/data/"
cp -r scripts/short_context.sh scripts/shell "$scratch/scripts"
short() { env -C "$scratch" PATH="$scratch/bin:$PATH" "$@"; }

# the trial run: trains, and resumes with the same command
small="--batch-tokens 4Ki --val-tokens 4Ki"
for T in 2048 4096; do
    check "T=$T" short T=$T scripts/short_context.sh $small --max-steps 1
    said "recipe: the preset's, changed: seq-len $T (512)"
    said "validation loss"
    check "again" short T=$T scripts/short_context.sh $small --max-steps 2
    said "step   2/256"
    check "its folder" test -f "$scratch/out/short-fox-pro-nano-$T/step_00000002/model.safetensors"
done
rm -r "$scratch/data/"short*

# with TEXT: encoded once, for any T
mkdir "$scratch/text"
touch "$scratch/tokenizer.json" "$scratch/text/a" "$scratch/text/b" "$scratch/other"
dies "error: TEXT: text/c: no such file" short TEXT="text/a text/c" TOKENIZER=tokenizer.json scripts/short_context.sh
equals "" "$(grep train_foxcu "$scratch/make.log")"
for T in 2048 4096; do
    check "TEXT, T=$T" short TEXT="text/a text/b" TOKENIZER=tokenizer.json T=$T scripts/short_context.sh --seed 7
done
equals "scripts/make_shards.py --tokenizer tokenizer.json --val-fraction 0.005 --tokens 15182709391 --out data/short text/a text/b" \
    "$(cat "$scratch/python.log")"
equals 2 "$(grep -c -e "^--model fox-pro-360m --set vocab_size=32000 --set bos_token_id=2 --set eos_token_id=2 --seq-len [24]" \
    "$scratch/trainer.log")"
while read -r options; do
    set -f
    check "options" "$trainer" $options --gpu H100 --dry-run
    set +f
    T=$(sed 's/.*--seq-len \([0-9]*\).*/\1/' <<<"$options")
    said "recipe             analysis, changed: seq-len $T (16384), max-tokens 15032385536 (7516192768), lr 0.0003 (0.002), warmup-tokens 536870912 (268435456), lr-end 0.1 (0), weight-decay 0.01 (0.1), vocab_size 32000 (50257)"
    hours=$(awk '$1 == "time" { printf "%.1f", $2 }' "$scratch/stdout")
    check "short_context.sh says $hours hours" grep -q "[^0-9.]$hours hours" scripts/short_context.sh
done <"$scratch/trainer.log"
equals 2 "$(grep -c -e "--out out/short-fox-pro-360m-[24][0-9]* --resume --seed 7" "$scratch/trainer.log")"
check "a Transformer" short TEXT="text/a text/b" TOKENIZER=tokenizer.json MODEL=transformer-llama-360m scripts/short_context.sh
equals 1 "$(grep -c -e "--set rope_base=10000" "$scratch/trainer.log")"
rm "$scratch/data/"short*
check "fewer tokens" short TEXT=text TOKENIZER=tokenizer.json scripts/short_context.sh --max-tokens 1e9
equals 1 "$(grep -c -e "--tokens 1010000000 " "$scratch/python.log")"

rm "$scratch/data/"short* "$scratch/trainer.log"
for again in "" again; do
    dies "TEXT='text': none of its documents was held out, of one in 200: give more TEXT, or more --max-tokens" \
        short HELD_OUT= TEXT=text TOKENIZER=tokenizer.json scripts/short_context.sh
    check "no training" test ! -e "$scratch/trainer.log"
done
check "more" short TEXT=text TOKENIZER=tokenizer.json scripts/short_context.sh
check "a training" test -s "$scratch/trainer.log"

# what a run was killed over, or has not made, is not taken for the shards' options
tokens=$(wc -l <"$scratch/python.log")
: >"$scratch/data/short_options.txt"
check "an emptied file of options" short TEXT=text TOKENIZER=tokenizer.json scripts/short_context.sh
equals $((tokens + 1)) "$(wc -l <"$scratch/python.log")"
equals 1 "$(tail -n 1 "$scratch/trainer.log" | grep -c -e "--set vocab_size=32000 ")"
dies "data/short_train_*.bin: made of another TEXT or TOKENIZER: see data/short_options.txt" \
    short TEXT=other TOKENIZER=tokenizer.json scripts/short_context.sh
rm "$scratch/data/short_train_000000.bin"
check "the trial run's own shards" short scripts/short_context.sh $small --max-steps 1
check "TEXT after it" short TEXT=other TOKENIZER=tokenizer.json scripts/short_context.sh
equals $((tokens + 2)) "$(wc -l <"$scratch/python.log")"
# the steps are counted at this T
check "batches of T tokens" short TEXT=other TOKENIZER=tokenizer.json scripts/short_context.sh --batch-tokens 2Ki --max-tokens 1e9

dies "T=1024: 2048 or 4096" short T=1024 scripts/short_context.sh
dies "TOKENIZER='': no such file: the tokenizer.json" short TEXT=text scripts/short_context.sh
dies "--model none: no such preset" short TEXT=text TOKENIZER=tokenizer.json MODEL=none scripts/short_context.sh
report

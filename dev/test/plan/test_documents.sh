#!/usr/bin/env bash
# What --dry-run and log.jsonl say of packed documents, against a count of every pair of tokens: documents a sequence, the
# share of attention's pairs that they hide, and FLOPs without it, with and without a gate or a window, by one rank and three.
# TRAIN_FOX: another trainer, the GPU's, alone.
scratch=build/test/plan_documents
. dev/test/check.sh

export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
documents() { python3 dev/test/plan/documents.py "$@"; }
rm -rf $scratch
mkdir -p $scratch/texts
check "make texts" documents texts $scratch/texts
check "make shards" data/text_to_shards --tokenizer byte --out $scratch/data $scratch/texts
shard=$scratch/data_train_000000.bin

# Steps of 12 sequences of 64 tokens
program=${TRAIN_FOX:-./train_fox}
tiny="--set hidden_size=128 --set num_hidden_layers=1 --set num_heads=2 --seq-len 64 --batch-tokens 768 --micro-batch 2"
trainer() { $program $tiny --warmup-tokens 768 --max-tokens 3072 --shuffle false "$@"; }
# row NAME: the rest of the last plan's line
row() { sed -n "s/^$1  *//p" $scratch/stdout; }

# family MODEL W OPTION...: plan and log. W: keys of the window, 0 without, none without attention; or of each layer
family() {
    local out=$scratch/$1.$2 counts flops
    check "--dry-run of $1" trainer --dry-run --model "$1" --set document_reset=true --data $shard "${@:3}"
    counts=$(documents plan $shard 64 "${2/none/0}")
    equals "${counts% *} a sequence" "$(row documents | cut -d' ' -f1-3)"
    equals "${counts#* }" "$(row "other documents" | cut -d' ' -f1)"
    said "; counted in all"
    flops=$(row "model FLOPs" | cut -d' ' -f1)
    check "$1" trainer --model "$1" --set document_reset=true --data $shard --out "$out" "${@:3}"
    check "steps of $1" documents steps "$out" $shard "$2" 12
    equals "$(documents flops "$out" $shard "$2")" "$flops"
}
for model in fox-pro-nano transformer-llama-nano; do
    family $model 0
    family $model 24 --set window_size=24
done
family fox-pro-nano 24,24,0 --set num_hidden_layers=3 --set layer_types=attention:window=24*2,attention
family hgrn2-nano none --set num_heads=1 # the GPU's heads have 128 channels

# The hours of a GPU: at an MFU, in proportion to FLOPs
hours() { $program --dry-run --model fox-pro-nano --seq-len 64 --gpu H100 --mfu 5 --data $shard "$@"; }
check "hours of whole sequences" hours
gpu_hours() { row time | sed 's/ GPU-hours.*//; s/.* //'; }
whole=$(gpu_hours) of_whole=$(row "model FLOPs" | cut -d' ' -f1)
check "hours of documents" hours --set document_reset=true
if awk -v a="$(gpu_hours)" -v b="$whole" -v x="$(row "model FLOPs" | cut -d' ' -f1)" -v y="$of_whole" \
    'BEGIN { exit !(x < y && a < b && a * y / (b * x) > 0.999 && a * y / (b * x) < 1.001) }'; then
    pass
else
    fail "the hours are not those of the FLOPs"
fi

# Three ranks count what one does; random tokens have documents too
model=fox-pro-nano out=$scratch/ranks
if [ "${TRAIN_FOX:-}" ]; then
    skip "three ranks: they need as many GPUs"
elif command -v mpirun >/dev/null; then
    check "three ranks" mpirun --bind-to none -np 3 ./train_fox $tiny --warmup-tokens 768 --max-tokens 3072 \
        --shuffle false --model $model --set document_reset=true --data $shard --out $out
    check "their steps" documents steps $out $shard 0 12
else
    fail "mpirun is missing: scripts/setup.sh test"
fi

# Without document_reset nothing is said, and without data nothing is counted
keys="documents_per_sequence attention_in_other_documents"
check "one document" trainer --model $model --data $shard --out $scratch/one
check "its steps" documents none $scratch/one $keys
check "its plan" trainer --dry-run --model $model --data $shard
equals "" "$(row documents)$(row "other documents")"
check "without data" trainer --dry-run --model $model --set document_reset=true
said "documents                not known without --data"
check "data that is not there" trainer --dry-run --model $model --set document_reset=true --data "$scratch/none*"
said "data               cannot be used: "
equals "" "$(row documents)"
report

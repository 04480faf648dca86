#!/usr/bin/env bash
# Training, --dump and --eval on shards with a mask: however the targets that count are packed into micro-batches and
# ranks, loss and gradient are those of their mean, computed in one go; where all count nothing changes.
scratch=build/test/masked
. dev/test/check.sh

double=build/test/train_fox_double
files=$scratch/files
export OMP_NUM_THREADS=1
export PYTHONPATH=dev/test/trainer PYTHONDONTWRITEBYTECODE=1

rm -rf "$scratch"
mkdir -p "$scratch"
masked() { python3 dev/test/tokens/masked.py "$@"; }
for program in ./train_fox $double; do
    if [ ! -x $program ]; then fail "$program is not built: make $program"; report; fi
done
check "make the files" masked make "$files"

# Steps of 12 documents of 16 tokens
model="--model fox-pro-nano --set hidden_size=32 --set num_hidden_layers=2 --set num_heads=2 --set intermediate_size=32
    --seq-len 16 --batch-tokens 192 --warmup-tokens 192 --lr 0.01"

# run PROGRAM DATA STEPS OUT OPTION...
run() { $1 $model --data "$files/$2.bin" --max-tokens $(($3 * 192)) --out "$scratch/$4" "${@:5}"; }
# dump DATA: of the first step's documents, in one go
dump() { check "--dump of $1" $double $model --data "$files/$1.bin" --micro-batch 12 --dump "$scratch/$1.dump"; }

# ----------------------------------------------------------------------------

gradients() {
    local B
    for name in all ragged rest plain; do dump $name; done
    same "$scratch/all.dump" "$scratch/plain.dump"
    check "gradients of parts" masked parts "$scratch/all.dump" "$scratch/ragged.dump" "$scratch/rest.dump"
    for B in 12 1 2 3 4; do
        check "a step of passes of $B" run $double ragged 1 one.$B --micro-batch $B
        check "loss and gradient" masked step "$scratch/ragged.dump" "$scratch/one.$B" 1e-12
        check "passes of $B" run $double ragged 8 many.$B --micro-batch $B
        check "as in one go" masked close "$scratch/many.$B" "$scratch/many.12" 1e-9
    done
    check "in float" run ./train_fox ragged 1 float --micro-batch 2
    check "loss and gradient" masked step "$scratch/ragged.dump" "$scratch/float" 1e-4
}

# Ranks whose documents have no target that counts, or others than the next one's, with the same number of passes or not.
ranks() {
    local n by_mpirun=yes launch="mpirun --bind-to none"
    if ! command -v mpirun >/dev/null; then fail "mpirun is missing: scripts/setup.sh test"; return; fi
    for n in 2 3 5; do
        check "a step of $n ranks" run "$launch -np $n $double" ragged 1 one.ranks.$n --micro-batch 1
        check "loss and gradient" masked step "$scratch/ragged.dump" "$scratch/one.ranks.$n" 1e-12
        check "$n ranks" run "$launch -np $n $double" ragged 8 ranks.$n --micro-batch 2 --val-data "$files/ragged.bin"
        check "as in one go" masked close "$scratch/ranks.$n" "$scratch/many.12" 1e-9
    done
}

# The same bits with a mask of which everything counts, and without one.
all_count() {
    for name in all plain; do check "train on $name" run ./train_fox $name 8 $name --micro-batch 3; done
    same_bytes 8 "$scratch/all" "$scratch/plain"
    check "targets are logged with a mask" grep -q '"targets":192,' "$scratch/all/log.jsonl"
    check "and not without one" eval '! grep -q targets "$scratch/plain/log.jsonl"'
}

evaluation() {
    local n launch="mpirun --bind-to none"
    for name in all ragged; do
        check "train on $name" run $double $name 8 eval.$name --micro-batch 4 --val-data "$files/$name.bin" --val-tokens 1Mi --eval-every 8
        if [ $name = ragged ]; then equals 2 "$(grep -c '\(validation\|evaluation\) loss .* accuracy [0-9]' "$scratch/stdout")"; fi
        step=$scratch/eval.$name/step_00000008
        check "--dump of all documents" $double --init "$step" --data "$files/$name.bin" --seq-len 16 \
            --batch-tokens 384 --micro-batch 24 --dump "$scratch/dump"
        for n in 1 2; do
            rm -f "$scratch/eval.json"
            check "--eval of $n" $launch -np $n $double --init "$step" --val-data "$files/$name.bin" --micro-batch 5 \
                --eval "$scratch/eval.json"
            check "its losses" masked eval "$scratch/dump" "$scratch/eval.json"
        done
        check "validation" masked log "$scratch/eval.$name" "$scratch/eval.json"
    done
    said "60 51 60 51 60 51 60 51"
    check "no target counts of the first 512 tokens" $double --init "$step" --val-data "$files/tail.bin" --seq-len 1024 \
        --eval "$scratch/tail.json"
    said "1 target counted;"
    equals 0 "$(grep -ci nan "$scratch/stdout")"
    said '"512": null,' tail.json
}

# A step of which no target counts has no loss: AdamW goes on with a gradient of 0. Neither has a validation.
nothing() {
    check "late" run ./train_fox late 4 late --micro-batch 3
    said "step 1: none of its 192 targets counts: its gradient is 0" stderr
    said "step 3: none" stderr
    equals "2 lines" "$(wc -l <"$scratch/stderr") lines"
    equals '"targets":0,"loss":null,"grad_norm":0,' "$(grep -o '"targets":0,.*"grad_norm":0,' "$scratch/late/log.jsonl" | head -n 1)"
    check "a validation" run ./train_fox ragged 2 validated --micro-batch 3 --val-data "$files/none.bin"
    said "none of the targets counts" stderr
    equals 0 "$(grep -c accuracy "$scratch/stdout")"
    said '"val_loss":null' validated/log.jsonl
    dies "none of the 384 targets counts" ./train_fox --init "$scratch/late/step_00000004" --val-data "$files/none.bin" \
        --eval "$scratch/none.json"
    dies "none of the 192 targets of the first batch counts" ./train_fox $model --data "$files/none.bin" --micro-batch 12 \
        --dump "$scratch/none.dump"
    dies "ragged.bin has a mask of the targets that count" ./train_fox $model --data "$files/plain.bin,$files/ragged.bin"
}

gradients
ranks
all_count
evaluation
nothing
report

#!/usr/bin/env bash
# What the trainer makes of datasets: mixtures by weight, and documents that --eval rolls. Tests ./train_fox and the program
# with sanitizers, or the one that TRAIN_FOX names.
scratch=build/test/mixtures
. dev/test/check.sh
trainer_files
out=$scratch/out
export OMP_NUM_THREADS=1

# A small model, trained for 20 steps
tiny="--model fox-pro-nano --set hidden_size=16 --set num_hidden_layers=1 --set num_heads=2 --set intermediate_size=16"
batches="--seq-len 16 --batch-tokens 64 --max-tokens 1280 --warmup-tokens 128"
run() { "$trainer" "$@"; }
train() { run $tiny $batches --out "$out" "$@"; }
train_on() { train --data "$shards/$1.bin" "${@:2}"; }

# The losses of all steps, and of the parts of the held-out data at the end
losses() {
    sed -n 's/.*"event":"step".*"loss":\([^,]*\),.*/\1/p' "$out/log.jsonl"
    grep -o '"val_loss_of":.*' "$out/log.jsonl" | tail -n 1
}

mixtures() {
    local other=$scratch/other text=$shards/text.bin name
    for name in text val; do # others by their first tokens
        cp "$shards/$name.bin" "$other.$name.bin"
        printf '\1\0\2\0' | dd of="$other.$name.bin" bs=1 seek=1024 conv=notrunc 2>/dev/null
    done
    local mixture="--data $text:3,$other.text.bin:1 --val-data $shards/val.bin:1,$other.val.bin:1 --val-every 10"
    check "--dry-run of a mixture" run $tiny $batches $mixture --dry-run
    said "  75.00% of the sequences from the"
    said "tokens of $other.text.bin, read"
    said "held-out data "
    check "--dry-run without the held-out data" run $tiny $batches --data $text --val-data none --dry-run
    said "held-out data      cannot be used: 'none': no file matches"
    rm -rf "$out"
    check "a mixture" train $mixture
    said "  $shards/val.bin   "
    losses >"$scratch/whole"
    equals 2 "$(grep -c 'val_loss_of.*val.bin.*other.val.bin' "$out/log.jsonl")"
    equals 21 "$(wc -l <"$scratch/whole")"
    rm -rf "$out"
    check "stopped" train $mixture --max-steps 7
    dies "--data $text:1,$other.text.bin:1: not the data that the run" run --resume --out "$out" \
        --data "$text:1,$other.text.bin:1"
    check "resumed with the same shares" run --resume --out "$out" --data "$text:0.75,$other.text.bin:0.25" --max-steps 20
    equals "$(cat "$scratch/whole")" "$(losses)"
    rm -f "$scratch/parts"
    for name in "$shards/val.bin:1,$other.val.bin:1" "$shards/val.bin" "$other.val.bin"; do
        check "--eval of $name" run --init "$out" --val-data "$name" --eval "$scratch/mixture.json" --seq-len 16
        sed -n '/"loss_of"/,/}/s/.*": \(0\.\|[1-9]\)/\1/p; s/.*"loss_mean": //p' "$scratch/mixture.json" | cut -c1-9 >>"$scratch/parts"
    done
    equals "3 5" "$(sort "$scratch/parts" | uniq | wc -l) $(wc -l <"$scratch/parts")"
    check "--eval of few tokens" run --init "$out" --val-data "$shards/val.bin:1,$other.val.bin:1" --eval "$scratch/mixture.json" \
        --seq-len 16 --val-tokens 16
    said "--val-tokens 16: none of 1 sequence is of $other.val.bin, whose loss stays unknown; give more" stderr
    rm -rf "$out"
    dies "some of its patterns have a weight (PATTERN:WEIGHT), others have none" train --data "$text:3,$other.text.bin"
    dies "the weight of $text is 0" train --data "$text:0,$other.text.bin:1"
    rm -rf "$out"
}

rolled() {
    local documents=$scratch/documents name result
    seq 1 2000 | tee "$scratch/numbers" >"$scratch/held" # two documents each, of which one file's are held out
    set -- --tokenizer byte --doc-len 4096 --val-fraction 0.5 "$scratch/numbers" "$scratch/held"
    check "shards" data/text_to_shards --out "$documents" "$@"
    check "rolled" data/text_to_shards --out "$documents.rolled" --roll 5 "$@"
    rm -rf "$out"
    check "a model" train_on text --max-steps 1 --set hidden_size=8 --set num_heads=1
    for name in "documents.rolled" "documents --roll 5" documents "documents --roll 6"; do
        [ "$name $trainer" != "documents build/test/train_fox_sanitized" ] || continue # seconds, for what --roll 6 runs, too
        set -- $name
        check "--eval of $name" run --init "$out" --eval "$scratch/$1.json" --seq-len 4096 "${@:2}" \
            --val-data "$scratch/$1_val_*.bin"
        result=$(grep -A1 '"\(loss_mean\|last_loss\)"' "$scratch/$1.json")
        [ "$name" = documents.rolled ] && whole=$result
        case $name in
            "documents --roll 5") equals "$whole" "$result" ;;
            *.rolled) said "each the beginning of a document" ;;
            *) [ "$whole" != "$result" ] && pass || fail "$name has the losses of --roll 5" ;;
        esac
    done
    equals '"roll": 6,' "$(grep -o '"roll".*' "$scratch/documents.json")"
    mkdir -p "$scratch/others" # a part has the losses that it has alone
    for name in 2 4; do seq ${name}000 $((name + 2))000 >"$scratch/others/$name"; done
    check "shards" data/text_to_shards --tokenizer byte --doc-len 4096 --val-fraction 0.5 --out "$scratch/others" "$scratch/others"
    check "--eval of parts that roll" run --init "$out" --eval "$scratch/mixture.json" --seq-len 4096 --roll 5 \
        --val-data "$scratch/others_val_*.bin:1,$scratch/documents_val_*.bin:1"
    equals "$(sed -n 's/.*"loss_mean": \(.\{10\}\).*/\1/p' "$scratch/documents.rolled.json")" \
        "$(sed -n 's/.*documents_val_.*": \(.\{10\}\).*/\1/p' "$scratch/mixture.json" | tail -n 1)"
    dies "--roll: only --eval rolls documents" train_on text --roll 1
    dies "--roll: --val-data $shards/text.bin has no documents" run --init "$out" --eval "$scratch/no.json" --roll 1 \
        --val-data "$shards/text.bin" --seq-len 16
    rm -rf "$out"
}

for trainer in ${TRAIN_FOX:-./train_fox build/test/train_fox_sanitized}; do
    mixtures
    rolled
done
report

#!/usr/bin/env bash
# --eval: losses by position and by document against the fixtures' fp64 losses and against --dump, on one rank and on
# several; default lengths; what it refuses; that validation during training measures the same.
scratch=build/test/positions
. dev/test/check.sh

double=build/test/train_fox_double
result=$scratch/result.json
export OMP_NUM_THREADS=1
export ASAN_OPTIONS=detect_leaks=0 # MPI leaks

positions() { "$python" dev/test/eval/positions.py "$@"; }
for program in ./train_fox $double build/test/train_fox_sanitized; do
    if [ ! -x $program ]; then fail "$program is not built: make $program"; report; fi
done
make_files
check "documents" positions documents "$shards/seven.bin" 7 48
check "a long document" positions documents "$shards/long.bin" 1 65536

# A model that has learned something, with recorded options.
tiny="--model fox-pro-nano --set hidden_size=32 --set num_hidden_layers=2 --set num_heads=2 --set intermediate_size=32"
batches="--seq-len 16 --batch-tokens 64 --max-tokens 1280 --warmup-tokens 128 --lr 0.02"
model=$scratch/run/step_00000020

# evaluate PROGRAM OPTION...: --eval of the model, to $result
evaluate() { check "--eval ${*:2}" "$1" --init "$model" --eval "$result" "${@:2}"; }
# refused MESSAGE OPTION...
refused() { dies "$1" ./train_fox --init "$model" --eval "$result" "${@:2}"; }

# ----------------------------------------------------------------------------

# The fixtures' sequences are windows of one shard each, in batches that they do not fill.
fixtures() {
    local folder name length
    for folder in dev/test/fixtures/model/*; do
        name=$(basename "$folder")
        length=$(positions fixture "$folder" "$scratch/$name") || fail "shards of $name"
        check "$name in double" $double --init "$folder" --eval "$result" --val-data "$scratch/$name/*.bin" \
            --seq-len $length --micro-batch 3
        check "its losses" positions expect "$folder" "$result" 1e-9
    done
    check "fox-pro in float" ./train_fox --init dev/test/fixtures/model/fox-pro --eval "$result" \
        --val-data "$scratch/fox-pro/*.bin" --seq-len 19 --micro-batch 1
    check "its losses" positions expect dev/test/fixtures/model/fox-pro "$result" 3e-4
}

# The first tokens of each document, and windows in order: those of the first micro-batch that --dump reads.
sequences() {
    check "train" ./train_fox $tiny $batches --data "$shards/text.bin" --val-data "$shards/text.bin" --val-tokens 1Mi --eval-every 9 --out "$scratch/run"
    for length in 16 20 48; do
        check "--dump of 7 documents" $double --init "$model" --data "$shards/seven.bin" --seq-len $length \
            --batch-tokens $((7 * length)) --micro-batch 7 --dump "$scratch/dump"
        for batch in 1 3 7 9; do
            evaluate $double --val-data "$shards/seven.bin" --seq-len $length --micro-batch $batch
            said "7 of 7 sequences of $length tokens, each the beginning of a document, in batches of $batch"
            said "first tokens  mean loss   perplexity"
            check "its losses" positions dump "$scratch/dump" "$result" 1e-12
        done
    done
    check "--dump of windows" $double --init "$model" --data "$shards/text.bin" --seq-len 40 --batch-tokens 200 \
        --micro-batch 5 --dump "$scratch/dump"
    evaluate $double --val-data "$shards/text.bin" --seq-len 40 --val-tokens 161 --micro-batch 2
    check "its losses" positions dump "$scratch/dump" "$result" 1e-12
    equals "$model $shards/text.bin fox-pro-nano 16" "$(positions numbers "$result" checkpoint data model trained_seq_len)"
    evaluate build/test/train_fox_sanitized --val-data "$shards/text.bin" --seq-len 40 --val-tokens 161 --set window_size=8 --set use_rope=true
    equals "['window_size=8', 'use_rope=true']" "$(positions numbers "$result" set)"
    check "one sequence" $double --init "$model" --data "$shards/text.bin" --seq-len 640 --batch-tokens 640 \
        --dump "$scratch/dump"
    evaluate $double --val-data "$shards/text.bin" --seq-len 640 --val-tokens 1
    check "its losses, and no standard error" positions dump "$scratch/dump" "$result" 1e-12
    equals "" "$(find "$scratch" -name '*.tmp')"
}

# The last targets of every document behind shorter contexts: as in documents that begin there. The data has 3 documents with 40
# tokens more than the sequences that are read, in batches that they do not fill.
contexts() {
    local T=3200 C=1024
    check "documents" positions documents "$shards/three.bin" 3 $((T + 40))
    check "of $T tokens" positions cut "$shards/three.bin" "$shards/whole.bin" 0 $T
    check "--dump of them" $double --init "$model" --data "$shards/whole.bin" --seq-len $T --batch-tokens $((3 * T)) \
        --micro-batch 3 --dump "$scratch/dump"
    evaluate $double --val-data "$shards/three.bin" --seq-len $T --micro-batch 2
    said "     context  mean loss   of the last 2048 tokens of each document"
    said "        1024 "
    said "        1152 "
    check "by octave, and behind all of the context" positions dump "$scratch/dump" "$result" 1e-12
    check "documents cut for $C" positions cut "$shards/three.bin" "$shards/cut.bin" $((T - C - 2048)) $T
    check "--dump of them" $double --init "$model" --data "$shards/cut.bin" --seq-len $((C + 2048)) \
        --batch-tokens $((3 * (C + 2048))) --micro-batch 3 --dump "$scratch/cut"
    check "behind $C" positions behind "$scratch/cut" "$result" $C 1e-12
    mv "$result" "$scratch/alone.json"
    check "3 ranks" mpirun --bind-to none -np 3 $double --init "$model" --eval "$result" \
        --val-data "$shards/three.bin" --seq-len $T --micro-batch 2
    check "as one" positions same "$result" "$scratch/alone.json"
    evaluate ./train_fox --val-data "$shards/three.bin" --seq-len 2048
    check "no contexts" grep -q '"contexts": \[\],$' "$result" # documents are not longer than their last targets
    evaluate ./train_fox --val-data "$shards/text.bin" --seq-len 16
    equals None "$(positions numbers "$result" documents)" # a stream has none
}

# Documents that are shorter than their rows: what pads them does not count, and changes nothing before it.
alone() {
    check "--dump of 7 documents" $double --init "$model" --data "$shards/seven.bin" --seq-len 48 --batch-tokens 336 \
        --micro-batch 7 --dump "$scratch/dump"
    check "padded documents" positions padded "$shards/seven.bin" "$shards/padded.bin" 48 80
    evaluate $double --val-data "$shards/padded.bin" --seq-len 80 --micro-batch 3
    said "245 targets counted"
    check "each alone" positions alone "$scratch/dump" "$result" 48 1e-12
    mv "$result" "$scratch/alone.json"
    check "3 ranks" mpirun --bind-to none -np 3 $double --init "$model" --eval "$result" \
        --val-data "$shards/padded.bin" --seq-len 80 --micro-batch 2
    check "as one" cmp <(grep -A 9 '"octaves"' "$result") <(grep -A 9 '"octaves"' "$scratch/alone.json")
    evaluate build/test/train_fox_sanitized --val-data "$shards/padded.bin" --seq-len 48
}

# Validation has measured the same loss on the same windows.
validation() {
    evaluate ./train_fox --val-data "$shards/text.bin" --micro-batch 4
    equals "16 249" "$(positions numbers "$result" seq_len sequences)" # the trained length, all of the data
    check "as at the end of training" positions validation "$scratch/run/log.jsonl" "$result"
}

# 7 documents in 4 batches, the last one half full; the fifth rank has none.
ranks() {
    local n by_mpirun=yes
    if ! command -v mpirun >/dev/null; then fail "mpirun is missing: scripts/setup.sh test"; return; fi
    for program in ./train_fox $double build/test/train_fox_sanitized; do
        evaluate $program --val-data "$shards/seven.bin" --seq-len 48 --micro-batch 2
        cp "$result" "$scratch/alone.json"
        for n in 1 2 3 5; do
            rm "$result"
            check "$n ranks" mpirun --bind-to none -np $n $program --init "$model" --eval "$result" \
                --val-data "$shards/seven.bin" --seq-len 48 --micro-batch 2
            equals "" "$(own "$scratch/stderr")"
            check "as one" positions same "$result" "$scratch/alone.json"
        done
    done
}

# Documents of 65536 tokens are read in whole, far beyond the length of training. The model attends to 64 tokens, which takes a
# twentieth of the time.
long() {
    local small=$scratch/small/step_00000000
    check "a small model" ./train_fox --model fox-pro-nano --set hidden_size=8 --set num_hidden_layers=1 \
        --set num_heads=1 --set intermediate_size=8 --set window_size=64 $batches --data "$shards/text.bin" --max-steps 0 --out "$scratch/small"
    check "its initial weights" env OMP_NUM_THREADS=2 ./train_fox --init "$small" --eval "$result" --val-data "$shards/long.bin"
    said "       65536     "
    equals "65536 1 16" "$(positions numbers "$result" seq_len sequences trained_seq_len)"
    check "are less than a megabyte" test "$(wc -c <"$result")" -lt 1000000
    cp "$result" "$scratch/before.json"
    dies "--eval $result: cannot write: File too large" sh -c 'ulimit -f 1 && exec "$@"' - ./train_fox --init "$small" \
        --eval "$result" --val-data "$shards/long.bin" --seq-len 4096
    same "$result" "$scratch/before.json"
    check "a folder without trainer.json" cp -r "$small" "$scratch/bare"
    rm "$scratch/bare/trainer.json"
    check "has the preset's length" ./train_fox --init "$scratch/bare" --eval "$result" --val-data "$shards/text.bin"
    equals "512 None None" "$(positions numbers "$result" seq_len model trained_seq_len)"
}

errors() {
    echo kept >"$result"
    while IFS='|' read -r options message; do
        set -f
        refused "$message" ${options//@/$shards}
        set +f
    done <<END
--seq-len 16|--eval: on which text? give --val-data GLOB
--val-data @/documents.bin --seq-len 64|its documents of 32 tokens are shorter than a sequence of 64
--val-data @/text.bin --seq-len 4000|no shard has the 4001 tokens of a sequence
--val-data @/none.bin|no file matches
--val-data @/high_id.bin|token 1000 has id 257, outside the vocabulary of 257
--val-data @/truncated.bin|is truncated
--val-data @/text.bin --bench 1|each do one thing and exit: give one of them
--val-data @/text.bin --seq-len 16Mi --micro-batch 1Mi --set num_hidden_layers=1000|more than any machine holds
END
    local on="--val-data $shards/text.bin"
    dies "--eval: with which model? give --init DIR" ./train_fox $tiny --eval "$result" $on
    dies "--eval $scratch/none/e.json: cannot create: No such file" ./train_fox --init "$model" --eval "$scratch/none/e.json" $on
    dies "--eval $scratch: exists and is not a regular file" ./train_fox --init "$model" --eval "$scratch" $on
    cp -r "$model" "$scratch/large"
    check "logits that overflow" files fill "$scratch/large/model.safetensors" lm_head.weight 3e38
    dies "--init $scratch/large: the loss of sequence 1 is not finite at position 1" ./train_fox --init "$scratch/large" \
        --eval "$result" $on
    by_mpirun=yes dies "the loss of sequence " mpirun --bind-to none -np 2 ./train_fox --init "$scratch/large" --eval "$result" $on \
        --micro-batch 1
    echo '{' >"$scratch/large/trainer.json"
    dies "large/trainer.json: bad JSON" ./train_fox --init "$scratch/large" --eval "$result" $on
    equals kept "$(cat "$result")"
    equals "" "$(find "$scratch" -name '*.tmp')"
    ln -s elsewhere.json "$scratch/link.json"
    result=$scratch/link.json refused "link.json: is a link to a file that cannot be found" --val-data "$shards/text.bin"
    result= refused "--eval: is empty: give FILE" --val-data "$shards/text.bin"
}

# What a result replaces, and what it is written to straight.
written() {
    local on="--val-data $shards/text.bin" file=$scratch/file.json link=$scratch/to_file.json fifo=$scratch/fifo i
    local whole="positions numbers"
    echo mine >"$file.tmp"
    echo old >"$file"
    chmod 640 "$file"
    ln -s file.json "$link"
    check "through a link" ./train_fox --init "$model" --eval "$link" $on
    check "is whole" $whole "$file" loss_mean
    equals "640 mine file.json" "$(stat -c %a "$file") $(cat "$file.tmp") $(readlink "$link")"
    for i in 1 2 3; do ./train_fox --init "$model" --eval "$file" $on >"$scratch/at_once$i" 2>&1 & done
    for i in 1 2 3; do wait -n || fail "several at once: $(tail -n 1 "$scratch"/at_once?)"; done
    check "is whole" $whole "$file" loss_mean
    rm "$file.tmp"
    equals "" "$(find "$scratch" -name '*.tmp')"
    mkfifo "$fifo"
    cat "$fifo" >"$scratch/of_fifo.json" &
    check "to a pipe" ./train_fox --init "$model" --eval "$fifo" $on
    wait $!
    check "is whole" $whole "$scratch/of_fifo.json" loss_mean
    dies "--eval $fifo: no program reads this pipe: start its reader first" ./train_fox --init "$model" --eval "$fifo" $on
    check "to standard output" ./train_fox --init "$model" --eval /dev/stdout $on
    said '"loss_mean": '
    said "standard error of the mean loss"
    check "to nothing" ./train_fox --init "$model" --eval /dev/null $on
    dies "--eval /dev/full: cannot write: No space left on device" ./train_fox --init "$model" --eval /dev/full $on
}

# rolled.py: each checkpoint as it is and with rotated documents, in one picture
rolled() {
    local out=$scratch/rolled
    script() {
        "$python" scripts/eval/rolled.py a="$scratch/run" b="$model" a="$model" --trainer ./train_fox --val-data "$shards/long.bin" \
            --seq-len 130 --roll 5 --out "$out" "$@"
    }
    dies "--roll: -1 is below 0" script --roll -1
    equals "" "$(ls -d "$out" 2>/dev/null)"
    if ! "$python" -c 'import matplotlib' 2>/dev/null; then
        dies "Python package matplotlib is missing" script
        equals "" "$(ls -d "$out" 2>/dev/null)"
        skip "rolled.py: pip install -c scripts/requirements.txt matplotlib"
        return
    fi
    check "rolled.py" script
    equals "a.0.130 a.0.130.rolled a.1.130 a.1.130.rolled b.0.130 b.0.130.rolled" "$(cd "$out" && echo *.json | sed 's/\.json//g')"
    check "--eval of rolled documents" ./train_fox --init "$model" --eval "$result" --val-data "$shards/long.bin" --seq-len 130 --roll 5
    check "is what it has" "$python" - "$out" "$result" <<'END'
import json, sys
plain, rolled, alone = (json.load(open(path)) for path in (sys.argv[1] + "/b.0.130.json", sys.argv[1] + "/b.0.130.rolled.json", sys.argv[2]))
assert rolled["loss"] == alone["loss"] != plain["loss"] and (rolled["roll"], plain.get("roll")) == (5, None)
END
    echo 'import sys; sys.exit("measured again")' >"$scratch/never"
    check "rolled.py again" script --trainer "$scratch/never"
    equals 2 "$(grep -c '^a[^b]*: mean loss .*, .* of 1 document$' "$scratch/stdout")"
    check "a picture" grep -q 'a, rolled' "$out/rolled.svg"
    dies "/step_00000020: --roll: --val-data $shards/text.bin has no documents" \
        script --val-data "$shards/text.bin" --out "$scratch/stream"
    equals "" "$(ls "$scratch/stream")" # before it has measured anything
}

sequences
contexts
alone
fixtures
validation
ranks
long
errors
written
rolled
report

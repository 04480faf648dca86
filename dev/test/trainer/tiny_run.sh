#!/usr/bin/env bash
# A tiny run of the trainer under a checker (`make valgrind`, `make tsan`): it reads shuffled data, validates, evaluates,
# samples, saves from a thread, stops and resumes. TRAIN_FOX is the command, which fails where the checker finds anything.
scratch=build/test/tiny
. dev/test/check.sh

export OMP_NUM_THREADS=1
make_files

train() { $TRAIN_FOX --out "$scratch/run" "$@"; }

# clean MESSAGE COMMAND...: succeeds and prints no report
clean() {
    check "$@"
    equals "" "$(head -n 20 "$scratch/stderr")"
}

printf '{"type":"%s}\n' 'score","continuation":"ab"' 'generate","prompt":"a","max_tokens":9,"expected":"b"' >"$scratch/requests"
clean "train" train --model fox-pro-nano --set hidden_size=32 --set num_hidden_layers=1 --set num_heads=2 \
    --set intermediate_size=32 --seq-len 16 --batch-tokens 64 --micro-batch 2 --warmup-tokens 64 --max-tokens 384 \
    --shuffle --data "$shards/text.bin" --val-data "$shards/val.bin" --val-every 2 --save-every 2 --sample-every 3 \
    --generate 8 --max-steps 4 --eval-every 3 --eval-requests "$scratch/requests"
said "step 4/6  checkpoint: "
clean "resume" train --resume
said "step 6/6  checkpoint: "
clean "generate" $TRAIN_FOX --init "$scratch/run/step_00000006" --prompt text --generate 8
report

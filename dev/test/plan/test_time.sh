#!/usr/bin/env bash
# In a step that does not end a terminal shows the time left by its micro-batches. Ctrl-C is answered at once, and ends the
# run after a micro-batch where there is nothing to save; given again, it ends it at once. A validation shows how
# far it is, and its end leaves the checkpoint that was written before it.
# Tests ./train_fox, or TRAIN_FOX.
scratch=build/test/time
. dev/test/check.sh
export OMP_NUM_THREADS=1
trainer_files
tiny="--model fox-pro-nano --set hidden_size=32 --set num_hidden_layers=1 --set num_heads=2 --set intermediate_size=32"
run() { "$trainer" "$@"; }

out=$scratch/out
no_checkpoint() { equals "" "$(find "$out" -name '*step_*' 2>/dev/null)"; }
check "a long shard" "$python" -c "import sys; sys.path.insert(0, 'dev/test'); import cli_files as f
f.shard('$scratch/long.bin', f.tokens(4000, 257) * 1000, vocab=257)"
endless="$tiny --data $scratch/long.bin --out $out"
check "Ctrl-C in a step" files interrupt " micro-batches " 1 "$trainer" $endless --seq-len 16 --batch-tokens 64Gi --micro-batch 1
equals "75 micro-batch" "$(cat "$scratch/stdout")"
no_checkpoint
check "Ctrl-C twice in a micro-batch" files interrupt " micro-batches " 2 "$trainer" $endless --seq-len 8Ki \
    --batch-tokens 64Gi --micro-batch 1 # of seconds
equals "-2 micro-batch" "$(cat "$scratch/stdout")"
no_checkpoint
check "Ctrl-C in a validation" files interrupt "held-out loss: " 1 "$trainer" $endless --seq-len 16 --batch-tokens 64 \
    --max-tokens 64 --val-data "$scratch/long.bin" --val-tokens 4M
equals "75 micro-batch" "$(cat "$scratch/stdout")"
check "its checkpoint" test -f "$out/step_00000001/model.safetensors"
check "the plan's time" run $tiny --data "$shards/text.bin" --seq-len 16 --batch-tokens 64 --max-tokens 64
equals "fox-pro-nano: planned" "$(head -n 2 "$scratch/stdout" | cut -d' ' -f1 | xargs)"
dies "'none': no file matches" run $tiny --data none
said "fox-pro-nano: " # before what takes long: memory, weights, data
report

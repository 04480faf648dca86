#!/usr/bin/env bash
# Options of another mode: each mode refuses those that it has no use for, in one line that names the option that is meant,
# and takes all others. Tests ./train_fox, or TRAIN_FOX.
scratch=build/test/modes
. dev/test/check.sh
export OMP_NUM_THREADS=1
trainer_files
text=$scratch/files/shards/text.bin
train="$trainer --model fox-pro-nano --set hidden_size=32 --set num_hidden_layers=1 --set num_heads=2
    --set intermediate_size=32 --seq-len 16 --batch-tokens 64 --max-tokens 128 --data $text"
check "a model" $train --max-steps 0 --out "$scratch/run"
init="$trainer --init $scratch/run"

# COMMAND|OPTIONS|MESSAGE: the options are refused
while IFS='|' read -r command options message; do
    dies "$message" ${!command} $options
done <<END
init|--prompt hi --max-tokens 10|--max-tokens: of no use with --prompt: give --generate N, the number of tokens
init|--prompt hi --lr 5|--lr: of no use with --prompt: leave it out
init|--prompt hi --out $scratch/none|--out: of no use with --prompt: text goes to standard output
init|--generate 3 --shuffle|--shuffle: of no use with --generate: leave it out
init|--generate 3 --val-data $text|--val-data: of no use with --generate: leave it out
init|--requests x --max-tokens 10|--max-tokens: of no use with --requests: give --generate N
init|--requests x --prompt hi|--prompt: of no use with --requests: a request has a "prompt" of its own
init|--requests x --stop hi|--stop: of no use with --requests: a request has an "until" of its own
init|--requests x --samples 2|--samples: of no use with --requests: a request is one sample
init|--eval x --data $text|--data: of no use with --eval: give --val-data GLOB
init|--eval x --max-tokens 64|--max-tokens: of no use with --eval: give --val-tokens N
init|--eval x --val-data $text --batch-tokens 64|--batch-tokens: of no use with --eval: give --micro-batch B
init|--eval x --val-data $text --top-k 3|--top-k: of no use with --eval: leave it out
init|--eval x --val-data $text --out y|--out: of no use with --eval: its FILE is all that is written
init|--maps x --prompt hi --val-tokens 64|--val-tokens: of no use with --maps: give --seq-len T
init|--maps x --prompt hi --temperature 0|--temperature: of no use with --maps: leave it out
init|--maps x --prompt hi --resume|--resume: of no use with --maps: leave it out
train|--generate 3|--generate: of samples, which a training prints with --sample-every STEPS: give both, or none
train|--prompt hi|--prompt: of samples, which a training prints with --sample-every STEPS
train|--stop hi|--stop: of samples, which a training prints with --sample-every STEPS
train|--top-k 3 --dry-run|--top-k: of samples, which a training prints with --sample-every STEPS
train|--prompt hi --bench 1|--prompt: of samples, which a training prints with --sample-every STEPS
train|--samples 2 --sample-every 1|--samples: a training prints one sample at a time: leave it out
train|--eval-every 1 --eval-requests x --prompt hi|--prompt: of samples, which a training prints with --sample-every STEPS
END

# What is taken changes what is printed.
echo '{"type":"generate","prompt":"a"}' >"$scratch/requests"
check "defaults of requests" $init --requests "$scratch/requests" --generate 3 --temperature 0 --top-k 3 --seed 2
said '"finish":"length"'
equals 3 "$(sed 's/.*"tokens":\[\([^]]*\)\].*/\1/' "$scratch/stdout" | tr , '\n' | wc -l)"
check "samples while training" $train --sample-every 1 --generate 3 --prompt hi --stop never --top-k 3 --out "$scratch/sampled"
said "step 1/2  sample: hi"
# A recorded --sample-every counts, and what trainer.json records is no option of the command line.
check "and of a resumed run" "$trainer" --resume --out "$scratch/sampled" --max-tokens 192 --prompt ho
said "step 3/3  sample: ho"
check "its record" "$trainer" --resume --out "$scratch/sampled" --max-tokens 256 --sample-every 0
check "requests while training" $train --eval-every 2 --eval-requests "$scratch/requests" --generate 3 --temperature 0
said "step 2/2  evaluation"
check "a training's options in a benchmark" $train --bench 1 --lr 1 --out "$scratch/none" --sample-every 3 --generate 4 --prompt hi
check "and none are made" test ! -e "$scratch/none"

report

#!/bin/sh
# CPU quick start: trains fox-pro-nano on the C headers installed on the machine, without any download.
#
#   model    1.15 M parameters without the input embedding, byte vocabulary, context 512
#   data     2 Mi tokens of 16 MB of headers, one token per byte, less than one epoch
#   compute  8.5 MFLOP per token, 18 TFLOP in total: 3 minutes at 105 GFLOP/s (2 cores with AVX-512, 12,300 tokens/s)
#   memory   150 MiB
#
# Keeps the previous run: its folder is renamed to out/quickstart_1, _2 and so on. Trains half of the steps,
# then resumes from the checkpoint as after a crash, prints the held-out loss by position in the context, and
# generates a sample. By default forget gates start half open and take long to learn to stay open. This run
# uses the long initialization (f = 1 - 1/T_i, T_i from 2 to 512 tokens), which gains 0.6 bits per byte in such
# a short run.
set -eu
out=out/quickstart

[ -f data/corpus_train_000000.bin ] || data/corpus.sh data/corpus
if [ -e "$out" ]; then
    n=1
    while [ -e "${out}_$n" ]; do n=$((n + 1)); done
    mv "$out" "${out}_$n"
    echo "the previous run is now in ${out}_$n"
fi
run() {
    ./train_fox --out "$out" --resume --val-every 256 --val-tokens 128Ki --log-every 32 "$@" || {
        code=$?
        [ $code -ne 75 ] || echo "interrupted; to go on: ./train_fox --out $out --resume"
        exit $code
    }
}
train() {
    run --model fox-pro-nano --set fgate_bias_init=true --set decay_time_max=512 --shuffle \
        --data 'data/corpus_train_*.bin' --val-data 'data/corpus_val_*.bin' "$@"
}
train --max-steps 512
echo
echo "resuming from the checkpoint with the same command:"
train

echo "a sample of the trained model, from $out/step_00001024:"
echo
./train_fox --init "$out/step_00001024" --prompt '/*
 * Returns the number of' --generate 400 --temperature 0.7

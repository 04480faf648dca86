#!/bin/sh
# CPU quick start: trains fox-pro-nano on the C headers installed on the machine, without any download.
#
#   model    1.15 M parameters without the input embedding, byte vocabulary, context 512
#   data     1.75 Mi tokens of 16 MB of headers, one token per byte, less than one epoch
#   compute  8.5 MFLOP per token, 16 TFLOP in total: 99 s at 158 GFLOP/s (2 cores held to AVX2, 18,600 tokens/s)
#   memory   150 MiB
#
# Trains half of the steps, then resumes from the checkpoint as after a crash, prints samples from the first 64 steps on, and
# the held-out loss by position in the context. Ctrl-C saves a checkpoint, and the same command goes on. Keeps a run that is
# done: its folder is renamed to out/quickstart_1, _2 and so on. By default forget gates start half open and take long to
# learn to stay open. This run uses the long initialization (f = 1 - 1/T_i, T_i from 2 to 512 tokens), which gains 0.6 bits
# per byte in such a short run.
. "$(dirname "$0")/shell/help.sh"
set -eu
[ $# -eq 0 ] || die "$1: this script takes no options; --help says what it does"
out=out/quickstart done=step_00000896
mkdir -p out
exec 9>"$out.lock" # until the trainer has ended, too
flock -n 9 || die "$out: another quick start is running here; wait for it to end"

echo "quick start: trains fox-pro-nano, a small model, on the C headers of this machine, byte by byte. Its loss depends on which"
echo "headers are installed: compare it with that of other runs on this machine."
# With a trap this shell outlives a SIGINT, which the terminal sends to it, too, and waits for the trainer to save.
trap 'interrupted=1' INT
trap '[ -z "${interrupted:-}" ] || echo "interrupted; to go on: make quickstart"' EXIT
[ -f data/corpus_train_000000.bin ] || data/corpus.sh data/corpus
if [ -e "$out/$done" ]; then
    flock -n "$out/lock" true || die "$out: a training is running here; wait for it to end"
    n=1
    while [ -e "${out}_$n" ]; do n=$((n + 1)); done
    mv "$out" "${out}_$n"
    echo "the previous run is now in ${out}_$n"
elif [ -e "$out" ]; then
    echo "going on with the run in $out, which is not done"
fi
prompt='/*
 * Returns the number of'
train() {
    ./train_fox --out "$out" --resume --max-tokens 1792Ki --val-every 224 --val-tokens 32Ki --log-every 32 --model fox-pro-nano \
        --set fgate_bias_init=true --set decay_time_max=512 --shuffle --sample-every 64 --generate 120 --temperature 0.7 \
        --data 'data/corpus_train_*.bin' --val-data 'data/corpus_val_*.bin' "$@" --prompt "$prompt" || {
        code=$?
        [ $code -ne 75 ] || interrupted=1
        exit $code
    }
}
if [ ! -e "$out/step_00000448" ]; then
    train --max-steps 448
    echo
    echo "stopped half way, to show that a run goes on as if it had not been; the same command resumes from the checkpoint:"
fi
train
trap - INT EXIT

echo "a sample of the trained model, from $out/$done:"
echo
./train_fox --init "$out/$done" --prompt "$prompt" --generate 400 --temperature 0.7
cat <<END

To try next: another prompt; the loss at four times the length trained on; a Transformer on the same data, and both side by side

    ./train_fox --init $out --prompt 'static inline ' --generate 200
    ./train_fox --init $out --eval $out/loss.json --val-data 'data/corpus_val_*.bin' --seq-len 2048 --val-tokens 128Ki
    ./train_fox --model transformer-pro-nano --data 'data/corpus_train_*.bin' --val-data 'data/corpus_val_*.bin' \\
        --val-tokens 128Ki --out out/transformer && scripts/compare.py --no-plots $out out/transformer
END

#!/usr/bin/env bash
# Speed run: how long fox-pro and transformer-pro train, on one GPU, to a held-out loss of 1.5 nats, on the corpus of the
# study (dev/STUDY.md), which anyone can make. Prints a table to be pasted into an issue.
#
#   scripts/speedrun.sh
#   SIZE=nano scripts/speedrun.sh                    # a trial on the CPU, on the C headers of this machine, to 3 nats
#
#   model    8 layers, d 512, 77.8 M parameters; learning rate 1e-3, the study's best for both
#   data     256 Mi GPT-2 tokens in documents of 65,536; dev/study/corpus/corpus.sh downloads 2 GB and takes half an hour
#   compute  4,096 steps of 65,536 tokens, 7.2e8 FLOP per token, 1.9e17 FLOP a model, of which half of FoX's is pruned
#   time     4 to 8 minutes a model on one H200; the run goes on to its schedule's end. Steps count, validations do not
#   memory   6 GiB; disk: 1 GB a model
#
# TARGET is another loss, SEED another seed, CORPUS the prefix of shards that exist (data/study), OUT the folder of the runs
# (out/speedrun, out/speedrun_nano). Arguments are options of the trainer, and win: say so where you paste the table. The
# same command goes on after an interruption.
. "$(dirname "$0")/shell/help.sh"
set -eu
SIZE=${SIZE:-study}
case $SIZE in
study)
    OUT=${OUT:-out/speedrun} CORPUS=${CORPUS:-data/study} TARGET=${TARGET:-1.5} preset=125m
    shape="--set num_hidden_layers=8 --set hidden_size=512 --set num_heads=8 --seq-len 16384 --batch-tokens 64Ki
        --max-tokens 256Mi --lr 1e-3 --warmup-tokens 16Mi --val-every 128 --val-tokens 2Mi --save-every 1024 --log-every 64"
    "${0%/*}/check.sh" need gpu
    make train_foxcu data/text_to_shards data/ids_to_shards
    TRAINER=${TRAINER:-./train_foxcu}
    make_corpus() { dev/study/corpus/corpus.sh "$CORPUS.files" "$CORPUS"; }
    ;;
nano)
    OUT=${OUT:-out/speedrun_nano} CORPUS=${CORPUS:-data/corpus} TARGET=${TARGET:-3} preset=nano
    shape="--max-tokens 256Ki --val-every 8 --val-tokens 16Ki --save-every 0 --log-every 32"
    make train_fox data/text_to_shards
    TRAINER=${TRAINER:-./train_fox}
    make_corpus() { data/corpus.sh "$CORPUS"; }
    ;;
*) die "SIZE=$SIZE: study or nano" ;;
esac
check_options "$TRAINER" "$@"
[[ $TARGET =~ ^[0-9]*[.]?[0-9]+$ && $TARGET =~ [1-9] ]] || die "TARGET=$TARGET: a loss above 0, as 1.5"
[ -f "${CORPUS}_train_000000.bin" ] || make_corpus
first=${CUDA_VISIBLE_DEVICES:-0} # one GPU
export CUDA_VISIBLE_DEVICES=${first%%,*}
for family in fox-pro transformer-pro; do
    "$TRAINER" --model $family-$preset $shape --shuffle --seed "${SEED:-1}" --keep 1 --data "${CORPUS}_train_*.bin" \
        --val-data "${CORPUS}_val_*.bin" --out "$OUT/$family" --resume "$@"
done
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | grep -xm 1 '[0-9.]*' || echo none)
python3 "${0%/*}/sweep/to_loss.py" --driver "$driver" "$TARGET" "$OUT/fox-pro" "$OUT/transformer-pro"

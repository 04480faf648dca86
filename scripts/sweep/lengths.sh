#!/usr/bin/env bash
# The loss by position against the training length: FoX and the Transformer, trained on sequences of T = 4,096, 8,192 and
# 16,384 tokens, as many tokens in all, and measured to 65,536.
#
#   scripts/sweep/lengths.sh                                       # on LongCrawl64, which it downloads
#   SIZE=nano LENGTHS="128 256 512" EVAL="--seq-len 2048" scripts/sweep/lengths.sh --data 'data/mine_train_*.bin' \
#       --val-data 'data/mine_val_*.bin'                           # on a CPU
#
# SIZE is that of the presets; FAMILIES are fox-pro and transformer-pro. SEEDS, LRS, GPUS, OUT and KEEP are those of
# scripts/sweep.sh, which trains the rows, and so are resuming and interrupting. EVAL are options of --eval. The arguments
# are options of the trainer, of all runs. OUT/positions.svg is the picture, OUT/ROW/eval.json its numbers.
#
#   data     7.52 G tokens, the first 16,384 of 458,752 documents, shuffled: of T = 4,096 a document is four sequences
#   compute  2.81, 3.41 and 4.62 GFLOP per token, 2.11e19, 2.57e19 and 3.47e19 FLOP a row: 14,336 steps of 524,288 tokens;
#            1.6e20 FLOP for the six rows
#   time     on one H200: fox-pro 13.3, 16.7 and 20.1 hours where nothing is pruned, 12.5, 13.6 and 14.9 where half of
#            attention is; transformer-pro 13.2, 16.5 and 17.8. All 98 GPU-hours, or 88, as --dry-run --gpu H200 plans them
#   measure  32 Mi held-out tokens in 512 documents of 65,536: 4.0 GFLOP per token, 1.3e17 FLOP a row
#   memory   24 GiB a GPU; disk: 5 GB a row
. "$(dirname "$0")/../shell/help.sh"
set -eu
. "${0%/*}/../shell/figure.sh"
SIZE=${SIZE:-360m} OUT=${OUT:-out/lengths-${SIZE:-360m}} MODELS='' SETS='' names=''
LENGTHS=${LENGTHS:-4096 8192 16384} FAMILIES=${FAMILIES:-fox-pro transformer-pro}
refuse_blank LENGTHS FAMILIES
for length in $LENGTHS; do
    SETS+="--seq-len=$length "
    for family in $FAMILIES; do names+="$family-${SIZE}_seq-len-$length "; done
done
for family in $FAMILIES; do MODELS+="$family-$SIZE "; done
[ "$SIZE" = 360m ] && tokens=7Gi || tokens=-
WHY="SIZE=$SIZE: give --data and --val-data, shards of documents or a stream, longer than the longest sequence"
figure $tokens "$names" --shuffle "$@"

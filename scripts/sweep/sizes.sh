#!/usr/bin/env bash
# The loss by position against the model's size: FoX and the Transformer of 125 and 360 M parameters, each trained as the
# analysis runs of the paper's repository, and measured to 65,536 tokens of context.
#
#   scripts/sweep/sizes.sh                                         # on LongCrawl64, which it downloads
#   SIZES="nano micro" EVAL="--seq-len 2048" scripts/sweep/sizes.sh --max-tokens 64Ki --data 'data/mine_train_*.bin' \
#       --val-data 'data/mine_val_*.bin'                           # on a CPU
#
# SIZES="125m 360m 760m" takes the third size too, from --data: the public copy of LongCrawl64 has too few tokens
# (data/README.md). FAMILIES, EVAL and the other variables are those of scripts/sweep/lengths.sh, and so is what it writes.
#
#   data     2.68 and 7.52 G tokens (760m: 16.1), the first 16,384 of as many documents
#   compute  1.65 and 4.62 GFLOP per token (8.18), 4.43e18 and 3.47e19 FLOP a row (1.32e20): 7.8e19 FLOP for the four rows
#   time     on one H200: fox-pro 2.8 and 20.1 hours (76.2) where nothing is pruned, 2.0 and 14.9 (56.5) where half of
#            attention is; transformer-pro 2.8 and 17.8 (67.6). Four rows 44 GPU-hours, or 38; six 187, or 162, as --dry-run
#            --gpu H200 plans them
#   measure  32 Mi held-out tokens in 512 documents of 65,536: at 360m 4.0 GFLOP per token, 1.3e17 FLOP a row
#   memory   10 and 24 GiB a GPU (39); disk: 2 and 5 GB a row (10)
. "$(dirname "$0")/../shell/help.sh"
set -eu
. "${0%/*}/../shell/figure.sh"
SIZES=${SIZES:-125m 360m} OUT=${OUT:-out/sizes} MODELS='' SETS=preset tokens=-
FAMILIES=${FAMILIES:-fox-pro transformer-pro}
refuse_blank SIZES FAMILIES
for size in $SIZES; do
    for family in $FAMILIES; do MODELS+="$family-$size "; done
done
case " $SIZES " in
*" 760m "*) ;;
*" 360m "*) tokens=7Gi ;;
*" 125m "*) tokens=2.5Gi ;;
esac
WHY="SIZES=$SIZES: give --data and --val-data; scripts/longcrawl64.sh knows where 760m's come from"
figure $tokens "$MODELS" "$@"

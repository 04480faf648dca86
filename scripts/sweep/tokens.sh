#!/usr/bin/env bash
# The loss by position against the number of training tokens: FoX and the Transformer, trained on 1, 2, 4 and 7 Gi tokens,
# each with a schedule of its own, and measured to 65,536 tokens of context.
#
#   scripts/sweep/tokens.sh                                        # on LongCrawl64, which it downloads
#   SIZE=nano TOKENS="64Ki 128Ki" EVAL="--seq-len 2048" scripts/sweep/tokens.sh --data 'data/mine_train_*.bin' \
#       --val-data 'data/mine_val_*.bin'                           # on a CPU
#
# TOKENS are in rising order. SIZE, FAMILIES, EVAL and the other variables are those of scripts/sweep/lengths.sh, and so is
# what it writes.
#
#   data     7.52 G tokens, the first 16,384 of 458,752 documents: a shorter run reads the first of them
#   compute  4.62 GFLOP per token: 4.96e18, 9.92e18, 1.98e19 and 3.47e19 FLOP a row: 2,048 to 14,336 steps of 524,288 tokens;
#            1.39e20 FLOP for the eight rows
#   time     on one H200: fox-pro 2.87 hours per Gi tokens where nothing is pruned, 2.13 where half of attention is;
#            transformer-pro 2.55. All 76 GPU-hours, or 65, as --dry-run --gpu H200 plans them
#   measure  32 Mi held-out tokens in 512 documents of 65,536: 4.0 GFLOP per token, 1.3e17 FLOP a row
#   memory   24 GiB a GPU; disk: 5 GB a row
. "$(dirname "$0")/../shell/help.sh"
set -eu
. "${0%/*}/../shell/figure.sh"
SIZE=${SIZE:-360m} OUT=${OUT:-out/tokens-${SIZE:-360m}} MODELS='' SETS='' names=''
TOKENS=${TOKENS:-1Gi 2Gi 4Gi 7Gi} FAMILIES=${FAMILIES:-fox-pro transformer-pro}
refuse_blank TOKENS FAMILIES
for tokens in $TOKENS; do
    SETS+="--max-tokens=$tokens "
    for family in $FAMILIES; do names+="$family-${SIZE}_max-tokens-$tokens "; done
done
for family in $FAMILIES; do MODELS+="$family-$SIZE "; done
[ "$SIZE" = 360m ] || tokens=-
WHY="SIZE=$SIZE: give --data and --val-data, shards with as many tokens as the last of TOKENS"
figure "$tokens" "$names" "$@"

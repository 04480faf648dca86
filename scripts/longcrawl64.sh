#!/bin/sh
# The paper's 125M recipe on LongCrawl64, on one GPU. MODEL=fox-pro-360m, or any other preset from 125m up, trains that
# one by its own recipe, on as many tokens.
#
#   data     2.68 G tokens: the first 16384 of 163,840 documents; at most 5.4 GB to download, 7 min at 100 Mbit/s
#   model    fox-pro-125m, 124 M parameters without the embedding
#   work     1.65 GFLOP a token, 4.4e18 in all: 5120 steps of 524,288 tokens
#   time     4.4 hours on one H100 at 170,000 tokens/s
#   memory   16 GiB with two sequences at a time
#
# The run can be stopped and started again at any time: it goes on from its newest checkpoint.
set -eu
model=${MODEL:-fox-pro-125m}
case $model in *-360m) tokens=7Gi ;; *-760m) tokens=15Gi ;; *) tokens=2.5Gi ;; esac # data/README.md's table
data=data/longcrawl64

make train_foxcu data/longcrawl64
data/longcrawl64 --split train --tokens "$tokens" --out $data
data/longcrawl64 --split heldout --tokens 32Mi --out $data

./train_foxcu --model "$model" --data "${data}_train_*.bin" --val-data "${data}_val_*.bin" \
    --micro-batch "${MICRO_BATCH:-2}" --val-every 250 --val-tokens 8Mi --save-every 250 --log-every 10 --out "out/$model" --resume "$@"

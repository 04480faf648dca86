#!/bin/sh
# The 125M recipe of the analysis runs in the paper's repository, on LongCrawl64 and one GPU. MODEL=fox-pro-360m, or
# another preset of at least 125M parameters, trains that model with its own recipe and number of tokens. Those of 760M
# need SOURCE=DIR or URL, a larger copy of LongCrawl64 than the default one (data/README.md).
#
#   model    fox-pro-125m, 124 M parameters without the input embedding
#   data     2.68 G tokens: the first 16384 of 163,840 documents; at most 5.4 GB to download, 7 min at 100 Mbit/s
#   compute  1.65 GFLOP per token, 4.4e18 FLOP in total: 5120 steps of 524,288 tokens
#   time     2.9 hours on one H100 at 259,297 tokens/s where nothing is pruned; 2.1 with gates spread over all lengths,
#            which prunes half of attention; 1.3 while gates are as they begin. Of another GPU, nothing pruned either:
#            ./train_fox --dry-run --model fox-pro-125m --gpu A100
#   memory   14 GiB with a micro-batch of two sequences
#
# The run can be interrupted at any time. The same command resumes it from its newest checkpoint.
set -eu
model=${MODEL:-fox-pro-125m}
case $model in *-360m) tokens=7Gi ;; *-760m) tokens=15Gi ;; *) tokens=2.5Gi ;; esac # as in data/README.md
if [ $tokens = 15Gi ] && [ -z "${SOURCE:-}" ]; then
    echo "error: MODEL=$model takes 15 Gi tokens, and the default copy of LongCrawl64 has 10 Gi: set SOURCE to a larger copy" >&2
    exit 1
fi
data=data/longcrawl64
vocab=dev/test/fixtures/gpt2/vocab.bpe # for the checkpoints' tokenizer

make train_foxcu data/longcrawl64
data/longcrawl64 --split train --tokens "$tokens" --vocab $vocab --out $data ${SOURCE:+--source "$SOURCE"}
data/longcrawl64 --split heldout --tokens 32Mi --vocab $vocab --out $data ${SOURCE:+--source "$SOURCE"}

./train_foxcu --model "$model" --data "${data}_train_*.bin" --val-data "${data}_val_*.bin" \
    --micro-batch "${MICRO_BATCH:-2}" --val-every 250 --val-tokens 8Mi --save-every 250 --log-every 10 \
    --json-escape --out "out/$model" --resume "$@"

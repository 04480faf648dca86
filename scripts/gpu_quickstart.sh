#!/bin/sh
# GPU quick start: trains fox-pro-125m at its full context of 16384 on long documents of real text, the
# largest C files of the Linux source package of Debian or Ubuntu (140 MB to download).
#
#   model    124 M parameters without the input embedding, GPT-2's vocabulary
#   data     52 M of 60 M tokens in documents of 16384; 3.6 M held-out tokens in documents of 32768
#   compute  1.65 GFLOP per token, half of it pruned: 1 min 40 s on one H100 at 520,000 tokens/s
#   memory   16 GiB with a micro-batch of two sequences; MICRO_BATCH=1 needs less
#
# Then measures the held-out loss by position in documents of 32768 tokens, twice the training context.
# MODEL=transformer-pro-125m trains the baseline on the same batches.
. "$(dirname "$0")/shell/help.sh"
set -eu
model=${MODEL:-fox-pro-125m}
out=out/linux-$model
data=data/linux
for word; do # the last --out counts, as for the trainer
    case ${before:-}:$word in
    --out:*) out=$word ;;
    *:--out=*) out=${word#*=} ;;
    esac
    before=$word
done

scripts/check.sh need gpu
make train_foxcu data/text_to_shards
check_options ./train_foxcu "$@"
[ -f ${data}_train_000000.bin ] || data/source_corpus.sh $data

./train_foxcu --model "$model" --data "${data}_train_*.bin" --val-data "${data}_val_*.bin" --shuffle \
    --max-tokens 51200Ki --batch-tokens 128Ki --micro-batch "${MICRO_BATCH:-2}" --warmup-tokens 4Mi --lr 1e-3 \
    --val-every 100 --val-tokens 1Mi --save-every 100 --log-every 10 --out "$out" --resume "$@"

./train_foxcu --init "$out" --data "${data}_val_*.bin" --val-data "${data}_val_*.bin" \
    --seq-len 32768 --batch-tokens 32768 --micro-batch 1 --val-tokens 4Mi --max-steps 0

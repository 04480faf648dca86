#!/bin/sh
# Short contexts: SlimPajama, or any text, as a token stream in sequences of T = 2048 or 4096 tokens. The numbers are those of
# the 350M runs on SlimPajama in the paper's repository, whose T is 2048:
#
#     TEXT=hf://datasets/cerebras/SlimPajama-627B/train/chunk1 TOKENIZER=llama/tokenizer.json T=2048 scripts/short_context.sh
#
#   model    fox-pro-360m, 349 M parameters without the input embedding at a vocabulary of 32,000
#   data     15.0 G tokens (14 Gi) of a tokenizer of one's own, 30 GB of shards; made once for any T and MODEL
#   compute  2.39 GFLOP per token at 2048, 3.60e19 FLOP in total, 2.70 and 4.05e19 at 4096: 28,672 steps of 524,288 tokens
#   time     23.3 hours on one H100 at 2048 and 24.1 hours at 4096, where nothing is pruned, as planned from other models;
#            encoding: some 1 MB/s a core, hours (data/README.md)
#   memory   24 GiB with micro-batches of 16,384 tokens
#
# TEXT are paths that scripts/make_shards.py reads. Without it this is a trial run on the CPU, of the C headers of this
# machine (data/corpus.sh):
#
#   model    fox-pro-nano, 1.15 M parameters without the input embedding, byte vocabulary
#   data     1 Mi tokens of 16 MB of headers: less than an epoch
#   compute  13.2 MFLOP per token at 2048, 1.39e13 FLOP in total, 19.5 and 2.05e13 at 4096: 128 steps of 8,192 tokens, by
#            --dry-run 2.6 and 3.8 minutes on two cores
#   memory   290 MiB
#
# MODEL=transformer-llama-360m, or another preset, trains that model on the same batches. NAME names the shards,
# data/NAME_train_*.bin, where there are several texts: those of another TEXT or TOKENIZER are refused. TRAINER=./train_fox
# trains on the CPU. Arguments are options of the trainer, and win. The same command goes on after an interruption.
. "$(dirname "$0")/shell/help.sh"
set -eu
T=${T:-2048}
case $T in 2048 | 4096) ;; *) die "T=$T: 2048 or 4096, the length of a sequence" ;; esac
data=data/${NAME:-short}
options=${data}_options.txt # written last: the vocabulary's options, then what the shards were made of
vocabulary=
if [ -z "${TEXT:-}" ]; then
    trainer=${TRAINER:-./train_fox} model=${MODEL:-fox-pro-nano}
    sizes="--batch-tokens 8Ki --max-tokens 1Mi --val-every 32 --val-tokens 64Ki --log-every 8"
    make train_fox data/text_to_shards
    check_options ./train_fox "$@"
    [ -f "${data}_train_000000.bin" ] || {
        rm -f "$options"
        data/corpus.sh "$data"
    }
else
    trainer=${TRAINER:-./train_foxcu} model=${MODEL:-fox-pro-360m}
    sizes="--batch-tokens 512Ki --max-tokens 14Gi --warmup-tokens 512Mi --lr 3e-4 --lr-end 0.1 --weight-decay 0.01
        --val-every 250 --val-tokens 8Mi --save-every 250 --log-every 10"
    case $model in transformer-*) sizes="$sizes --set rope_base=10000" ;; esac
    [ -f "${TOKENIZER:-}" ] || die "TOKENIZER='${TOKENIZER:-}': no such file: the tokenizer.json to encode TEXT with"
    for text in $TEXT; do
        case $text in hf://*) ;; *) [ -e "$text" ] || die "TEXT: $text: no such file" ;; esac
    done
    make "${trainer#./}" train_fox data/ids_to_shards
    tokens=$(./train_fox --dry-run --model "$model" --seq-len "$T" $sizes "$@" | awk '$1 == "training" { print $2 }')
    [ -n "$tokens" ] || exit 1 # after the trainer's message
    made="TOKENIZER=$TOKENIZER TEXT=$TEXT"
    if [ ! -f "${data}_train_000000.bin" ] || [ ! -s "$options" ]; then
        rm -f "$options"
        # 1% more than is trained on, for the held-out text. Its last line has the options of this vocabulary
        "${PYTHON:-python3}" scripts/make_shards.py --tokenizer "$TOKENIZER" --val-fraction 0.005 \
            --tokens $((tokens + tokens / 100)) --out "$data" $TEXT >"$options.tmp"
        cat "$options.tmp"
        [ -f "${data}_val_000000.bin" ] ||
            die "TEXT='$TEXT': none of its documents was held out, of one in 200: give more TEXT, or more --max-tokens"
        vocabulary=$(sed -n 's/.*for the trainer: //p' "$options.tmp")
        printf '%s\n' "$vocabulary" "$made" >"$options.tmp"
        mv "$options.tmp" "$options"
    fi
    vocabulary=$(sed -n 1p "$options")
    case $(sed -n 2p "$options") in
    "$made" | '') ;;
    *) die "${data}_train_*.bin: made of another TEXT or TOKENIZER: see $options; set NAME to make others, or remove them" ;;
    esac
fi

exec $trainer --model "$model" $vocabulary --seq-len "$T" $sizes --data "${data}_train_*.bin" \
    --val-data "${data}_val_*.bin" --out "out/${data#data/}-$model-$T" --resume "$@"

#!/bin/sh
# Sequences of a million tokens: fox-pro-125m on documents of 1,048,576 tokens, over two GPUs that share each sequence.
# Such documents are source trees, whose files follow one another in the order of their names:
#
#     TREES="linux-6.12/*/ llvm-project/*/ gcc-14/" scripts/sweep/million.sh --max-tokens 256Mi
#
#   model    fox-pro-125m, 123.9 M parameters without the input embedding, GPT-2 vocabulary
#   data     1,048,576 tokens a document, 2.4 MB of C headers; a tree's rest is dropped, and files that are not text are
#            left out. 2 bytes of disk a token
#   compute  58.7 GFLOP per token where nothing is pruned, 99% of them in attention: 1.58e19 FLOP at 256 Mi tokens; what the
#            gates forget is not computed
#   steps    1,048,576 tokens, one sequence: 256 at 256 Mi tokens. Without --max-tokens the preset's 2.5 Gi, 2,560
#   memory   48 GiB on each of two GPUs with --recompute block, 81 on one: ./train_fox --dry-run --gpu H100 --model
#            fox-pro-125m --seq-len 1Mi --batch-tokens 1Mi --recompute block --sequence-ranks 2 plans it
#   disk     2 GB a checkpoint, of which the newest three are kept
#
# TREES are folders, each one text; names with blanks are not possible. VAL_TREES are held out; without them a twentieth of
# TREES is. RANKS=N takes N GPUs of this host (2), SEQUENCE_RANKS as many for a sequence (RANKS), a divisor of the 12 heads:
# RANKS=4 SEQUENCE_RANKS=2 trains two sequences at once, and then a step needs two: --batch-tokens 2Mi. MODEL is another
# preset, DOC_LEN another length. The shards are made once, data/NAME_train_*.bin (NAME=million); of other TREES they are
# refused. Arguments are options of the trainer, and win. The same command goes on after an interruption, on another number
# of GPUs too; `kill -USR1` to this process saves and leaves. log.jsonl says in attention_share how evenly pruning leaves
# attention to the GPUs.
. "$(dirname "$0")/../shell/help.sh"
set -eu
model=${MODEL:-fox-pro-125m} length=${DOC_LEN:-1Mi} data=data/${NAME:-million} ranks=${RANKS:-2}
sequence_ranks=${SEQUENCE_RANKS:-$ranks} vocab=dev/test/fixtures/gpt2/vocab.bpe
encode="data/text_to_shards --tokenizer gpt2 --vocab $vocab --document folder --skip-binary --doc-len $length"

[ -n "${TREES:-}" ] || [ -f "${data}_train_000000.bin" ] ||
    die "TREES: folders of source trees to make documents of; see the top of this script"
make data/text_to_shards train_foxcu USE_MPI=1 USE_NCCL=1
check_options ./train_foxcu "$@"
made="TREES=${TREES:-} VAL_TREES=${VAL_TREES:-} DOC_LEN=$length"
if [ ! -f "${data}_train_000000.bin" ]; then
    echo "$made" >"${data}_made.txt"
    if [ -n "${VAL_TREES:-}" ]; then # first: where it fails the next run makes both
        $encode --out "${data}_held" $VAL_TREES
        $encode --out "$data" $TREES
    else
        $encode --val-fraction 0.05 --out "$data" $TREES
    fi
elif [ -n "${TREES:-}" ] && [ -f "${data}_made.txt" ] && [ "$(cat "${data}_made.txt")" != "$made" ]; then
    die "${data}_train_*.bin: made with $(cat "${data}_made.txt"); set NAME to make others, or remove them"
fi
# text_to_shards replaces both splits of a prefix: the held-out shards of other trees may remain from an earlier time
held="${data}_val_*.bin"
[ -f "${data}_val_000000.bin" ] || [ ! -f "${data}_held_train_000000.bin" ] || held="${data}_held_train_*.bin"

launch=
if [ "$ranks" != 1 ]; then
    # --bind-to none: mpirun would bind a rank to one core
    launch="mpirun -np $ranks --bind-to none"
fi
mpirun_settings
exec $launch ./train_foxcu --model "$model" --sequence-ranks "$sequence_ranks" --seq-len "$length" \
    --batch-tokens "$length" --micro-batch 1 --data "${data}_train_*.bin" --val-data "$held" --shuffle \
    --val-every 32 --val-tokens 4Mi --save-every 32 --log-every 1 --out "out/${NAME:-million}-$model" --resume "$@"

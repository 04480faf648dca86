#!/bin/sh
# The published recipes on LongCrawl64, each as one command. Without variables it is the 125M recipe of the analysis runs in
# the paper's repository on one GPU; all others name their row:
#
#     MODEL=fox-pro-760m RECIPE=iclr RANKS=8 SOURCE=/copies/longcrawl64 scripts/longcrawl64.sh
#
#   RECIPE       MODEL           tokens           steps   FLOP     data      one H100       eight H100s   memory of each
#   analysis     fox-pro-125m     2,684,354,560    5,120  4.43e18   5.4 GB     2.9 hours                  16 GiB
#   submission   fox-llama-125m   2,600,000,000    4,960  4.29e18   5.2 GB     2.8 hours                  16 GiB
#   analysis     fox-pro-360m     7,516,192,768   14,336  3.47e19  15.0 GB    20.2 hours                  41 GiB
#   analysis     fox-pro-760m    16,106,127,360   30,720  1.32e20  32.2 GB    76.6 hours     9.8 hours    39 and 32 GiB
#   submission   fox-llama-760m  16,106,127,360   30,720  1.32e20  32.2 GB    76.4 hours     9.7 hours    38 and 31 GiB
#   iclr         fox-pro-760m    48,318,382,080   92,160  3.95e20  96.6 GB   229.6 hours    29.3 hours    39 and 32 GiB
#
# A step has 524,288 tokens, 32 sequences, on any number of GPUs. Hours are those where nothing is pruned, from 259,297
# tokens/s of fox-pro-125m and 58,448 of fox-pro-760m on one H100, and eight at 98% of eight times one; with gates spread
# over all lengths half of attention is pruned, which takes 0.74 and 0.76 of the time. Memory is with a micro-batch of two
# sequences below 760M, one there. Data is the disk, and at most the download: 5.4 GB take 7 min at 100 Mbit/s. For other
# models and GPUs: ./train_fox --dry-run --model transformer-llama-760m --recipe iclr --gpu A100 --ranks 8. On H200s the
# analysis run of fox-pro-760m takes 76.2 hours on one and 9.7 hours on eight, with half of attention pruned 56.5 and 7.2.
#
#   traffic  760M: 3.35 GB of gradients and 1.67 GB of weights a step and GPU: 0.02 s of 1.14 s through NVLink
#   disk     760M: 10 GB a checkpoint, 125M: 2 GB; the newest three are kept
#
# Published runs read tokens 0 to 16383 of each document once. The default copy of LongCrawl64 has 10 Gi of these, a tenth of
# the data set: 125M and 360M need no more; 15 Gi (760M) would read them 1.5 times, 45 Gi (iclr) 4.5 times. That is refused
# before anything is downloaded, unless one of these is set:
#
#   SOURCE=DIR or URL   a larger copy (data/README.md)
#   REPEAT=yes          read what the copy has repeatedly
#   DOC_COLUMNS=65536   whole documents, of which the copy has 40 Gi tokens, as four sequences each, shuffled: not as
#                       published. 45 Gi read them 1.125 times, with REPEAT=yes
#
# RANKS=N trains on N GPUs of this host. The run can be interrupted at any time. The same command resumes it from its
# newest checkpoint, on another number of GPUs too. With RANKS, `kill -USR1` to this process saves and leaves with exit code
# 75; SIGTERM and Ctrl-C leave no time to save: mpirun kills the ranks after a second.
#
# Arguments are options of the trainer, and win; its first lines, log.jsonl and trainer.json say what of the recipe is
# changed. DATA_ONLY=yes ends when the data is there. multi_node_mpirun.sh and slurm.sbatch call this script: LAUNCH is the
# command that starts the ranks, and with PREPARED=yes program and data are there.
. "$(dirname "$0")/shell/help.sh"
set -eu
model=${MODEL:-fox-pro-125m}
ranks=${RANKS:-1}
columns=${DOC_COLUMNS:-16384}
data=data/longcrawl64
out=out/$model${RECIPE:+-$RECIPE}
vocab=dev/test/fixtures/gpt2/vocab.bpe # for the checkpoints' tokenizer
launch=${LAUNCH:-}
if [ "$ranks" != 1 ]; then
    # --bind-to none: mpirun would bind a rank to one core.
    launch="mpirun -np $ranks --bind-to none"
fi
case $model in *-760m) micro_batch=1 ;; *) micro_batch=2 ;; esac
[ -z "$launch" ] || micro_batch=1
case $columns in
16384) train_data=$data shuffle= ;;
32768 | 49152 | 65536) train_data=${data}_$columns shuffle=--shuffle ;;
*) die "DOC_COLUMNS=$columns: tokens of each document, 16384 as published, or 32768, 49152 or 65536" ;;
esac
[ -z "$shuffle" ] ||
    echo "DOC_COLUMNS=$columns: not as published, where tokens 0 to 16383 of each document are read alone, in order"

# plan TRAINER OPTIONS...: what the trainer would do
plan() {
    trainer=$1
    shift
    "$trainer" --dry-run --model "$model" ${RECIPE:+--recipe "$RECIPE"} $shuffle --out "$out" "$@"
}
# shards SPLIT TOKENS PREFIX OPTIONS...
shards() {
    split=$1 tokens=$2 prefix=$3
    shift 3
    data/longcrawl64 --split "$split" --tokens "$tokens" --vocab $vocab --out "$prefix" ${SOURCE:+--source "$SOURCE"} "$@"
}

if [ -z "${PREPARED:-}" ]; then
    # with LAUNCH the GPUs are those of other machines
    [ -n "${LAUNCH:-}${DATA_ONLY:-}" ] || scripts/check.sh need gpu
    make train_fox data/longcrawl64
    tokens=$(plan ./train_fox "$@" | awk '$1 == "training" { print $2 }')
    [ -n "$tokens" ] || exit 1 # after the trainer's message
    refused=$(shards train "$tokens" "$train_data" --columns "$columns" ${REPEAT:+--at-most} --dry-run 2>&1) ||
        die "MODEL=$model${RECIPE:+ RECIPE=$RECIPE}: ${refused#error: } (here SOURCE, DOC_COLUMNS=65536, REPEAT=yes)"
    if [ -z "${DATA_ONLY:-}" ]; then make train_foxcu ${launch:+USE_MPI=1 USE_NCCL=1}; fi
    shards train "$tokens" "$train_data" --columns "$columns" ${REPEAT:+--at-most}
    shards heldout 32Mi $data
    if [ -n "${DATA_ONLY:-}" ]; then exit; fi
else
    there=$(plan ./train_foxcu --data "${train_data}_train_*.bin" "$@" | sed -n 's/^data  *//p')
    case $there in
    '') exit 1 ;; # after the trainer's message
    "cannot be used: "*) die "--data ${there#cannot be used: }; DATA_ONLY=yes scripts/longcrawl64.sh writes it" ;;
    *" reads them "*) [ -n "${REPEAT:-}" ] || die "--data ${train_data}_train_*.bin: $there; write more, or set REPEAT=yes" ;;
    esac
fi

mpirun_settings
# exec: this process becomes the trainer, or mpirun, which passes SIGUSR1 on to the ranks.
exec $launch ./train_foxcu --model "$model" ${RECIPE:+--recipe "$RECIPE"} --data "${train_data}_train_*.bin" \
    --val-data "${data}_val_*.bin" $shuffle --micro-batch "${MICRO_BATCH:-$micro_batch}" --val-every 250 --val-tokens 8Mi \
    --save-every 250 --log-every 10 --json-escape --out "$out" --resume "$@"

#!/bin/sh
# The 760M recipe of the analysis runs in the paper's repository, on LongCrawl64 and all GPUs of one host. GPUS=N takes
# the first N.
# MODEL=fox-pro-360m, or another preset of at least 125M parameters, trains that model with its own recipe and
# number of tokens.
#
#   model    fox-pro-760m, 760 M parameters without the input embedding
#   data     16.1 G tokens. The default copy of LongCrawl64 has 10.8 G at this length: a third of the run is a
#            second epoch. SOURCE=DIR or URL names a larger copy (data/README.md). At most 21.5 GB to download
#   compute  8.18 GFLOP per token, 1.32e20 FLOP in total: 30,720 steps of 524,288 tokens, 32 sequences
#   time     76.2 hours on one H200 at 58,749 tokens/s where nothing is pruned; 9.7 hours on eight, at 98% of eight times
#            that. With gates spread over all lengths half of attention is pruned: 56.5 and 7.2 hours; while gates are as
#            they begin 97%: 39.5 and 5.0. Of other GPUs: ./train_fox --dry-run --model fox-pro-760m --gpu H100 --ranks 8
#   memory   33 GiB on one GPU. Eight share the optimizer's state: 25 GiB each
#   traffic  3.35 GB of gradients and 1.67 GB of weights a step and GPU: 0.02 s of 1.14 s through NVLink
#   disk     10 GB a checkpoint, the newest three are kept
#
# A step is the same 32 sequences on any number of GPUs. The run can be interrupted at any time. The same
# command resumes it from its newest checkpoint, on another number of GPUs too. `kill -USR1` to this process
# saves and leaves with exit code 75. SIGTERM and Ctrl-C leave no time to save: mpirun kills the ranks after a
# second.
set -eu
model=${MODEL:-fox-pro-760m}
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
case $model in
*-760m) if [ -n "${SOURCE:-}" ]; then tokens=15Gi; else tokens=10Gi; fi ;;
*-360m) tokens=7Gi ;;
*) tokens=2.5Gi ;;
esac
data=data/longcrawl64
vocab=dev/test/fixtures/gpt2/vocab.bpe # for the checkpoints' tokenizer

make train_foxcu data/longcrawl64 USE_MPI=1 USE_NCCL=1
data/longcrawl64 --split train --tokens "$tokens" --vocab $vocab --out $data ${SOURCE:+--source "$SOURCE"}
data/longcrawl64 --split heldout --tokens 32Mi --vocab $vocab --out $data ${SOURCE:+--source "$SOURCE"}

# mpirun refuses root otherwise, which containers run as.
[ "$(id -u)" -ne 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# --bind-to none: mpirun would bind a rank to one core. -q: without mpirun's banner after an error or exit
# code 75. exec: this process becomes mpirun, which passes SIGUSR1 on to the ranks.
exec mpirun -np "$gpus" --bind-to none -q \
    ./train_foxcu --model "$model" --data "${data}_train_*.bin" --val-data "${data}_val_*.bin" \
    --micro-batch "${MICRO_BATCH:-1}" --val-every 250 --val-tokens 8Mi --save-every 250 --log-every 10 \
    --json-escape --out "out/$model" --resume "$@"

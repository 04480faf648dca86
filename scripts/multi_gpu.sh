#!/bin/sh
# The 760M recipe of the analysis runs in the paper's repository, on LongCrawl64 and all GPUs of one host. GPUS=N takes
# the first N.
# MODEL=fox-pro-360m, or another preset of at least 125M parameters, trains that model with its own recipe and
# number of tokens, RECIPE=iclr with that of the paper's main table: its rows are those of longcrawl64.sh.
#
#   model    fox-pro-760m, 760 M parameters without the input embedding
#   data     16.1 G tokens, at most 32.2 GB to download. The default copy of LongCrawl64 has 10.7 G of those that are
#            published: SOURCE, REPEAT or COLUMNS say what to do (longcrawl64.sh)
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
RANKS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)} MODEL=${MODEL:-fox-pro-760m} MICRO_BATCH=${MICRO_BATCH:-1}
export RANKS MODEL MICRO_BATCH
exec "${0%/*}/longcrawl64.sh" "$@" # which becomes mpirun, which passes SIGUSR1 on to the ranks

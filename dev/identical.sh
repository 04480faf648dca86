#!/bin/sh
# Do two builds of a trainer compute the same bits? For changes that must not change results.
#
#     dev/identical.sh SHARD A B                                 two CPU trainers
#     dev/identical.sh --gpu [--qkv NAME_A NAME_B] SHARD A B     two GPU trainers, on the first GPU
#
# Trains the nano model of all families for 30 steps from one seed on SHARD (byte tokens, at least 60,000), and
# compares weights and AdamW's moments byte for byte. On a GPU: --deterministic, with every level of recomputation, and
# attention with heads of 64 and 128 channels. --qkv: what each trainer calls the level between none and block, where
# the names differ. Prints a line per case, `same` or `differ`; exit code 1 if any differs.
#
# Recipe, with the state before the change in ../before (git worktree add ../before COMMIT):
#
#     make -C ../before train_fox && make train_fox data/text_to_shards
#     data/text_to_shards --tokenizer byte --out build/shard llmc
#     dev/identical.sh build/shard_train_000000.bin ../before/train_fox ./train_fox
#
# Again in double, which shows reordered sums that rounding to float can hide:
#
#     make -C ../before train_fox EXTRA_CFLAGS=-DREAL_IS_DOUBLE && make train_fox EXTRA_CFLAGS=-DREAL_IS_DOUBLE
set -eu

die() {
    echo "error: $1" >&2
    exit 1
}

gpu=false qkv_a=qkv qkv_b=qkv
if [ "${1-}" = --gpu ]; then gpu=true && shift; fi
if [ "${1-}" = --qkv ] && [ $# -ge 3 ]; then qkv_a=$2 qkv_b=$3 && shift 3; fi
[ $# = 3 ] || die "usage: dev/identical.sh [--gpu [--qkv NAME_A NAME_B]] SHARD A B"
shard=$1 a=$2 b=$3
[ -r "$shard" ] || die "$shard: cannot read this shard"
for trainer in "$a" "$b"; do [ -x "$trainer" ] || die "$trainer: is not built"; done
case $a in */*) ;; *) a=./$a ;; esac
case $b in */*) ;; *) b=./$b ;; esac

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=0

# Two passes a step; sequences that do not end with a tile of any kernel, long enough for blocks to be pruned.
run="--seq-len 500 --batch-tokens 2000 --micro-batch 2 --max-tokens 60000 --warmup-tokens 10000 --seed 7 --shuffle"

# train TRAINER OUT OPTION...
train() {
    trainer=$1 out=$scratch/$2
    shift 2
    rm -rf "$out"
    "$trainer" "$@" $run --data "$shard" --out "$out" >"$scratch/log" 2>&1 && return
    die "$trainer $*: $(tail -n 1 "$scratch/log")"
}

# compare NAME: the last checkpoints of both runs
compare() {
    result=same
    for file in model.safetensors optimizer.safetensors; do
        cmp -s "$scratch/a/step_00000030/$file" "$scratch/b/step_00000030/$file" || result=differ
    done
    [ $result = same ] || failed=1
    printf '%-6s  %s\n' $result "$1"
}

for family in fox-pro fox-llama transformer-pro transformer-llama; do
    for head_size in 64 128; do
        model="--model $family-nano --set num_heads=$((128 / head_size))"
        for level in none qkv block; do
            level_a=$level level_b=$level flags=
            if [ $level = qkv ]; then level_a=$qkv_a level_b=$qkv_b; fi
            if $gpu; then flags="--deterministic --recompute"; elif [ $level$head_size != none64 ]; then continue; fi
            train "$a" a $model $flags ${flags:+$level_a}
            train "$b" b $model $flags ${flags:+$level_b}
            compare "$family${flags:+, head size $head_size, recompute $level}"
        done
    done
done
for family in deltanet hgrn2 mamba2; do
    for level in none qkv block; do
        level_a=$level level_b=$level flags=
        if [ $level = qkv ]; then level_a=$qkv_a level_b=$qkv_b; fi
        if $gpu; then flags="--deterministic --recompute"; elif [ $level != none ]; then continue; fi
        train "$a" a --model $family-nano $flags ${flags:+$level_a}
        train "$b" b --model $family-nano $flags ${flags:+$level_b}
        compare "$family${flags:+, recompute $level}"
    done
done
exit $failed

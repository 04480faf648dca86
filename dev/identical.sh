#!/bin/sh
# Do two builds of a trainer compute the same bits? For changes that must not change results.
#
#     dev/identical.sh SHARD A B                              two CPU trainers
#     dev/identical.sh --gpu [--levels LEVELS] SHARD A B      two GPU trainers, on the first GPU
#     dev/identical.sh --ranks [--levels LEVELS] SHARD A B    the same, two ranks of each on that GPU: they are
#                                                             build/gpu/train_fox_one_gpu of two trees
#
# Trains the nano model of all families for 30 steps from one seed on SHARD (byte tokens, at least 200,000), and
# compares weights and AdamW's moments byte for byte; also with packed documents, and on a GPU in FP8 where it has
# that. On a GPU: --deterministic, with every level of recomputation, and attention with heads of 64 and 128 channels.
# Then both continue prompts, and answer requests that are longer than a window and than a page, share prefixes, and take
# more slots than there are; the answers are compared. --ranks: data parallel, and with sequences that the two ranks share,
# short ones and one of several chunks. --levels: those of --recompute, "none fused qkv block", each as A:B where the
# trainers have other names for it: where A has no `fused`, what it calls `none` is B's `fused`, "none:fused qkv block".
# Prints a line per case, `same`, `differ`, or `left out` where A is too old for it; exit code 1 if any differs. Environment:
# STEPS, to end each run after so many.
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
. "$(dirname "$0")/../scripts/shell/help.sh"
set -eu

gpu=false ranks=1 levels="none fused qkv block"
case ${1-} in
--gpu) gpu=true && shift ;;
--ranks) gpu=true ranks=2 && shift ;;
esac
if [ "${1-}" = --levels ] && [ $# -ge 2 ]; then levels=$2 && shift 2; fi
[ $# = 3 ] || die "usage: dev/identical.sh [--gpu|--ranks [--levels LEVELS]] SHARD A B"
shard=$1 a=$2 b=$3
[ -r "$shard" ] || die "$shard: cannot read this shard"
for trainer in "$a" "$b"; do [ -x "$trainer" ] || die "$trainer: is not built"; done
case $a in */*) ;; *) a=./$a ;; esac
case $b in */*) ;; *) b=./$b ;; esac

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=0

# Two passes a step; sequences that do not end with a tile of any kernel, long enough for blocks to be pruned.
run="--seq-len 500 --batch-tokens 2000 --micro-batch 2 --max-tokens 60000 --warmup-tokens 10000 --seed 7 --shuffle ${STEPS:+--max-steps $STEPS}"

# FP8's GEMMs want multiples of 16 tokens on a rank.
fp8="--fp8 --seq-len 480 --batch-tokens 1920 --max-tokens 57600"

# run_ranks COMMAND...: on one rank, or on two of one GPU; a rank that loses the other one ends by itself
port=$((20000 + $$ % 10000))
run_ranks() {
    if [ $ranks = 1 ]; then
        "$@"
        return
    fi
    port=$((port + 1)) pids=
    for rank in 0 1; do
        WORLD_SIZE=2 RANK=$rank LOCAL_WORLD_SIZE=2 LOCAL_RANK=$rank MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
            "$@" --timeout 60 &
        pids="$pids $!"
    done
    code=0
    for pid in $pids; do wait "$pid" || code=$?; done
    return $code
}

# train TRAINER OUT OPTION...
train() {
    trainer=$1 out=$scratch/$2
    shift 2
    rm -rf "$out"
    run_ranks "$trainer" $run "$@" --data "$shard" --out "$out" >"$scratch/log" 2>&1 && return
    die "$trainer $*: $(tail -n 1 "$scratch/log")"
}

# knows TRAINER OPTION...: does it plan such a run?
knows() {
    trainer=$1
    shift
    "$trainer" $run "$@" --dry-run >/dev/null 2>&1
}

# Can the GPU train in FP8?
has_fp8() {
    knows "$a" --model fox-pro-nano $fp8 && return
    echo "left out: FP8, which begins with compute capability 8.9"
    return 1
}

# compare NAME: the last checkpoints of both runs
compare() {
    result=same
    for file in model.safetensors optimizer.safetensors; do
        cmp -s "$scratch"/a/step_*/$file "$scratch"/b/step_*/$file || result=differ
    done
    [ $result = same ] || failed=1
    printf '%-6s  %s\n' $result "$1"
}

# A request a line: prompts and texts of many lengths, greedy and drawn, with equal beginnings.
text=$(head -c 3000 "$0" | tr -c 'a-z0-9 ' ' ')
for n in 1 2 60 64 65 130 700 1500; do
    part=$(printf '%.*s' $n "$text")
    printf '{"id":"s%d","type":"score","context":"%s","continuation":"%s"}\n' $n "$part" "$(printf '%.40s' "$part")"
    printf '{"id":"r%d","type":"rolling","text":"%s"}\n' $n "$part"
    for seed in 1 2 3 4 5; do
        printf '{"id":"g%d.%d","type":"generate","prompt":"%s","max_tokens":%d,"seed":%d,"temperature":%d}\n' \
            $n $seed "$part" $((seed * 30)) $seed $((seed % 3))
    done
done >"$scratch/requests.jsonl"

# answer TRAINER FILE: what it writes and answers from the last checkpoint of a
answer() {
    set -- "$1" "$2" --init "$(echo "$scratch"/a/step_*)" --seq-len 2048
    "$1" "$3" "$4" "$5" "$6" --requests "$scratch/requests.jsonl" 2>"$scratch/log" | sort >"$scratch/$2" ||
        die "$1 --requests: $(tail -n 1 "$scratch/log")"
    "$1" "$3" "$4" --prompt "$(printf '%.90s' "$text")" --samples 3 --generate 100 >>"$scratch/$2" 2>"$scratch/log" ||
        die "$1 --prompt: $(tail -n 1 "$scratch/log")"
}

# infer NAME: inference from the last checkpoint
infer() {
    answer "$a" answers.a
    answer "$b" answers.b
    result=same
    [ "$(grep -c '"id":' "$scratch/answers.a")" = "$(grep -c '' "$scratch/requests.jsonl")" ] || result=differ
    cmp -s "$scratch/answers.a" "$scratch/answers.b" || result=differ
    [ $result = same ] || failed=1
    printf '%-6s  %s, inference\n' $result "$1"
}

# cases NAME OPTION...: trains at every level of recomputation on a GPU, once on a CPU, and infers
cases() {
    name=$1
    shift
    if ! knows "$a" "$@" && knows "$b" "$@"; then
        echo "left out: $name, which A does not know"
        return
    fi
    $gpu || levels=none
    for level in $levels; do
        flags=
        if $gpu; then flags="--deterministic --recompute"; fi
        train "$a" a "$@" $flags ${flags:+${level%:*}}
        train "$b" b "$@" $flags ${flags:+${level#*:}}
        compare "$name${flags:+, recompute $level}"
    done
    [ $ranks = 2 ] || infer "$name"
}

if [ $ranks = 2 ]; then
    cases "data parallel" --model fox-pro-nano
    for family in fox-pro fox-llama transformer-pro transformer-llama transformer-swa; do
        cases "$family, shared sequences" --model $family-nano --set num_heads=2 --sequence-ranks 2
    done
    cases "shared sequences of packed documents" --model fox-pro-nano --set document_reset=true --sequence-ranks 2
    cases "a shared sequence of two chunks" --model fox-pro-nano --sequence-ranks 2 --seq-len 65536 --batch-tokens 65536 \
        --micro-batch 1 --max-tokens 196608
    if has_fp8; then cases "shared sequences in FP8" --model fox-pro-nano $fp8 --sequence-ranks 2; fi
    exit $failed
fi

for family in fox-pro fox-llama transformer-pro transformer-llama; do
    cases $family --model $family-nano --set num_heads=2
    if $gpu; then cases "$family, head size 128" --model $family-nano --set num_heads=1; fi
done
cases transformer-swa --model transformer-swa-nano
for family in deltanet gated-deltanet hgrn2 mamba2; do cases $family --model $family-nano; done
cases "layers of different kinds" --model fox-pro-nano --set num_heads=2 \
    --set layer_types=deltanet,attention:window=64:rope,mamba2,attention
for family in fox-pro mamba2; do
    cases "$family, packed documents" --model $family-nano --set document_reset=true
done
if $gpu && has_fp8; then cases "fox-pro, FP8" --model fox-pro-nano $fp8; fi
exit $failed

#!/bin/sh
# Does a build of a trainer train slower than another one? For changes that must not cost speed.
#
#     dev/turns.sh A B            two CPU trainers
#     dev/turns.sh --gpu A B      two GPU trainers, on the first GPU
#
# Times steps of every family (`--bench`, random tokens) with A and B in turns. Each turn begins with another case and with
# the other build. On a GPU: sequences of 16,384 tokens, also of 2,048, in FP8, with nothing pruned, and with
# --deterministic. Prints a line per case, of the time of forward and backward passes: the medians of A and of B in ms,
# B / A, and the largest distance of a turn from its median, in percent. A ratio within it is no difference. The line of a
# failed case says so, and the exit code is 1. Environment: TURNS (3), STEPS of each (10), CASES, an extended regular
# expression of names.
#
#     make -C ../before train_foxcu && make train_foxcu
#     CASES='760m|packed' dev/turns.sh --gpu ../before/train_foxcu ./train_foxcu
. "$(dirname "$0")/../scripts/shell/help.sh"
set -eu

gpu=false
if [ "${1-}" = --gpu ]; then gpu=true && shift; fi
[ $# = 2 ] || die "usage: dev/turns.sh [--gpu] A B"
a=$1 b=$2
for trainer in "$a" "$b"; do [ -x "$trainer" ] || die "$trainer: is not built"; done
case $a in */*) ;; *) a=./$a ;; esac
case $b in */*) ;; *) b=./$b ;; esac
turns=${TURNS:-3} steps=${STEPS:-10}
for count in "$turns" "$steps"; do
    case $count in '' | *[!0-9]* | 0*) die "TURNS and STEPS are whole numbers of 1 or more, not '$count'" ;; esac
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if $gpu; then
    one="--seq-len 16384 --batch-tokens 16384 --micro-batch 1 --recompute none"
    two="--seq-len 16384 --batch-tokens 32768 --micro-batch 2 --recompute none"
    cat <<END
fox-pro-760m                --model fox-pro-760m $one
fox-pro-760m,unpruned       --model fox-pro-760m $one --set log_pruning_tolerance=null
fox-pro-760m,FP8            --model fox-pro-760m $one --fp8
fox-pro-760m,2048           --model fox-pro-760m $one --seq-len 2048 --micro-batch 8
fox-pro-125m                --model fox-pro-125m $two
fox-pro-125m,deterministic  --model fox-pro-125m $two --deterministic
fox-pro-125m,packed         --model fox-pro-125m $two --set document_reset=true
fox-pro-125m,heads-of-128   --model fox-pro-125m $two --set num_heads=6
fox-llama-760m              --model fox-llama-760m $one
transformer-pro-760m        --model transformer-pro-760m $one
transformer-llama-760m      --model transformer-llama-760m $one
transformer-swa-760m        --model transformer-swa-760m $one
deltanet-760m               --model deltanet-760m $one
gated-deltanet-760m         --model gated-deltanet-760m $one
hgrn2-760m                  --model hgrn2-760m $one
mamba2-760m                 --model mamba2-760m $one
END
else
    run="--seq-len 512 --batch-tokens 2048 --micro-batch 4"
    for family in fox-pro fox-llama transformer-pro transformer-llama transformer-swa deltanet gated-deltanet hgrn2 mamba2; do
        echo "$family-nano --model $family-nano $run"
    done
    echo "fox-pro-nano,packed --model fox-pro-nano $run --set document_reset=true"
    echo "fox-pro-nano,4096 --model fox-pro-nano --seq-len 4096 --batch-tokens 4096 --micro-batch 1"
fi >"$scratch/all"
awk -v wanted="${CASES-}" '$1 ~ wanted' "$scratch/all" >"$scratch/cases"
[ -s "$scratch/cases" ] || die "CASES='${CASES-}' is none of: $(sed 's/ .*//' "$scratch/all" | tr '\n' ' ')"

# bench BUILD TRAINER NAME OPTION...: adds "NAME BUILD ms" to the times, ms nan where it fails
bench() {
    build=$1 trainer=$2 name=$3
    shift 3
    ms=nan
    if "$trainer" "$@" --bench "$steps" >"$scratch/log" 2>&1 </dev/null; then
        ms=$(sed -n 's/^ *forward and backward  *\([0-9.]*\) ms.*/\1/p' "$scratch/log")
    fi
    ms=${ms:-nan} # where --bench has printed no such line
    [ "$ms" != nan ] || echo "$name: $trainer: $(tail -n 1 "$scratch/log")" >&2
    echo "$name $build $ms" >>"$scratch/times"
}

turn=0
while [ $turn -lt "$turns" ]; do
    # each turn begins elsewhere in the list of cases, so that none is always the first, on a cold GPU
    awk -v turn=$turn -v turns="$turns" '{ line[NR - 1] = $0 }
        END { for (i = 0; i < NR; i++) print line[(i + int(NR * turn / turns)) % NR] }' "$scratch/cases" >"$scratch/turn"
    while read -r name options; do
        if [ $((turn % 2)) = 0 ]; then order="a b"; else order="b a"; fi
        for build in $order; do
            if [ $build = a ]; then trainer=$a; else trainer=$b; fi
            # shellcheck disable=SC2086 # options are words
            bench $build "$trainer" "$name" $options
        done
    done <"$scratch/turn"
    turn=$((turn + 1))
done

printf '%-28s %10s %10s %8s %8s\n' "forward and backward" "A, ms" "B, ms" "B / A" spread
awk '
function median(key,    n, i, j, t, x) {
    n = split(times[key], x, " ")
    for (i = 2; i <= n; i++) for (j = i; j > 1 && x[j - 1] + 0 > x[j] + 0; j--) { t = x[j]; x[j] = x[j - 1]; x[j - 1] = t }
    middle = n % 2 ? x[(n + 1) / 2] : (x[n / 2] + x[n / 2 + 1]) / 2
    for (i = 1; i <= n; i++) { t = (x[i] - middle) / middle; if (t < 0) t = -t; if (t > spread) spread = t }
    return middle
}
NR == FNR { if ($3 == "nan") failed[$1] = 1; times[$1, $2] = times[$1, $2] " " $3; next }
$1 in failed { printf "%-28s failed\n", $1; bad = 1; next }
{ spread = 0; a = median($1 SUBSEP "a"); b = median($1 SUBSEP "b")
  printf "%-28s %10.2f %10.2f %8.4f %7.2f%%\n", $1, a, b, b / a, 100 * spread }
END { exit bad }' "$scratch/times" "$scratch/cases"

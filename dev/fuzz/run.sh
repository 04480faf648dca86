#!/usr/bin/env bash
# Fuzzes all targets on all cores, each for its share of the minutes.
#
#     dev/fuzz/run.sh MINUTES         called by `make fuzz`, which builds the targets
#
# Inputs that reach new code join build/fuzz/corpus/TARGET, from which the next run continues. An input that crashes a
# target stays in build/fuzz/crashes; `build/fuzz/TARGET FILE` runs it again under libFuzzer. Prints the inputs that
# each target ran, its coverage (edges) and its crashes. Exit code 1 if there is a crash.
. "$(dirname "$0")/../../scripts/shell/help.sh"
set -u
minutes=${1:?usage: dev/fuzz/run.sh MINUTES}
cores=$(nproc)
targets=$(cd dev/fuzz && ls fuzz_*.c | sed 's/fuzz_\(.*\)\.c/\1/')
count=$(echo "$targets" | wc -l)
workers=$(((cores + count - 1) / count)) # of each target
rounds=$(((count * workers + cores - 1) / cores))
seconds=$(awk "BEGIN { print int($minutes * 60 / $rounds) }")
[ "$seconds" -gt 0 ] || { echo "error: MINUTES $minutes: less than a second a target" >&2; exit 1; }
logs=build/fuzz/logs
crashes=build/fuzz/crashes
rm -rf $logs
mkdir -p $logs $crashes
before=$(ls $crashes | wc -l)

# work TARGET WORKER: the words of the seeds that are in quotes are the dictionary
work() {
    local log=$logs/$1.$2.log words=$logs/$1.$2.dict dictionary=
    mkdir -p build/fuzz/corpus/$1
    grep -aoh '"[A-Za-z0-9_.-]\+"' dev/fuzz/seeds/$1/* | sort -u >$words
    [ ! -s $words ] || dictionary=-dict=$words
    build/fuzz/$1 -max_total_time=$seconds -seed=$(($(date +%s) + $2)) -timeout=60 -print_final_stats=1 \
        $dictionary -artifact_prefix=$crashes/$1- build/fuzz/corpus/$1 dev/fuzz/seeds/$1 >$log 2>&1 ||
        echo "$1: exit code $?: $log" >>$logs/failed
}
export -f work
export seconds logs crashes
for worker in $(seq $workers); do
    for target in $targets; do echo $target $worker; done
done | xargs -P "$cores" -L 1 bash -c 'work $0 $1'

total=0
printf '%-12s %12s %10s %8s\n' target inputs coverage crashes
for target in $targets; do
    inputs=$(cat $logs/$target.*.log | awk '/^stat::number_of_executed_units/ { n += $2 } END { printf "%.0f", n }')
    coverage=$(cat $logs/$target.*.log | sed -n 's/.* cov: \([0-9]*\) .*/\1/p' | sort -n | tail -n 1)
    printf '%-12s %12s %10s %8s\n' $target "$inputs" "${coverage:-0}" "$(ls $crashes | grep -c "^$target-")"
    total=$((total + inputs))
done
new=$(($(ls $crashes | wc -l) - before))
echo "inputs: $total, new crashes: $new"
if [ -e $logs/failed ]; then
    cat $logs/failed >&2
    exit 1
fi

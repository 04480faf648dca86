#!/usr/bin/env bash
# Runs the test programs given as arguments, JOBS at a time (default: one for each core).
#
# A test ends with a summary line `N passed, N failed`. A line `skipped: WHY` of its output says what it has left out. A
# test that exits with an error or prints no summary line counts as a failure. Its output stays in
# build/test/logs/NAME.log, where `FAILED ...` names the case. Prints a line for each test as it ends, with its seconds
# and those of CPU time; at the end what failed and was skipped. The last line is the sum of the summary lines.
set -u
export logs=build/test/logs
jobs=${JOBS:-$(nproc)}
start=$SECONDS
# Tests share the cores: few threads each, which do not spin in the time of other tests (llmc/cpu/threads.h)
[ "$jobs" = 1 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}
mkdir -p $logs

# run TEST: prints its line, and leaves `passed failed skipped` in the file NAME.counts
run() {
    local log=$logs/${1##*/}.log status counts p f s times TIMEFORMAT='%R %U %S'
    times=$({ time "$1" >"$log" 2>&1 </dev/null; } 2>&1; echo $?)
    status=${times##*$'\n'}
    counts=$(sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed$/\1 \2/p' "$log" | tail -n 1)
    s=$(grep -c '^skipped: ' "$log")
    p=${counts% *} f=${counts#* }
    if [ -z "$counts" ] || { [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; }; then
        p=${p:-0} f=1
        echo "FAILED $1: exit code $status" >>"$log"
    fi
    echo "$p $f $s" >"${log%.log}.counts"
    echo "$times" | head -n 1 | awk -v test="$1" -v p="$p" -v f="$f" -v s="$s" '{
        counts = sprintf("%6d passed, %d failed", p, f)
        if (s) counts = p + f ? counts ", " s " skipped" : "       skipped"
        printf "%-44s %-32s %6.1f s %6.1f s of CPU\n", test, counts, $1, $2 + $3 }'
}
export -f run

for test in "$@"; do rm -f "$logs/${test##*/}".*; done
[ $# -gt 0 ] && printf '%s\0' "$@" | xargs -0 -n 1 -P "$jobs" bash -c 'run "$0"'

passed=0 failed=0 skipped=0
for test in "$@"; do
    log=$logs/${test##*/}.log p=0 f=1 s=0
    read -r p f s <"${log%.log}.counts"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    [ "$s" -eq 0 ] || sed -n "s|^skipped: |$test skipped: |p" "$log"
    [ "$f" -eq 0 ] || { echo "$test failed, see $log:" && { grep '^FAILED ' "$log" || tail -n 20 "$log"; } | sed 's/^/    /'; }
done
echo "$# tests in $((SECONDS - start)) s"
echo "$passed passed, $failed failed$([ $skipped -eq 0 ] || echo ", $skipped skipped")"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]

#!/usr/bin/env bash
# Runs the test programs given as arguments, JOBS at a time (default: one for each core).
#
# A test ends with a summary line `N passed, N failed`. A line `skipped: WHY` of its output says what it has left out. A
# test that exits with an error or prints no summary line counts as a failure. Its output stays in
# build/test/logs/NAME.log, where `FAILED ...` names the case. Prints a line for each test as it ends, with its seconds
# and those of CPU time; at the end what failed and was skipped, and the command that installs missing Python
# packages. The last line is the sum of the summary lines.
#
# The Makefile, which runs a test as soon as it is built, takes the parts: --begin N, --one TEST, --sum TEST...
set -u
logs=build/test/logs
counts=${RUN_COUNTS:-$logs/counts} # what has ended, in a file each
jobs=${JOBS:-$(nproc)}
# Tests share the cores: few threads each, which spin a hundredth as long as the trainer's (llmc/cpu/threads.h), with whose
# 10000 tests of small models take up to twenty times the CPU time; MPI's ranks yield
[ "$jobs" = 1 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-100} \
    OMPI_MCA_mpi_yield_when_idle=1
# Python keeps compiled modules, also where the environment says not to: compiling transformers takes longer than a test
export PYTHONDONTWRITEBYTECODE=

# begin N: N tests follow
begin() {
    rm -rf "$counts"
    mkdir -p "$counts"
    echo "$1 $(date +%s)" >"$counts/begun"
}

# one TEST: runs it, prints its line, and leaves `passed failed skipped` in a file of $counts
one() {
    local log=$logs/${1##*/}.log status summary p f s times n of TIMEFORMAT='%R %U %S'
    times=$({ time "$1" >"$log" 2>&1 </dev/null; } 2>&1; echo $?)
    status=${times##*$'\n'}
    summary=$(sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed$/\1 \2/p' "$log" | tail -n 1)
    s=$(grep -c '^skipped: ' "$log")
    p=${summary% *} f=${summary#* }
    if [ -z "$summary" ] || { [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; }; then
        p=${p:-0} f=1
        echo "FAILED $1: exit code $status" >>"$log"
    fi
    read -r of _ <"$counts/begun"
    { # one line at a time, each with another number
        flock 9
        echo "$p $f $s" >"$counts/${1##*/}.counts"
        n=$(ls "$counts" | grep -c '\.counts$')
        echo "$times" | head -n 1 | awk -v test="$1" -v p="$p" -v f="$f" -v s="$s" -v n="$n of $of" '{
            counts = sprintf("%6d passed, %d failed", p, f)
            if (s) counts = p + f ? counts ", " s " skipped" : "       skipped"
            printf "%9s  %-44s %-32s %6.1f s %6.1f s of CPU\n", n, test, counts, $1, $2 + $3 }'
    } 9>>"$counts/begun"
}

# sum TEST...: what failed and was skipped, and the sum
sum() {
    local test passed=0 failed=0 skipped=0 log p f s begun missing texts=()
    for test; do
        log=$logs/${test##*/}.log p=0 f=1 s=0
        texts+=("$log")
        read -r p f s <"$counts/${test##*/}.counts"
        passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
        [ "$s" -eq 0 ] || sed -n "s|^skipped: |$test skipped: |p" "$log"
        [ "$f" -eq 0 ] || { echo "$test failed, see $log:" && { grep --no-group-separator -A 4 '^FAILED ' "$log" || tail -n 20 "$log"; } | sed 's/^/    /'; }
    done
    # the packages of scripts/requirements.txt that the lines name
    missing=$(cat "${texts[@]}" /dev/null | sed -n '/^skipped: /s/PyTorch/torch/gp; t; /^skipped: /p' |
        grep -ow -f <(sed -n 's/==.*//p' "${0%/*}/../../scripts/requirements.txt") | sort -u | xargs)
    [ -z "$missing" ] || echo "what was skipped for Python packages needs $missing: scripts/setup.sh test installs the small ones, test-all all"
    read -r _ begun <"$counts/begun"
    echo "$# tests in $(($(date +%s) - begun)) s"
    echo "$passed passed, $failed failed$([ $skipped -eq 0 ] || echo ", $skipped skipped")"
    [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
}

case ${1:-} in
--begin) begin "$2" ;;
--one) one "$2" ;;
--sum) sum "${@:2}" ;;
*)
    export RUN_COUNTS=$logs/counts.$$ # several may run at the same time
    counts=$RUN_COUNTS
    trap 'rm -rf "$counts"' EXIT
    begin $#
    [ $# -eq 0 ] || printf '%s\0' "$@" | xargs -0 -n 1 -P "$jobs" "$0" --one
    sum "$@"
    ;;
esac

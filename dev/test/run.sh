#!/bin/sh
# Runs the test programs given as arguments. Each ends with a summary line `N passed, N failed`; the last line
# of output is their sum. A program that exits with an error or prints no summary line counts as a failure.
set -u
passed=0 failed=0 log=build/test/output.txt
mkdir -p build/test
for test in "$@"; do
    "$test" >"$log" 2>&1
    status=$?
    counts=$(sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed$/\1 \2/p' "$log" | tail -n 1)
    p=${counts% *} f=${counts#* }
    if [ -z "$counts" ] || { [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; }; then
        p=${p:-0} f=1
        echo "$test: exit code $status"
    fi
    [ "$f" -eq 0 ] || sed 's/^/    /' "$log"
    printf '%-44s %6d passed, %d failed\n' "$test" "$p" "$f"
    passed=$((passed + p)) failed=$((failed + f))
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]

#!/usr/bin/env bash
# Runs the GPU test programs given as arguments, and ./test_foxcu, under compute-sanitizer. Programs that call
# cuBLAS or cuDNN run under memcheck only: racecheck reports races inside those libraries, and initcheck does
# not see what copies write.
set -u
failed=0 log=build/test/sanitize.txt
mkdir -p build/test
check() { # check TOOL PROGRAM
    if compute-sanitizer --tool "$1" --error-exitcode 1 "$2" quick >"$log" 2>&1; then
        printf '%-44s %-10s clean: %s\n' "$2" "$1" "$(grep ' passed, ' "$log")"
    else
        tail -n 40 "$log"
        printf '%-44s %-10s FAILED\n' "$2" "$1"
        failed=1
    fi
}
for test in "$@" ./test_foxcu; do
    check memcheck "$test"
    case $test in
    */test_matmul | */test_matvec | */test_decoding | */test_sequence | */test_attention_cudnn | ./test_foxcu) ;;
    *)
        check racecheck "$test"
        check initcheck "$test"
        ;;
    esac
done
exit $failed

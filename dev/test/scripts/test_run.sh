#!/usr/bin/env bash
# dev/test/run.sh: tests at the same time, their sum, and what it says of those that fail or skip something. And of
# check.sh: what mpirun prints is not what our programs print.
root=$PWD scratch=$PWD/build/test/run
. dev/test/check.sh

# program NAME TEXT: a test
program() { printf '#!/usr/bin/env bash\n%s\n' "$2" >"$scratch/$1" && chmod +x "$scratch/$1"; }
# run CODE JOBS NAME...: run.sh of these tests ends with the exit code
run() {
    local code=0
    (cd "$scratch" && JOBS=$2 "$root/dev/test/run.sh" "${@:3}") >"$scratch/stdout" 2>"$scratch/stderr" || code=$?
    equals "$1" $code
    equals "" "$(cat "$scratch/stderr")"
}
last() { equals "$1" "$(tail -n 1 "$scratch/stdout")"; }

program good 'echo "5 passed, 0 failed"'
program bad 'echo noise; echo "FAILED x.sh:3: boom"; echo "2 passed, 1 failed"; exit 1'
program crash 'echo "last words"; kill -9 $$'
program silent ':'
program liar 'echo "1 passed, 0 failed"; exit 3'
program none 'echo "skipped: no frobs here"; echo "0 passed, 0 failed"'
program pictures "echo \"skipped: ModuleNotFoundError: No module named 'matplotlib'\"; echo '0 passed, 0 failed'"
program models 'echo "skipped: no PyTorch, numpy and safetensors"; echo "0 passed, 0 failed"'
program some 'echo "skipped: no root"; echo "skipped: no network"; echo "1 passed, 0 failed"'

run 0 1 ./good
last "5 passed, 0 failed"
run 0 2 ./good ./none ./some
last "6 passed, 0 failed, 3 skipped"
for line in "./none skipped: no frobs here" "./some skipped: no root" "./some skipped: no network"; do said "$line"; done
equals 1 "$(grep -c '^   [123] of 3  \./none  *skipped  *[0-9.]* s  *[0-9.]* s of CPU$' "$scratch/stdout")"
equals 1 "$(grep -c '^   [123] of 3  \./some  *1 passed, 0 failed, 2 skipped  *[0-9.]* s ' "$scratch/stdout")"
equals "1 2 3" "$(sed -n 's/^ *\([0-9]*\) of 3 .*/\1/p' "$scratch/stdout" | xargs)"
equals 0 "$(grep -c 'setup.sh' "$scratch/stdout")"
run 0 2 ./good ./pictures ./models
said "needs matplotlib numpy safetensors torch: scripts/setup.sh test installs the small ones, test-all all"
last "5 passed, 0 failed, 2 skipped"
run 1 3 ./bad ./good ./crash ./silent ./liar
last "8 passed, 4 failed"
for line in "./bad failed, see build/test/logs/bad.log:" "    FAILED x.sh:3: boom" "FAILED ./crash: exit code 137" \
    "FAILED ./silent: exit code 0" "FAILED ./liar: exit code 3"; do said "$line"; done
check "the output" grep -q 'last words' "$scratch/build/test/logs/crash.log"
run 1 1 ./none
run 1 1
last "0 passed, 0 failed"

# two that wait for each other
mkfifo "$scratch/there" "$scratch/back"
program one 'echo >there; read -rt 60 <back && echo "1 passed, 0 failed"'
program two 'read -rt 60 <there; echo >back; echo "1 passed, 0 failed"'
run 0 2 ./one ./two
last "2 passed, 0 failed"

printf '[host:1] plm:rsh: setpgid failed\nerror: rank 1 was killed\n\nlibgomp: Thread creation failed\n' >"$scratch/stderr"
equals "error: rank 1 was killed" "$(by_mpirun=yes own "$scratch/stderr" | head -n 1)"
equals "2 of 4" "$(by_mpirun=yes own "$scratch/stderr" | wc -l) of $(own "$scratch/stderr" | wc -l)"
by_mpirun=yes dies "rank 1" sh -c 'echo "[host:1] a warning" >&2; echo "error: rank 1 was killed" >&2; exit 1'
report

#!/usr/bin/env bash
# How the CPU trainer starts OpenMP: threads that wait for each other spin only briefly, and there are as many as cores
# that the process may run on, unless the environment says otherwise; threads with a small limit of stacks. libgomp prints what it has read as it was loaded.
scratch=build/test/threads_started
. dev/test/check.sh
mkdir -p "$scratch"
unset OMP_NUM_THREADS OMP_WAIT_POLICY GOMP_SPINCOUNT

# spins WANT VARIABLE...: the spin count of the program that runs in the end, started with these variables
spins() {
    check "--version with ${*:2}" env "${@:2}" OMP_DISPLAY_ENV=verbose ./train_fox --version
    equals "$1" "$(grep GOMP_SPINCOUNT "$scratch/stderr" | tail -n 1 | tr -dc 0-9)"
}
spins 10000 A=1
spins 77 GOMP_SPINCOUNT=77
spins 0 OMP_WAIT_POLICY=passive
said "train_fox "
equals 1 "$(grep -c 'DISPLAY ENVIRONMENT BEGIN' "$scratch/stderr")" # it was not started again

# threads WANT COMMAND...: the number of threads that --bench reports
threads() {
    check "--bench of ${*:2}" "${@:2}" ./train_fox --model fox-pro-nano --set hidden_size=32 --set num_hidden_layers=1 \
        --seq-len 16 --batch-tokens 16 --bench 1
    said "on 1 rank of $1 thread"
}
core=$(taskset -cp $$ | sed 's/.*: //; s/[-,].*//')
threads 1 taskset -c "$core"
threads 3 env OMP_NUM_THREADS=3

# small_stack KIB: programs work where the limit would give their threads a stack of that size, and the main one has it
small_stack() {
    limited() { check "with ulimit -s $1: $2" env OMP_NUM_THREADS=3 sh -c 'ulimit -s "$0" && exec "$@"' "$1" "${@:2}"; }
    rm -rf "$scratch/run" "$scratch"/text_*
    cat dev/*.md >"$scratch/text"
    limited "$1" data/text_to_shards --tokenizer byte --val-fraction 0.5 --out "$scratch/text" "$scratch/text" README.md
    limited "$1" ./train_fox --model fox-pro-nano --set hidden_size=32 --set num_hidden_layers=2 --set num_heads=2 \
        --seq-len 64 --batch-tokens 256 --max-steps 2 --data "$scratch/text_train_*.bin" --out "$scratch/run"
    limited "$1" ./train_fox --init "$scratch/run" --eval "$scratch/result.json" --val-data "$scratch/text_train_*.bin" \
        --val-tokens 1Ki
    limited "$1" ./train_fox --init "$scratch/run" --generate 3
}
export UCX_VFS_ENABLE=n # a thread of UCX, which Debian 13's OpenMPI loads, has too small a stack then
small_stack 512
small_stack 128
report

#!/usr/bin/env bash
# dev/fuzz: each target runs its seeds and a fixed number of inputs that follow from a fixed seed. The driver for
# machines without clang finds a planted fault. TEST_ALL=1: ten times as many inputs.
scratch=build/test/fuzz
. dev/test/check.sh

# fuzz TARGET RUNS: in the background of others, so that all cores work
fuzz() {
    mkdir -p "$scratch/$1"
    build/fuzz/"$1" -runs=$(($2 * factor)) -seed=1 -timeout=60 -print_final_stats=1 -artifact_prefix="$scratch/$1-" \
        "$scratch/$1" dev/fuzz/seeds/"$1" >"$scratch/$1.log" 2>&1
    echo $? >"$scratch/$1.code"
}
export -f fuzz
export scratch factor

if [ "${TEST_ALL:-}" ]; then factor=10; else factor=1; fi
# target, inputs: about 0.5 s each
runs='json 10000
safetensors 5000
config 4000
shard 5000
requests 2000
zarr 10000
trainer 5000
vocab 100
tokenizer 1000'
echo "$runs" | xargs -P "$(nproc)" -L 1 bash -c 'fuzz $0 $1'
equals "$(cd dev/fuzz && ls fuzz_*.c)" "$(echo "$runs" | awk '{ print "fuzz_" $1 ".c" }' | sort)" # all targets
while read -r target inputs; do
    ran=$(sed -n 's/^stat::number_of_executed_units: *//p' "$scratch/$target.log")
    if [ "$(cat "$scratch/$target.code")" = 0 ] && [ "${ran:-0}" -ge $((inputs * factor)) ]; then
        pass
    else
        fail "$target: $(grep -E 'not so|ERROR|SUMMARY|error:' "$scratch/$target.log" | head -n 3); see $scratch/$target.log"
    fi
done <<<"$runs"

# the driver, without clang: three letters in a row, of which coverage shows the way
cat >"$scratch/planted.c" <<'END'
#include "../../../dev/fuzz/fuzz.h"
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
    if (bytes > 2 && data[0] == 'f')
        if (data[1] == 'o')
            if (data[2] == 'x') REQUIRE(false, "planted");
    return 0;
}
END
mkdir -p "$scratch/planted.seeds"
echo seed >"$scratch/planted.seeds/seed"
check "the driver compiles" ${CC:-cc} -std=gnu11 -D_GNU_SOURCE -fsanitize-coverage=trace-pc "$scratch/planted.c" \
    dev/fuzz/driver.c -o "$scratch/planted" -lm
"$scratch/planted" -runs=1000000 -seed=1 -artifact_prefix="$scratch/planted-" "$scratch/planted.seeds" \
    >"$scratch/stdout" 2>"$scratch/stderr"
equals 77 $?
said "not so: false: planted" stderr
equals fox "$(head -c 3 "$scratch/planted-crash")"
check "the same without the fault" "$scratch/planted" -runs=100 -seed=1 "$scratch/planted.seeds"
said "stat::number_of_executed_units: 100" stderr
report

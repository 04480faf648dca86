#!/usr/bin/env bash
# dev/identical.sh with scripts in the trainers' place: which cases it runs, on how many ranks, and what it compares.
scratch=build/test/identical
. dev/test/check.sh
echo tokens >"$scratch/shard.bin"

# A trainer: writes its options to OUT's checkpoint, where MOMENTS is another moment; answers each request with its line
cat >"$scratch/a" <<'END'
#!/bin/sh
options=$* out= requests=
case "$*" in *--fp8*--dry-run*) exit ${NO_FP8:-0} ;; esac
case "$0 $*" in */a\ *${UNKNOWN:-none}*--dry-run*) exit 1 ;; esac
while [ $# -gt 0 ]; do
    case $1 in
    --out) out=$2/step_00000030 && shift ;;
    --requests) requests=$2 && shift ;;
    esac
    shift
done
if [ "$requests" ]; then cat "$requests"; fi
if [ ! "$out" ]; then echo text && exit; fi
[ "${RANK:-0}" != "${FAILS:-none}" ] || { echo "error: rank $RANK fails" >&2 && exit 3; }
mkdir -p "$out"
echo "${WORLD_SIZE:-1} $options" | sed "s/ --out.*//" >>"$0.trained"
[ "${RANK:-0}" = 0 ] || exit 0
echo weights >"$out/model.safetensors"
echo "moments $(grep -c . "$0.moments" 2>/dev/null)" >"$out/optimizer.safetensors"
END
chmod +x "$scratch/a"
cp "$scratch/a" "$scratch/b"

identical() { rm -f "$scratch"/*.trained; dev/identical.sh "$@" "$scratch/shard.bin" "$scratch/a" "$scratch/b"; }
trained() { grep -c -- "$1" "$scratch/b.trained"; }

check "on the CPU" identical
equals 24 "$(grep -c '^same ' "$scratch/stdout")"
equals 12 "$(trained "^1 ")"
equals "$(cat "$scratch/a.trained")" "$(cat "$scratch/b.trained")"
said "same    fox-pro, packed documents, inference"
equals "0 0" "$(trained --fp8) $(trained --max-steps)"
UNKNOWN=gated-deltanet check "an older trainer" identical
said "left out: gated-deltanet, which A does not know"
equals 22 "$(grep -c '^same ' "$scratch/stdout")"
equals 11 "$(trained "^1 ")"
STEPS=2 check "two steps of each run" identical
equals 12 "$(trained "--max-steps 2 ")"

check "on a GPU" identical --gpu --levels "none block"
said "same    fox-llama, head size 128, recompute block"
said "same    fox-pro, FP8, inference"
equals 34 "$(trained "^1 .*--deterministic")"
equals 2 "$(trained --fp8)"
NO_FP8=1 check "on a GPU without FP8" identical --gpu --levels none
said "left out: FP8"
equals 0 "$(trained --fp8)"

check "on two ranks" identical --ranks --levels none
said "same    fox-pro, shared sequences, recompute none"
said "same    a shared sequence of two chunks, recompute none"
equals 9 "$(grep -c '^same ' "$scratch/stdout")"
equals 18 "$(trained "^2 ")" # each rank adds a line
equals 16 "$(trained "--sequence-ranks 2")"
FAILS=1 dies "rank 1 fails" identical --ranks --levels none

echo other >"$scratch/b.moments"
identical >"$scratch/stdout" 2>&1
equals 1 $?
equals 12 "$(grep -c '^differ' "$scratch/stdout")"
dies "usage: dev/identical.sh" dev/identical.sh --ranks shard a
report

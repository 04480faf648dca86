#!/usr/bin/env bash
# dev/turns.sh with scripts in the trainers' place: what it runs in which order, its medians, and failing builds.
scratch=build/test/turns
. dev/test/check.sh

# A trainer: plans what it should time, and takes the next of its times
cat >"$scratch/a" <<'END'
#!/bin/sh
echo "$(basename "$0") $*" >>"$(dirname "$0")/calls"
case "$*" in *hgrn2*) [ ! "$FAILS" ] || { echo "error: no such kernel" >&2 && exit 3; } ;; esac
options=${*%--bench *}
[ "${*#"$options"}" = "--bench ${STEPS:-10}" ] && ./train_fox $options --dry-run >/dev/null || exit 1
read -r ms <"$0.times"
sed -i 1d "$0.times"
[ "$ms" ] || ms=100.00
echo "  forward and backward             $ms ms       3000 tokens/s"
echo "  step                             999.00 ms       2000 tokens/s"
END
chmod +x "$scratch/a"
cp "$scratch/a" "$scratch/b"

# times A B: the times that both will print; turns OPTION...
times() { echo "$1" | tr ' ' '\n' >"$scratch/a.times" && echo "$2" | tr ' ' '\n' >"$scratch/b.times" && : >"$scratch/calls"; }
turns() { dev/turns.sh "$@" "$scratch/a" "$scratch/b"; }
order() { sed 's/ .*//' "$scratch/calls" | tr -d '\n'; }

times "110.00 100.00 104.00" "103.00 101.00 102.00"
CASES=fox-pro-nano$ STEPS=4 check "three turns of one case" turns
equals "fox-pro-nano 104.00 102.00 0.9808 5.77%" "$(tail -n 1 "$scratch/stdout" | tr -s ' ')"
equals abbaab "$(order)"

times "110.00 100.00" "50.00 52.00"
CASES=fox-pro-nano$ TURNS=2 check "two turns" turns
equals "fox-pro-nano 105.00 51.00 0.4857 4.76%" "$(tail -n 1 "$scratch/stdout" | tr -s ' ')"

times "" ""
TURNS=2 check "all cases of the CPU" turns
equals 44 "$(order | wc -c)"
equals 11 "$(grep -c ' 1.0000 ' "$scratch/stdout")"
equals "a --model fox-pro-nano b --model deltanet-nano" \
    "$(sed -n '1p;23p' "$scratch/calls" | cut -d' ' -f1-3 | tr '\n' ' ' | sed 's/ $//')"

times "" ""
TURNS=1 check "all cases of a GPU, which the trainer can plan" turns --gpu
equals 16 "$(grep -c ' 1.0000 ' "$scratch/stdout")"
equals 2 "$(grep -c -- --fp8 "$scratch/calls")"

FAILS=1 TURNS=1 CASES='hgrn2|mamba2' turns >"$scratch/stdout" 2>"$scratch/stderr"
equals 1 $?
said "hgrn2-nano: $scratch/b: error: no such kernel" stderr
equals "hgrn2-nano failed" "$(tail -n 2 "$scratch/stdout" | sed 1q | tr -s ' ')"
equals "mamba2-nano 100.00 100.00 1.0000 0.00%" "$(tail -n 1 "$scratch/stdout" | tr -s ' ')"

CASES=rwkv dies "CASES='rwkv' is none of: fox-pro-nano fox-llama-nano" turns
TURNS=0 dies "TURNS and STEPS are whole numbers of 1 or more, not '0'" turns
dies "$scratch/c: is not built" dev/turns.sh "$scratch/a" "$scratch/c"
dies "usage: dev/turns.sh" dev/turns.sh "$scratch/a"
report

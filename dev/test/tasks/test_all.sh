#!/usr/bin/env bash
# scripts/eval/all.sh end to end at tiny sizes: every part has its file, nothing is measured twice, a part that fails is
# named. Tests ./train_fox, or TRAIN_FOX.
scratch=build/test/all
. dev/test/check.sh
export OMP_NUM_THREADS=2
trainer_files
data=$scratch/text[1].bin
cp $shards/text.bin "$data"
tiny="--set hidden_size=32 --set num_hidden_layers=2 --set num_heads=2 --set intermediate_size=32"
for model in fox-pro hgrn2; do
    check "$model" "$trainer" --model $model-nano $tiny --seq-len 200 --batch-tokens 200 --max-steps 0 --data "$data" \
        --out "$scratch/$model"
done
init=$scratch/fox-pro/step_00000000
here=$(realpath .)
printf 'A line of text in a file. And another sentence.\n%.0s' {1..40} >"$scratch/text"
export TEXT=$scratch/text LONG=400 TOKENS=400 SAMPLES=2 LENGTHS=900 GAPS=16,64 UPDATES=2 DATA=$data
all() { TRAINER=$1 scripts/eval/all.sh "${@:2}"; }

out=$scratch/out
mkdir "$out"
python3 -c 'import numpy, safetensors' 2>/dev/null || { echo '{}' >"$out/maps.json" && skip "maps: numpy, safetensors"; }
check "all parts" all "$trainer" "$init" "$out"
for name in loss long maps copy conflict corrupted ruler keys needle; do
    check "$name is an object" python3 -c 'import json, sys; assert type(json.load(open(sys.argv[1]))) is dict' "$out/$name.json"
done
check "the samples asked for" python3 - "$out" <<'END'
import json, sys
read = lambda name: json.load(open(f"{sys.argv[1]}/{name}.json"))
means = {name: [[m[k] for k in keys] for m in read(name)["means"]] for name, keys in (
    ("copy", ("segment", "gap", "samples")), ("conflict", ("stale", "gap", "samples")),
    ("corrupted", ("length", "percent", "samples")), ("keys", ("keys", "updates", "samples")))}
assert means["copy"] == [[64, 16, 2], [64, 64, 2]], means
assert means["conflict"] == [[1, 16, 2], [1, 64, 2], [4, 16, 2], [4, 64, 2]], means
assert means["corrupted"] == [[100, p, 2] for p in (0, 1, 2, 4, 8, 16, 32)], means
assert means["keys"] == [[8, 2, 8]], means
assert {(m["length"], m["samples"]) for m in read("ruler")["means"]} == {(900, 4)}
assert [read(name)["seq_len"] for name in ("loss", "long")] == [200, 400]
assert len(read("needle")["cells"]) == 10
END
cat "$out"/*.json >"$scratch/before"
check "nothing is measured twice" all /bin/false "$init" "$out"
cat "$out"/*.json >"$scratch/after"
same "$scratch/before" "$scratch/after"

LONG=800 dies "LONG=400 TOKENS=400, not of $here/$init, DATA=$data LONG=800 TOKENS=400: give another OUT" all /bin/false "$init" "$out"
ln -s fox-pro "$scratch/link"
for same in "$init/" "$here/$init" "$scratch/link/step_00000000" "$scratch/fox-pro/"; do
    check "the same checkpoint: $same" all /bin/false "$same" "$out"
done
cp -r "$out" "$scratch/older"
sed -i "s,$here/$init,$init/," "$scratch"/older/*
check "of a version that compared text" all /bin/false "$here/$init" "$scratch/older"
dies "not of $here/$scratch/hgrn2/step_00000000, DATA" all /bin/false "$scratch/hgrn2/step_00000000" "$out"
for refused in "LONG=4k|not a whole number above 0" "SAMPLES=0|not a whole number above 0" "TOKENS=0|not a whole number from 1 to" \
    "TEXT=$scratch/none|no such file or folder" "DATA=README.md|README.md: is not a data shard"; do
    dies "${refused#*|}" env TRAINER="$trainer" "${refused%%|*}" scripts/eval/all.sh "$init" "$scratch/refused"
    check "${refused%%|*} leaves nothing" test ! -e "$scratch/refused"
done
rm "$out/loss.json"
mv "$out/copy.json" "$scratch"
if all /bin/false "$init" "$out" >"$scratch/stdout" 2>"$scratch/stderr"; then fail "a part that fails"; fi
equals "error: failed: loss copy" "$(tail -n 1 "$scratch/stderr")"
equals "error: /bin/false ended with exit code 1 before its first answer" "$(sed -n '/left out/d; / samples\?$/d; $d; p' "$scratch/stderr")"
check "the rest, of the newest checkpoint of the run" all "$trainer" "$scratch/fox-pro" "$out"
same "$scratch/copy.json" "$out/copy.json"
check "a recurrent model, and no text; RULER at lengths that its tasks fit into" env -u TEXT -u LENGTHS TRAINER="$trainer" scripts/eval/all.sh "$scratch/hgrn2/step_00000000" \
    "$scratch/hgrn2/out"
equals "conflict.json copy.json corrupted.json keys.json long.json loss.json made.txt ruler.json" \
    "$(ls "$scratch/hgrn2/out" | tr '\n' ' ' | sed 's/ $//')"

# Without variables sizes fit the checkpoint, T = 200, and the machine
ln -s /bin/false "$scratch/train_foxcu"
sizes() {
    TRAINER=$1 env -u LONG -u TOKENS -u SAMPLES -u LENGTHS -u GAPS -u UPDATES scripts/eval/all.sh "$init" "$scratch/sized" >"$scratch/stdout" 2>&1
    said "by $1, T=200: LONG=800 $2 GAPS=256 UPDATES=3"
    rm -r "$scratch/sized"
}
sizes /bin/false "TOKENS=64Ki SAMPLES=4 LENGTHS=1024"
sizes "$scratch/train_foxcu" "TOKENS=4Mi SAMPLES=32 LENGTHS=1024,2048"

dies "usage: DATA=GLOB scripts/eval/all.sh DIR OUT" all "$trainer" "$init"
DATA='none_*.bin' dies "DATA: 'none_*.bin': no file matches" all "$trainer" "$init" "$scratch/typo"
check "and nothing is made of it" test ! -e "$scratch/typo"
dies "DATA is not set" env -u DATA scripts/eval/all.sh "$init" "$out"
VOCAB=dev/test/fixtures/gpt2/vocab.bpe dies "VOCAB: the model in $here/$init reads bytes: leave it out" \
    all /bin/false "$init" "$out"
dies "none: no checkpoint" all "$trainer" "$scratch/none" "$out"
dies "$scratch/none is not built: make none" all "$scratch/none" "$init" "$out"
report

#!/usr/bin/env bash
# --maps end to end: a text of --prompt, of standard input and of shards, what it refuses, the same numbers as sanitized; where
# numpy, safetensors and matplotlib are installed, the pictures of maps.py. Tests ./train_fox, or TRAIN_FOX.
scratch=build/test/maps
. dev/test/check.sh
sanitized=${TRAIN_FOX:-build/test/train_fox_sanitized}
export OMP_NUM_THREADS=2
trainer_files
tiny="--set hidden_size=32 --set num_hidden_layers=2 --set num_heads=2 --set intermediate_size=32"
batches="--seq-len 200 --batch-tokens 200 --max-steps 0 --data $shards/text.bin"
check "a model" "$trainer" --model fox-pro-nano $tiny --set fgate_bias_init=true $batches --out "$scratch/out"
init=$scratch/out/step_00000000

# maps NAME OPTION...
maps() { check "$1" "$trainer" --init "$init" --maps "$scratch/$1" "${@:2}"; }
text=$(printf 'One line of text.\n%.0s' {1..9})
maps prompt --prompt "$text"
said "$scratch/prompt: 4 heads on 162 tokens" # with end of text
maps input --prompt - <<<"$text"
differ "$scratch/prompt" "$scratch/input" # a line break more
check "the text of a pipe" sh -c 'printf %s "$0" | "$@"' "$text" "$trainer" --init "$init" --maps "$scratch/input" --prompt -
same "$scratch/prompt" "$scratch/input"
check "sanitized" "$sanitized" --init "$init" --maps "$scratch/shards" --val-data "$shards/text.bin"
said "4 heads on 200 tokens" # the length of training
maps cut --prompt "$text" --seq-len 20
said "4 heads on 20 tokens"
maps cut --val-data "$shards/text.bin" --seq-len 150
maps set --prompt "$text" --set window_size=8 --set use_rope=true
metadata() { head -c 500 "$scratch/$1" | grep -ao '"__metadata__":{[^}]*}'; }
equals "\"__metadata__\":{\"format\":\"pt\",\"checkpoint\":\"$init\"}" "$(metadata prompt)"
equals "$(metadata prompt | tr -d '}')"',"set":"[\"window_size=8\",\"use_rope=true\"]"}' "$(metadata set)"
equals "" "$(find "$scratch" -name '*.tmp')"

cp "$scratch/prompt" "$scratch/before"
refused() { dies "$1" "$trainer" --init "$init" --maps "$scratch/prompt" "${@:2}"; }
refused "--maps: on which text? give --prompt TEXT"
refused "--maps: on which text? give --prompt TEXT" --prompt x --val-data "$shards/text.bin"
refused "each do one thing and exit" --prompt x --generate 3
refused "no shard has the 1000001 tokens" --val-data "$shards/text.bin" --seq-len 1000000
dies "--maps: with which model? give --init DIR" "$trainer" --model fox-pro-nano --maps "$scratch/prompt" --prompt x
dies "--maps $scratch/none/m: cannot create: No such file" "$trainer" --init "$init" --maps "$scratch/none/m" --prompt x
dies "--maps $scratch: exists and is not a regular file" "$trainer" --init "$init" --maps "$scratch" --prompt x
dies "--maps $scratch/prompt: cannot write: File too large" sh -c 'ulimit -f 1 && exec "$@"' - "$trainer" --init "$init" \
    --maps "$scratch/prompt" --prompt "$text"
cp -r "$init" "$scratch/large"
check "weights that overflow" python3 dev/test/cli_files.py fill "$scratch/large/model.safetensors" \
    model.layers.0.attn_norm.weight 3e38

dump=("$trainer" --init "$init" --data "$shards/text.bin" --seq-len 16 --batch-tokens 16 --dump "$scratch/dump")
check "--dump" "${dump[@]}"
cp "$scratch/dump" "$scratch/whole"
dies "--dump $scratch/dump: cannot write: File too large" sh -c 'ulimit -f 1 && exec "$@"' - "${dump[@]}"
same "$scratch/dump" "$scratch/whole"
dies "the attention of layer 0, head 0 is not finite" "$trainer" --init "$scratch/large" --maps "$scratch/prompt" --prompt x
same "$scratch/prompt" "$scratch/before"
equals "" "$(find "$scratch" -name '*.tmp')"
check "a recurrent model" "$trainer" --model hgrn2-nano $tiny $batches --out "$scratch/hgrn2"
dies "--maps: the model of --init has no attention" "$trainer" --init "$scratch/hgrn2/step_00000000" \
    --maps "$scratch/prompt" --prompt x

# pruning.py, on a GPU's trainer: a tenth of the length is skipped in layer 1, nothing in layer 0; acp is half as fast
pruning() { python3 scripts/eval/pruning.py --init "$init" --val-data "$shards/text.bin" --out "$scratch/$1.json" "${@:2}"; }
cat >"$scratch/fakecu" <<'END'
#!/usr/bin/env python3
import json, sys
sys.stderr.write("" if "9999" not in sys.argv else "warning: x\nerror: --seq-len 9999: too long\n")
options = dict(zip(sys.argv[1:], sys.argv[2:]))
length, rule = int(options["--seq-len"]), options["--set"]
if length == 9999:
    sys.exit(1)
pruned = None if "null" in rule else [0, length / 10 / 100]
rate = {"log_pruning_tolerance=null": 10, "pruning_rule=ours": 40, "pruning_rule=acp": 20}[rule]
json.dump({"pruned": pruned, "tokens_per_second": rate}, open(options["--eval"], "w"))
END
chmod +x "$scratch/fakecu"
check "pruning on a GPU" pruning gpu --trainer "$scratch/fakecu" --lengths 100,200
equals "ours 5.00 +- 5.00 10.00 +- 10.00 acp 5.00 +- 5.00 10.00 +- 10.00 none 10.00 10.00 ours 40.00 40.00 acp 20.00 20.00 \
none 1.00 1.00 ours 4.00 4.00 acp 2.00 2.00" "$(grep -E '^(none|ours|acp)' "$scratch/stdout" | xargs)"
cp "$scratch/gpu.json" "$scratch/gpu.before"
check "again" pruning gpu --trainer "$scratch/fakecu" --lengths 100,200
same "$scratch/gpu.json" "$scratch/gpu.before"
dies "none, 9999 tokens: --seq-len 9999: too long" pruning gpu --trainer "$scratch/fakecu" --lengths 9999
dies "was made with --trainer $scratch/fakecu" pruning gpu --trainer ./train_fox --lengths 100
dies "--rules none: ours, acp or both" pruning none --rules none
check "a model without gates" "$trainer" --model transformer-llama-nano $tiny $batches --out "$scratch/plain"
dies "a model without forget gates" pruning none --init "$scratch/plain"

if python3 -c 'import numpy, safetensors, matplotlib' 2>/dev/null; then
    check "pruning" pruning cpu --trainer "$trainer" --lengths 150,200 --picture "$scratch/pruning.svg"
    equals "ours acp" "$(grep -oE '^(ours|acp)' "$scratch/stdout" | xargs)"
    dies "x.bmp: a picture ends in one of" pruning never --trainer "$scratch/never" --picture "$scratch/x.bmp" # nothing is measured
    check "its picture" grep -q 'length, tokens' "$scratch/pruning.svg"
    for name in prompt shards; do
        check "pictures of $name" python3 scripts/eval/maps.py "$scratch/$name" --out "$scratch/$name.svg" \
            --heads "$scratch/heads.svg"
        equals 3 "$(wc -l <"$scratch/stdout")"
        check "of another head" python3 scripts/eval/maps.py "$scratch/$name" --out "$scratch/$name.svg" --head 1.0
        check "names it" grep -q "layer 1, head 0: F" "$scratch/$name.svg"
    done
else
    skip "maps.py: pip install -c scripts/requirements.txt matplotlib safetensors"
fi
report

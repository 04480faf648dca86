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

if python3 -c 'import numpy, safetensors, matplotlib' 2>/dev/null; then
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

#!/usr/bin/env bash
# The trainer's command line: --eval-requests, --dry-run, --dump, --bench, --generate, learning rates; the shards and model
# folders that it accepts, and the names in those that it writes
scratch=build/test/cli
. dev/test/cli/small.sh
vocab=dev/test/fixtures/gpt2/vocab.bpe

# ----------------------------------------------------------------------------

# refused_requests MESSAGE LINE OPTION...: the third line of --eval-requests, which is refused before the run begins
refused_requests() {
    printf '{"type":"rolling","text":[1]}\n\n%s\n' "$2" >"$scratch/requests"
    dies "--eval-requests $scratch/requests: line 3: $1" train_on text --eval-every 5 --eval-requests "$scratch/requests" "${@:3}"
}

evaluations() {
    local dry score='{"type":"score","context":"","continuation":'
    rm -rf "$out"
    refused_requests "bad JSON at byte 7" '{"type"'
    refused_requests '"type": not one of score, rolling, generate' '{"type":"scores"}'
    refused_requests '"continuation" is missing' '{"type":"score"}'
    refused_requests '"expected": neither text nor a list of token ids' '{"type":"generate","prompt":"a","expected":1}'
    refused_requests '17 tokens, more than the 16 that a sequence can have here' "$score\"01234567890123456\"}"
    refused_requests '130 tokens, more than the 16' '{"type":"generate","prompt":"a"}'
    refused_requests '17 tokens, more than the 16' '{"type":"generate","prompt":"a"}' --generate 15
    refused_requests '"context": this program reads text of bytes or GPT-2' "$score\"a\"}" --data "$shards/plain.bin" --set vocab_size=300
    : >"$scratch/empty"
    dies "--eval-requests $scratch/empty: has no requests" train_on text --eval-every 5 --eval-requests "$scratch/empty"
    check "no step was done" test ! -e "$out/log.jsonl"

    # the plan: the cache of 16 slots of the longest sequence, in pages of 64 tokens of 2 heads with 16 channels, and more
    printf '%s"%064d"}\n' "$score" 1 >"$scratch/requests"
    dry="$tiny --seq-len 64 --dry-run"
    check "--dry-run" run $dry
    equals 0 "$(grep -c '^samples, requests' "$scratch/stdout")"
    check "--dry-run with requests" run $dry --eval-every 5 --eval-requests "$scratch/requests"
    equals 1 "$(awk '$1 == "samples," { print ($3 > 16 * 64 * 2 * (2 * 16 * 4 + 8) / 1048576 && $3 < 3) }' "$scratch/stdout")"
    check "--dry-run with a sample" run $dry --sample-every 1
    said "samples, requests"
    check "for a GPU" run --model fox-pro-125m --dry-run --eval-every 5 --eval-requests "$scratch/requests" --gpu H100
    said "without the cache of --sample-every and --eval-requests"

    check "a last evaluation, and one every 8 steps" train_on text --eval-every 8 --eval-requests "$scratch/requests" \
        --seq-len 64 --max-steps 10
    equals "8 10" "$(sed -n 's/.*"event":"evaluation","step":\([0-9]*\),.*/\1/p' "$out/log.jsonl" | paste -sd ' ')"
    said "step 10/20  evaluation  score -"
    check "none any more" run --resume --out "$out" --eval-every 0 --max-steps 16
    equals 2 "$(grep -c '"event":"evaluation"' "$out/log.jsonl")"
    rm "$scratch/requests"
    dies "--eval-requests $scratch/requests: cannot open" run --resume --out "$out" --eval-every 8
}

dry_run() {
    while read -r model non_embedding; do
        check "--dry-run $model" run --model "$model" --dry-run --data none --out "$out/dry"
        equals "$non_embedding" "$(awk '$1 == "non-embedding" { print $2 }' "$scratch/stdout")"
        equals "" "$(cat "$scratch/stderr")"
    done <<'END'
fox-pro-125m 123910800
fox-pro-360m 367339904
fox-pro-760m 759512640
transformer-pro-125m 123800064
transformer-pro-360m 366946304
transformer-pro-760m 757742592
fox-llama-125m 123661968
fox-llama-360m 360188288
fox-llama-760m 757632576
transformer-llama-125m 123551232
transformer-llama-360m 359794688
transformer-llama-760m 756747264
transformer-swa-125m 123551232
transformer-swa-360m 359794688
transformer-swa-760m 756747264
deltanet-125m 123718656
deltanet-360m 360289280
deltanet-760m 757635072
hgrn2-125m 123569664
hgrn2-360m 359843840
hgrn2-760m 756820992
mamba2-125m 128965824
mamba2-360m 368314880
mamba2-760m 780113664
gated-deltanet-125m 125283160
gated-deltanet-360m 365815292
gated-deltanet-760m 771867258
END
    check "nothing is made" test ! -e "$out/dry"
    check "--dry-run" run --model fox-pro-nano --set vocab_size=300 --set eos_token_id=256 --dry-run config
    said '"bos_token_id": 299'
    said '"eos_token_id": 256'
    check "--dry-run" run --model transformer-swa-760m --dry-run config
    said '"window_size": 2048'
    said " 5.39e+09 per token"
    check "gates that are off anyway" run --model transformer-pro-nano --set log_pruning_tolerance=null \
        --set fgate_bias_init=false --set pruning_rule=ours --dry-run
    check "a gate" run --model transformer-pro-nano --set fgate_type=full --set log_pruning_tolerance=-5 --dry-run
    check "the last one counts" run --model fox-pro-nano --set hidden_size=64 --seq-len 8 --model fox-pro-micro \
        --set hidden_size=320 --seq-len=16 --dry-run config
    said '"hidden_size": 320'
    said "sequence                        16 tokens"
    check "a window" run --model fox-pro-nano --set window_size=33 --dry-run config
    said '"window_size": 33'
    check "no attention" run --model samba2-nano --set layer_types=mamba2 --set window_size=0 --set use_rope=false --dry-run config
    said '"window_size": null'
    check "no window" run --model transformer-swa-nano --set window_size=0 --dry-run config
    said '"window_size": null'
    check "--dry-run" run --model fox-pro-760m --dry-run
    said "524288 tokens: "
    said "16106127360 tokens: 30720 steps, peak learning rate 0.001, 268435456 tokens of warm-up"
    for help in -h --help; do
        check "$help" run $help
        said "--warmup-tokens N"
        said "usage: $trainer "
    done
    local option options
    options=$(grep -oE '^ +--[a-z0-9-]+' "$scratch/stdout")
    for option in ${options:---none}; do
        check "$option in dev/TRAINING.md" grep -q "^|.*\`$option\`" dev/TRAINING.md
    done
    check "--version" run --version
    equals 1 "$(grep -cxE "$(basename "$trainer") [^ ]+" "$scratch/stdout")" # and its commit
    said "MPI"
    said "numbers float"
}

# A default warm-up is never longer than the training. One that is given is taken, with a warning.
warmup() {
    local only_rises="--warmup-tokens 1280: not below the 1280 tokens to train on (--max-tokens): the learning rate only rises"
    check "--dry-run of few tokens" run --model fox-pro-760m --dry-run --max-tokens 15Mi
    said "30 steps, peak learning rate 0.001, 262144 tokens of warm-up"
    equals "" "$(cat "$scratch/stderr")"
    check "--dry-run of many tokens" run --model fox-pro-760m --dry-run --max-tokens 45Gi
    said "268435456 tokens of warm-up"
    local long="${batches/--warmup-tokens 128/--warmup-tokens 1280}"
    check "a long warm-up" run $tiny $long --data "$shards/text.bin"
    said "$only_rises" stderr
    check "--dry-run of a long warm-up" run $tiny $long --dry-run
    said "$only_rises" stderr
}

# cli_files.py computes the loss from the logits independently.
dumps() {
    check "--dump" run $tiny $batches --data "$shards/text.bin" --dump "$scratch/dump" --out "$out/none"
    said "$scratch/dump: mean loss 5."
    check "its numbers" files dump "$scratch/dump" "$shards/text.bin" 4 16 257
    check "nothing else is made" test ! -e "$out/none"
    check "--dump of a micro-batch" run $tiny $batches --micro-batch 2 --data "$shards/text.bin" --dump "$scratch/dump2"
    check "its numbers" files dump "$scratch/dump2" "$shards/text.bin" 2 16 257
    check "--dump of a folder made elsewhere" init $fixture --dump "$scratch/dump"
    check "its numbers and names" files dump "$scratch/dump" "$shards/forty.bin" 4 16 40 $fixture
}

good_data() {
    for data in text plain wide documents 'part_[0-9]' 'part_0.bin,build/test/cli/files/shards/part_[12]'; do
        rm -rf "$out"
        check "train on $data" train_on "$data" --keep 1
        cp "$out/step_00000020/model.safetensors" "$scratch/of_${data%%[.[]*}"
    done
    same "$scratch/of_text" "$scratch/of_plain"
    same "$scratch/of_text" "$scratch/of_wide"
    differ "$scratch/of_text" "$scratch/of_documents"
    same "$scratch/of_part_" "$scratch/of_part_0"

    rm -rf "$out"
    mkdir "$scratch/a text"
    head -c 3000 dev/test/check.sh >"$scratch/a text/one"
    cp README.md LICENSE Makefile "$scratch/a text" 2>/dev/null
    check "shards of text" data/text_to_shards --tokenizer byte --val-fraction 0.3 --out "$scratch/a set/s" "$scratch/a text"
    check "spaces in paths, and a relative one" sh -c 'cd "$1" && shift && exec "$@"' - "$scratch" "$PWD/$trainer" \
        $tiny $batches --data 'a set/s_train_*.bin' --val-data "$PWD/$scratch/a set/s_val_000000.bin" --out 'a run/of 1'
    said "validation loss"
    check "are taken" test -f "$scratch/a run/of 1/step_00000020/model.safetensors"
    check "and resumed" sh -c 'cd "$1" && shift && exec "$@"' - "$scratch" "$PWD/$trainer" \
        --resume --out 'a run/of 1/' --max-tokens 1344
    check "from there" test -f "$scratch/a run/of 1/step_00000021/model.safetensors"

    rm -rf "$out"
    check "--init of a folder made elsewhere" init $fixture
    check "without --out" run $tiny $batches --data "$shards/text.bin"
    said "without --out DIR nothing of this run is kept" stderr
}

names() {
    for family in fox-pro fox-llama transformer-pro transformer-llama; do
        rm -rf "$out"
        check "$family" run --model $family-nano ${sizes//=16/=32} --set num_hidden_layers=2 $batches --max-steps 1 \
            --data "$shards/text.bin" --out "$out"
        check "names of $family" files names "$out/step_00000001" $family
        check "--init of $family" run --init "$out/step_00000001" $batches --dump "$scratch/dump" \
            --data "$shards/text.bin"
        check "gradients of $family" files dump "$scratch/dump" "$shards/text.bin" 4 16 257 "$out/step_00000001"
    done
}

generate() { run --init "$out" --generate 40 "$@"; }

# text NAME OPTION...: writes what --generate prints to $scratch/NAME
text() {
    check "--generate ${*:2}" generate "${@:2}"
    cp "$scratch/stdout" "$scratch/$1"
    equals "" "$(cat "$scratch/stderr")"
}

texts() {
    rm -rf "$out"
    train_on text --lr 0.02 >/dev/null
    text one --seed 3
    text two --seed 3
    text three --seed 4
    same "$scratch/one" "$scratch/two"
    differ "$scratch/one" "$scratch/three"
    text cold --temperature 0
    text cold4 --temperature 0 --seed 4
    text top1 --top-k 1 --seed 5
    text top0 --top-p 0 --seed 6
    for other in cold4 top1 top0; do same "$scratch/cold" "$scratch/$other"; done
    text empty --temperature 0 --prompt ''
    same "$scratch/cold" "$scratch/empty"
    check "--init of the run and --prompt alone" run --init "$out" --temperature 0 --prompt ''
    equals "$(head -c 30 "$scratch/cold" | od -An -tx1)" "$(head -c 30 "$scratch/stdout" | od -An -tx1)"
    text prompt --prompt $'Größe: \xe2\x82\xac\n'
    equals "Größe: €" "$(head -n 1 "$scratch/prompt")"
    text prompt --prompt $'\xff\xfe'
    equals fffe "$(head -c 2 "$scratch/prompt" | od -An -tx1 | tr -d ' \n')"
    dies "cannot write the sample" sh -c '"$@" >/dev/full' - "$trainer" --init "$out/step_00000020" --generate 3
    check "damage it" files nan "$out/step_00000020/model.safetensors" model.layers.0.attn.k_norm.weight
    dies "model.safetensors: tensor 'model.layers.0.attn.k_norm.weight' contains nan" generate
    check "too large to square" files fill "$out/step_00000020/model.safetensors" model.embeddings.weight 1e20
    check "and nothing else" files fill "$out/step_00000020/model.safetensors" model.layers.0.attn.k_norm.weight 1
    dies "the model's logits are not finite: its weights are damaged" generate

    rm -rf "$out"
    check "a model of GPT-2's vocabulary" train_on gpt2 --set vocab_size=50257 --set hidden_size=8 \
        --max-steps 2 --sample-every 2
    said "step  2/20  sample:  "
    check "ends texts with its last token" grep -q '"eos_token_id": 50256' "$out/step_00000002/config.json"
    dies "--vocab FILE is missing" generate
    dies "none: cannot open" generate --vocab none
    dies "none: cannot open" run $tiny --set vocab_size=50257 --set hidden_size=8 $batches \
        --data "$shards/gpt2.bin" --out "$scratch/none" --sample-every 1000 --vocab none
    equals "" "$(find "$scratch/none" -name '*step_*')"
    text one --vocab $vocab --json-escape --prompt $'A "naïve"\t€\n'
    equals $'A "naïve"\t€' "$(head -n 1 "$scratch/one")"
    text two --vocab $vocab --prompt $'A "naïve"\t€\n'
    equals $'A "naïve"\t€' "$(head -n 1 "$scratch/two")"
    differ "$scratch/one" "$scratch/two"

    for dry in "" --dry-run; do
        rm -rf "$out"
        check "bytes in a model of GPT-2's vocabulary" train_on text --val-data "$shards/text.bin" --set vocab_size=50257 --set hidden_size=8 --max-steps 1 $dry
        said "text.bin': has a vocabulary of 257 tokens, the model one of 50257 with end of text at 256: the model will not" stderr
        equals 1 "$(grep -c "has a vocabulary" "$scratch/stderr")" # of training and held-out data together
    done
    for end in "--set eos_token_id=256" ""; do # the data's own
        rm -rf "$out"
        check "more rows than tokens $end" train_on text --set vocab_size=300 $end --max-steps 1
        equals 0 "$(grep -c "has a vocabulary" "$scratch/stderr")"
        check "ends texts with the data's last token" grep -q '"eos_token_id": 256' "$out/step_00000001/config.json"
    done
    check "begins them with it" grep -q '"bos_token_id": 256' "$out/step_00000001/config.json"
    check "resumed with the same options" train_on text --set vocab_size=300 --resume --max-steps 2
}

# schedule RATES OPTION...: six steps of 64 tokens, stopped after the third and resumed, have these learning rates
schedule() {
    local rates=$1 six="--warmup-tokens 64 --max-tokens 384 --lr 1e-3"
    shift
    rm -rf "$out"
    check "$*" run $tiny --seq-len 16 --batch-tokens 64 $six "$@" --data "$shards/text.bin" --out "$out" --max-steps 3
    check "$*, resumed" run --resume --out "$out"
    equals "$rates" "$(sed -n 's/.*"event":"step".*"lr":\([^,]*\),.*/\1/p' "$out/log.jsonl" | awk '{ printf "%.5g ", 1e3 * $1 }')"
}

schedules() {
    schedule "0.5 1 1 1 0.875 0.625 " --lr-schedule wsd --cooldown-tokens 128 --lr-end 0.5
    schedule "0.5 1 1 1 0.75 0.56699 " --lr-schedule wsd-sqrt --cooldown-tokens 128 --lr-end 0.5
    schedule "0.5 0.9 0.7 0.5 0.3 0.1 " --lr-schedule linear
    schedule "0.5 0.91 0.73 0.55 0.37 0.19 " --lr-schedule linear --lr-end 0.1
    schedule "0.5 1 1 1 1 1 " --lr-schedule constant
    schedule "0.5 0.98287 0.85572 0.65 0.44428 0.31713 " --lr-end 0.3 # cosine
    check "--dry-run of wsd" run $tiny $batches --lr-schedule wsd --dry-run
    said "schedule                       wsd: linear to 0 of the peak over the last 256 tokens"
    check "--dry-run of wsd-sqrt" run $tiny $batches --lr-schedule wsd-sqrt --dry-run
    said "schedule                  wsd-sqrt: as 1 - sqrt to 0 of the peak over the last 256 tokens"
}

odd_options() {
    check "--bench" run $tiny $batches --bench 1
    said "tokens/s"
    said "1 step of 1 x 4 x 16 tokens on 1 rank of 1 thread"
    equals 1 "$(awk '/forward, without gradients/ { print ($4 > 0) }' "$scratch/stdout")" # ms, of a pass that is timed

    rm -rf "$out"
    check "--max-tokens less than a batch" run $tiny --out "$out" --set use_rope=true --set fgate_type=fixed \
        --seq-len 16 --batch-tokens 64 --max-tokens 1 --keep 1Gi --save-every 0 --warmup-tokens 0 --shuffle \
        --data "$shards/text.bin" --val-data "$shards/val.bin" --val-tokens 1 --micro-batch 4
    said "step 1/1"
    said "validation loss"
    check "is a step" test -f "$out/step_00000001/model.safetensors"
    check "resumed, it is done" run --resume --out "$out"
    said "nothing left to do: the run is at step 1 of 1"
    equals "$out/step_00000001" "$(echo "$out"/*step_*)"

    rm -rf "$out"
    check "--resume of nothing" train_on text --resume --max-steps 3 --sample-every 1 --generate 5 --prompt x
    said "step  3/20  sample: x"
    check "--max-steps behind us" run --resume --out "$out" --max-steps 1
    said "nothing left to do: the run is at step 3 of 20, behind --max-steps 1"
    check "another --micro-batch, --lr and --batch-tokens" run --resume --out "$out" --micro-batch 2 --lr 0.1 \
        --batch-tokens 128 --max-steps 12
    said "lr 9.698e-02" # the cosine in the middle of tokens 192 to 320
    check "continue by tokens" grep -q '"tokens": 1344' "$out/step_00000012/trainer.json"

    rm -rf "$out"
    cp -r $fixture "$scratch/borrowed"
    check "--init" run --init "$scratch/borrowed" $batches --data "$shards/forty.bin" --out "$out" --max-steps 3
    rm -r "$scratch/borrowed"
    check "is not needed any more to resume" run --resume --out "$out"
    rm -rf "$out"
}

each_trainer evaluations dry_run warmup dumps good_data names texts schedules odd_options

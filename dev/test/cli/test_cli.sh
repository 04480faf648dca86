#!/usr/bin/env bash
# The trainer's command line: what it refuses, each time with one line; --dry-run, --dump, --bench, --generate; the
# shards and model folders that it accepts, and the names in those that it writes.
#
# Tests ./train_fox and the program with sanitizers, or the one that TRAIN_FOX names.
scratch=build/test/cli
. dev/test/check.sh

files=$scratch/files
shards=$files/shards
fixture=dev/test/fixtures/model/fox-pro
vocab=dev/test/fixtures/gpt2/vocab.bpe
out=$scratch/out
export OMP_NUM_THREADS=1

rm -rf "$scratch"
mkdir -p "$scratch"
python=$(python3 -c 'import sys; print(sys.executable)') || { fail "python3 is missing"; report; }
files() { "$python" -S dev/test/cli_files.py "$@"; }
check "make the files" files make "$files"

# A small model, trained for 20 steps.
sizes="--set hidden_size=16 --set num_hidden_layers=1 --set num_heads=2 --set intermediate_size=16"
tiny="--model fox-pro-nano $sizes"
batches="--seq-len 16 --batch-tokens 64 --max-tokens 1280 --warmup-tokens 128"

run() { "$trainer" "$@"; }
train() { run $tiny $batches --out "$out" "$@"; }
train_on() { train --data "$shards/$1.bin" "${@:2}"; }
no_checkpoint() { equals "" "$(find "$out" -name '*step_*' 2>/dev/null)"; }

# ----------------------------------------------------------------------------

refused_shards() {
    while read -r name message; do
        rm -rf "$out"
        dies "shards/$name.bin$message" train_on "$name"
        no_checkpoint
    done <<'END'
none ': no file matches
empty : is empty
stub : has 12 bytes, which is less than the header
magic : is not a data shard: starts with 20240521
llama3 : is not a data shard: starts with 20240801, not 20240520 (a Llama 3 token file of llm.c
version : is a data shard of version 4
truncated : is truncated: its header claims 4000 tokens of 2 bytes, 3993 follow
longer : is too long
negative : damaged header: -4000 tokens
no_tokens : contains no tokens
short ': no shard has the 17 tokens
half_document : damaged header: 4000 tokens, not a whole number of documents of 48
vocabulary : its vocabulary of 50257 is larger than the model's 257; a new model of this data is made with --set vocab_size=50257
high_id : token 1000 has id 257, outside the vocabulary of 257; a new model gets a larger one with --set vocab_size=N
huge_id : token 1000 has id 2147483653, outside the vocabulary of 257
END
    dies "is not a regular file" train --data "$shards"
    dies "not a comma-separated list of file patterns" train --data ""
    dies "text.bin twice" train --data "$shards/text.bin,$shards/te*.bin"
    dies "use one dataset" train --data "$shards/text.bin,$shards/documents.bin"
    dies "use one dataset" train --data "$shards/text.bin,$shards/wide.bin"
    dies "use one dataset" train --data "$shards/text.bin,$shards/plain.bin"
    dies "no shard has the 65 tokens" \
        run $tiny --seq-len 64 --batch-tokens 64 --data "$shards/text.bin" --val-data "$shards/val.bin"
    dies "documents of 32 tokens are shorter than a sequence of 64" \
        run $tiny --seq-len 64 --batch-tokens 64 --data "$shards/documents.bin"
    no_checkpoint
}

init() { run --init "$1" $batches --data "$shards/forty.bin" --out "$out" "${@:2}"; }

refused_folders() {
    while read -r name message; do
        rm -rf "$out"
        dies "$message" init "$files/config/$name"
        no_checkpoint
    done <<'END'
width_0 config.json: hidden_size=0 is not a whole number from 1
heads_3 config.json: hidden_size 16 is not a multiple of num_heads 3
heads_0 config.json: num_heads=0 is not a whole number from 1
layers_negative config.json: num_hidden_layers=-2 is not a whole number from 1
layers_huge config.json: num_hidden_layers=1000000000 is not a whole number from 1
width_fraction config.json: hidden_size=16.5 is not a whole number
width_text config.json: hidden_size
width_word config.json: hidden_size
width_list config.json: hidden_size is an array or an object
width_null config.json: hidden_size=null is not a whole number
width_nan config.json: bad JSON
width_1e400 config.json: bad JSON
flag_text config.json: use_k_shift
vocab_huge config.json: vocab_size=1e+18 is not a whole number
eos_outside config.json: bos_token_id or eos_token_id is not below vocab_size 40
gate_unknown config.json: fgate_type=half is none of full, bias_only, fixed, none
tied model.safetensors: tensor 'lm_head.weight' is not part of the model that the config describes
windowed config.json: window_size=-1 is not a whole number from 0
grouped config.json: num_kv_heads 3 does not divide num_heads 2
other_model config.json: model_type 'gpt2'
other_width model.safetensors: tensor 'model.embeddings.weight' has shape [40, 16], but [40, 32] fits the config
other_mlp tensor 'model.layers.0.mlp.gate_proj.weight' has shape [48, 16], but [64, 16] fits the config
other_switch tensor 'model.layers.0.attn.k_proj.weight' is missing
more_layers tensor 'model.layers.2.attn_norm.weight' is missing
fewer_layers is not part of the model that the config describes
no_vocab_size config.json: vocab_size is missing
no_hidden_size config.json: hidden_size is missing
no_num_hidden_layers config.json: num_hidden_layers is missing
no_num_heads config.json: num_heads is missing
not_json config.json: bad JSON at byte 0
cut config.json: bad JSON at byte
list config.json: vocab_size is missing
nothing config.json: bad JSON at byte 0
deep config.json: bad JSON at byte 64: nested too deeply
END
    while read -r name message; do
        rm -rf "$out"
        dies "$message" init "$files/weights/$name"
        no_checkpoint
    done <<'END'
header_huge model.safetensors: its header claims a length of 4611686018427387904
header_past_end model.safetensors: its header claims
header_longer model.safetensors, header: bad JSON
header_shorter model.safetensors, header: bad JSON
header_0 model.safetensors, header: bad JSON
header_not_json model.safetensors, header: bad JSON
header_list model.safetensors, header: does not begin with '{'
header_deep model.safetensors, header: bad JSON at byte 64: nested too deeply
overlap tensor 'model.layers.1.attn.q_proj.weight': begins at byte 19084 of the data: overlaps the previous tensor
offsets_swapped tensor 'model.layers.1.attn.q_proj.weight': 'data_offsets' is missing or not
offsets_negative tensor 'model.layers.1.attn.q_proj.weight': 'data_offsets' is missing or not
offsets_three tensor 'model.layers.1.attn.q_proj.weight': 'data_offsets' is missing or not
offsets_huge tensor 'model.layers.1.attn.q_proj.weight': its data_offsets span 1023 bytes, but its type and shape need 1024
shape_other tensor 'model.layers.1.attn.q_proj.weight' has shape [8, 32], but [16, 16] fits the config
shape_flat tensor 'model.layers.1.attn.q_proj.weight' has shape [256], but [16, 16] fits the config
shape_negative tensor 'model.layers.1.attn.q_proj.weight': its shape has a negative size
shape_huge tensor 'model.layers.1.attn.q_proj.weight': its shape is too large
type_int tensor 'model.layers.1.attn.q_proj.weight' has type I32
type_unknown tensor 'model.layers.1.attn.q_proj.weight': type 'F4' is not supported
data_cut it is truncated
data_longer no tensor has the 1 byte at the end of the file
data_none it is truncated
tensor_missing tensor 'model.norm.weight' is missing
tensor_extra tensor 'model.extra' is not part of the model
tensor_renamed tensor 'model.layers.0.attn.q_proj.weight' is missing
file_empty model.safetensors: has 0 bytes, too few
file_7 model.safetensors: has 7 bytes, too few
file_8 model.safetensors: its header claims a length of 18446744073709551615
file_missing holds neither model.safetensors nor model.safetensors.index.json
config_missing config.json: cannot open
nan model.safetensors: tensor 'model.layers.1.attn.q_proj.weight' contains nan
inf model.safetensors: tensor 'model.layers.1.attn.q_proj.weight' contains inf
END
    dies "none/config.json: cannot open" init none
    mkdir -p "$scratch/fifo"
    mkfifo "$scratch/fifo/config.json"
    dies "fifo/config.json: is not a regular file" timeout 60 "$trainer" --init "$scratch/fifo" --dry-run
}

# OPTIONS|MESSAGE, one a line; @ stands for the folder of shards
refused_options() {
    rm -rf "$out"
    while IFS='|' read -r options message; do
        set -f
        dies "$message" run ${options//@/$shards}
        set +f
    done <<END
|which model? give --model NAME or --init DIR
--nonsense 1|--nonsense: no such option; --help lists them
--nonsense=1|--nonsense: no such option
--model fox-pro-nano --window-size=5|--window-size: no such option, but a key of config.json: give --set window_size=VALUE
--|--: no such option
-x|-x: not an option; --help lists them
train|train: not an option
--lr 1e|--lr 1e: not a number
--lr nan|--lr nan: not a number
--lr 0x10|--lr 0x10: not a number
--lr 1e999|--lr 1e999: not a number
--lr -1|--lr -1: not a number
--lr=|--lr : not a number
--lr 1Ki|--lr 1Ki: not a number
--seq-len 1.5|--seq-len 1.5: not a whole number
--seq-len 0|--seq-len 0: not a whole number
--batch-tokens 10Q|--batch-tokens 10Q: not a whole number
--batch-tokens 1e30|--batch-tokens 1e30: not a whole number
--max-steps -1|--max-steps -1: not a whole number
--keep -1|--keep -1: not a whole number
--seed 1e19|--seed 1e19: not a whole number
--top-p 1.1|--top-p 1.1: not a number from 0 to 1
--lr-schedule step|--lr-schedule step: not one of cosine|linear|constant|wsd|wsd-sqrt
--lr-end 1.1|--lr-end 1.1: not a number from 0 to 1
$tiny $batches --data @/text.bin --cooldown-tokens 64|--cooldown-tokens: only --lr-schedule wsd and wsd-sqrt have a cool-down
$tiny $batches --data @/text.bin --lr-schedule wsd --cooldown-tokens 1153|--cooldown-tokens 1153 and --warmup-tokens 128: more than --max-tokens 1280; lower one of them
$tiny $batches --data @/text.bin --lr-schedule constant --lr-end 0.1|--lr-end: the learning rate of --lr-schedule constant does not fall
--recompute cheap|--recompute cheap: not one of none|fused|qkv|block
--recompute most|--recompute most: not one of none|fused|qkv|block
--recompute|--recompute: its none|fused|qkv|block is missing
--attention most|--attention most: not one of fox|cudnn
--dry-run --bench 1|--dry-run, --bench, --dump, --eval, --generate, --requests and --maps each do one thing and exit: give one of them
--seed|--seed: its N is missing
--data|--data: its GLOB is missing
--shuffle=1|--shuffle 1: not one of false|true
--resume=1|--resume takes no value
--model gpt2|--model gpt2: no such preset
--model fox-pro-760m --recipe paper|--recipe paper: not one of iclr|analysis|submission
--model transformer-swa-760m --recipe iclr|--recipe iclr: has no row for transformer-swa-760m; its rows are 760m (fox-pro, hgrn2, mamba2), 760m (transformer-pro
--model fox-pro-nano --recipe analysis|--recipe analysis: has no row for fox-pro-nano; its rows are 125m (the paper's families), 360m
--init x --recipe iclr|--recipe iclr: trains a preset: give it with --model, without --init
--model fox-pro|--model fox-pro: no such preset
--model fox-pro-nano --init x|--model and --init both name a model
--model transformer-llama-nano --set log_pruning_tolerance=-5|--set log_pruning_tolerance=-5: this model has no forget gate
--model transformer-pro-nano --set fgate_bias_init=true|--set fgate_bias_init=true: this model has no forget gate
--model transformer-pro-nano --set pruning_rule=acp|--set pruning_rule=acp: this model has no forget gate
--model fox-pro-nano --set pruning_rule=paper|--set: pruning_rule=paper is none of ours, acp
--model transformer-pro-nano --set decay_time_max=64|--set decay_time_max=64: this model has no forget gate
$tiny --set fgate_type=none --set decay_time_min=4|--set decay_time_min=4: this model has no forget gate
--model mamba2-nano --set fgate_bias_init=true|--set: no config key is called 'fgate_bias_init'
$tiny $batches --data @/text.bin --val-every 5|--val-every: the loss on which text? give --val-data GLOB
$tiny $batches --data @/text.bin --val-tokens 5|--val-tokens: the loss on which text? give --val-data GLOB
$tiny $batches --data @/text.bin --eval-every 5|--eval-every: evaluate what? give --val-data GLOB, --eval-requests FILE, or both
$tiny $batches --data @/text.bin --eval-requests x|--eval-requests: how often? give --eval-every STEPS
$tiny $batches --data @/text.bin --eval-every 5 --eval-requests $scratch/none|--eval-requests $scratch/none: cannot open: No such file
$tiny $batches --data @/text.bin --eval-every 5 --eval-requests $scratch|--eval-requests $scratch: is not a regular file
$tiny $batches --dry-run --eval-every 5 --eval-requests $scratch/none|--eval-requests $scratch/none: cannot open: No such file
$tiny --set window_size=-1|--set: window_size=-1 is not a whole number
--model mamba2-nano --set layer_types=attention|--set: no config key is called 'layer_types'
$tiny --set layer_types=deltnet|--set: layer_types: no kind of layer is called 'deltnet' (is deltanet meant?): they are attention, deltanet, hgrn2
$tiny --set layer_types=attention:windows=4|--set: layer_types: 'windows=4' of 'attention:windows=4' is none of attention's window=N, rope and norope
$tiny --set layer_types=mamba2*9|layer_types has 9 layers, but num_hidden_layers is
$tiny --set layer_types=mamba2 --set mamba2_num_heads=3|mamba2_num_heads 3 does not divide the 32 channels of the layers
$tiny --set mamba2_num_heads=4|mamba2_num_heads: no layer is mamba2
$tiny --set layer_types=mamba2 --sequence-ranks 2 --dry-run|--sequence-ranks 2: ranks cannot share the layers of a model with layer_types
$tiny --set layer_types=mamba2 --dry-run --gpu H200|--gpu: the memory of FoxStackForCausalLM is planned by ./train_foxcu alone
--model mamba2-nano --set window_size=9|--set: no config key is called 'window_size'
$tiny --set hidden_size|--set hidden_size: not of the form KEY=VALUE
$tiny --set =1|--set =1: not of the form KEY=VALUE
$tiny --set width=1|--set: no config key is called 'width'
$tiny --set hidden_size=|--set: hidden_size= is not a whole number
$tiny --set use_rope=1|--set: use_rope=1 is none of false, true
$tiny --set rope_scaling=llama3:8|--set: rope_scaling=llama3:8 is none of null, linear:FACTOR, ntk:FACTOR, yarn:FACTOR
$tiny --set use_rope=true --set rope_scaling=yarn:0|--set: rope_scaling=yarn:0: the factor is not a number from 1 to 1000000
$tiny --set rope_scaling=yarn:4|rope_scaling: this model has no RoPE (use_rope is false)
--model mamba2-nano --set rope_scaling=yarn:4|--set: no config key is called 'rope_scaling'
$tiny --set num_heads=5|hidden_size 16 is not a multiple of num_heads 5
$tiny --set num_heads=16 --set use_rope=true|RoPE rotates pairs of channels, but the head size 1 is odd
$tiny --set eos_token_id=257|bos_token_id or eos_token_id is not below vocab_size 257
$tiny --seq-len 16|--data GLOB is missing
$tiny --seq-len 16 --dump x|--data GLOB is missing
$tiny --seq-len 24 --batch-tokens 64 --data @/text.bin|--batch-tokens 64: not a multiple of the 24 tokens of a sequence
$tiny $batches --micro-batch 3 --data @/text.bin|--micro-batch 3: does not divide the 4 sequences of a step
$tiny $batches --sequence-ranks 2 --data @/text.bin|--sequence-ranks 2: 1 rank cannot be groups of so many; start a multiple of it
$tiny $batches --sequence-ranks 2 --dry-run|--sequence-ranks 2: GPUs share sequences, and this is the CPU trainer: take ./train_foxcu
$tiny $batches --sequence-ranks 2 --data @/text.bin --dump x|--sequence-ranks 2: --generate, --requests, --maps and --dump run on one GPU
--model fox-pro-125m --sequence-ranks 5 --dry-run --gpu H200|--sequence-ranks 5: does not divide the 12 heads of the model
--model mamba2-125m --sequence-ranks 2 --dry-run --gpu H200|--sequence-ranks 2: this model has no attention
$tiny $batches --resume --data @/text.bin|--resume: from where? give --out DIR
$tiny --generate 3|--generate: with which model? give --init DIR
--generate 3|which model?
$tiny $batches --data @/text.bin --dump $scratch/none/file|none/file: cannot create: No such file or directory
$tiny $batches --data @/text.bin --dump $scratch|--dump $scratch: exists and is not a regular file
$tiny $batches --data @/text.bin --dump /dev/full|/dev/full: cannot write: No space left on device
$tiny $batches --data @/text.bin --out @/text.bin|text.bin: exists and is not a folder
$tiny $batches --data @/text.bin --out @/text.bin/x|cannot create this folder: Not a directory
$tiny $batches --data @/text.bin --out /proc/no|/proc/no: cannot create this folder
$tiny $batches --data @/text.bin --out=|not a usable folder name
$tiny --seq-len 16Mi --batch-tokens 1Ti --micro-batch 65536 --set num_hidden_layers=1024 --dry-run|more than any machine holds
END
    dies "a?b: not of the form KEY=VALUE" run $tiny --set $'a\nb'
    dies "which model?" env -i "$trainer"
    no_checkpoint
}

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

refused_out() {
    rm -rf "$out"
    check "a run" train_on text
    dies "--out $out: holds checkpoints of a run already; continue it with --resume" train_on text
    dies "$out/.: another process is training here" flock "$out/lock" "$trainer" --out "$out/." --resume
    dies "--out $out: its checkpoints are of a model with another intermediate_size" \
        train_on text --resume --set intermediate_size=64
    dies "--out $out: its checkpoints are of a model with another window_size" train_on text --resume --set window_size=8
    dies "--seq-len 32: the run in $out has 16" run --resume --out "$out" --seq-len 32
    dies "--seed 2: the run in $out has 1" run --resume --out "$out" --seed 2
    dies "--shuffle: the run in $out reads its data shuffled, which cannot change" run --resume --out "$out" --shuffle false
    equals "$out/step_00000020" "$(echo "$out"/*step_*)"
}

# ----------------------------------------------------------------------------

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
        check "bytes in a model of GPT-2's vocabulary" train_on text --set vocab_size=50257 --set hidden_size=8 --max-steps 1 $dry
        said "text.bin': has a vocabulary of 257 tokens, the model one of 50257 with end of text at 256: the model will not" stderr
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

for trainer in ${TRAIN_FOX:-./train_fox build/test/train_fox_sanitized}; do
    if [ ! -x "$trainer" ]; then
        fail "$trainer is not built: make $trainer"
        continue
    fi
    find "$scratch" -mindepth 1 -maxdepth 1 ! -name files -exec rm -rf {} +
    refused_shards
    refused_folders
    refused_options
    evaluations
    refused_out
    dry_run
    warmup
    dumps
    good_data
    names
    texts
    schedules
    odd_options
done
report

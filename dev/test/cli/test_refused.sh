#!/usr/bin/env bash
# What the trainer's command line refuses, each time with one line: shards, model folders, options, and an --out that is taken
scratch=build/test/refused
. dev/test/cli/small.sh

# ----------------------------------------------------------------------------

refused_shards() {
    while read -r name message; do
        rm -rf "$out"
        dies "shards/$name.bin$message" train_on "$name"
        no_checkpoint
    done <<'END'
none ': no file matches
empty : is empty
stub : has 12 bytes, which is less than the header of a data shard (1024); data/README.md tells how to make shards
magic : is not a data shard: starts with 20240521, not 20240520; data/README.md tells how to make shards
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
    for shards_of in "--data $shards/none.bin" "--data $shards/text.bin --val-data $shards/none.bin"; do
        dies "shards/none.bin': no file matches" run --model fox-pro-nano $batches $shards_of
        equals 1 "$(wc -l <"$scratch/stdout")" # the model's line: no weights have been drawn
    done
    dies "shards/none.bin': no file matches" run --model fox-pro-760m --set num_hidden_layers=1024 --set hidden_size=8192 \
        --set num_heads=64 --set vocab_size=257 $batches --data $shards/none.bin --dump $scratch/none # no machine has the memory
    dies "'$shards/none/text_*.bin': no file matches" train --data "$shards/none/text_*.bin"
    dies "is not a regular file; data/README.md tells how to make shards" train --data "$shards"
    dies "not a comma-separated list of file patterns" train --data "$shards/text.bin,"
    for name in model init data val-data out resume-from eval requests maps dump; do
        dies "--$name: is empty: give " run "--$name" ""
    done
    dies "text.bin twice" train --data "$shards/text.bin,$shards/te*.bin"
    dies "use one dataset" train --data "$shards/text.bin,$shards/documents.bin"
    dies "use one dataset" train --data "$shards/text.bin,$shards/wide.bin"
    dies "use one dataset" train --data "$shards/text.bin,$shards/plain.bin"
    dies "no shard has the 65 tokens" \
        run $tiny --seq-len 64 --batch-tokens 64 --data "$shards/text.bin" --val-data "$shards/val.bin"
    dies "high_id.bin: token 1000 has id 257, outside the vocabulary of 257" run $tiny --seq-len 1024 --batch-tokens 1024 \
        --max-tokens 8192 --data "$shards/text.bin" --val-data "$shards/high_id.bin"
    equals 0 "$(grep -c '^step' "$scratch/stdout")" # before the training
    dies "documents of 32 tokens are shorter than a sequence of 64" \
        run $tiny --seq-len 64 --batch-tokens 64 --data "$shards/documents.bin"
    no_checkpoint
}

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
tied model.safetensors: tensor 'lm_head.weight' is not part of the model that the config describes: tie_word_embeddings true makes the embedding the head; set it to false to read both
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
config_missing has no config.json: give the folder of a checkpoint or of a Hugging Face model, with config.json and model.safetensors
nan model.safetensors: tensor 'model.layers.1.attn.q_proj.weight' contains nan
inf model.safetensors: tensor 'model.layers.1.attn.q_proj.weight' contains inf
END
    dies "--init none: there is no such folder: give the folder of a checkpoint or of a Hugging Face model" init none
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
--data @/text.bin @/forty.bin|/forty.bin: not an option: the shell replaced the pattern of --data by file names; quote it
--data @/text.bin train|train: not an option; --help lists them
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
--model fox-pro-760m --recipe paper|--recipe paper: not one of iclr|analysis|submission|gdn
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
--init dev/test/fixtures/model/fox-pro --set initializer_range=1|--set initializer_range=1: of initial weights, and --init has weights
--init dev/test/fixtures/model/fox-pro --set fgate_bias_init=true|--set fgate_bias_init=true: of initial weights, and --init has weights
--model mamba2-nano --set fgate_bias_init=true|--set: no config key is called 'fgate_bias_init'
$tiny $batches --data @/text.bin --val-every 5|--val-every: the loss on which text? give --val-data GLOB
$tiny $batches --data @/text.bin --val-tokens 5|--val-tokens: the loss on which text? give --val-data GLOB
$tiny $batches --data @/text.bin --eval-every 5|--eval-every: evaluate what? give --val-data GLOB, --eval-requests FILE, or both
$tiny $batches --data @/text.bin --eval-requests x|--eval-requests: how often? give --eval-every STEPS
$tiny $batches --data @/text.bin --eval-every 5 --eval-requests $scratch/none|--eval-requests $scratch/none: cannot open: No such file
$tiny $batches --data @/text.bin --eval-every 5 --eval-requests $scratch|--eval-requests $scratch: is not a regular file
$tiny $batches --dry-run --eval-every 5 --eval-requests $scratch/none|--eval-requests $scratch/none: cannot open: No such file
$tiny --set window_size=-1|--set: window_size=-1 is not a whole number
--model mamba2-nano --set layer_types=attention|--set: layer_types: all layers of this model are mamba2; begin with a model of attention, as --model fox-pro-nano
$tiny --set layer_types=deltnet|--set: layer_types: no kind of layer is called 'deltnet' (is deltanet meant?): they are attention, deltanet, hgrn2
$tiny --set layer_types=attention:windows=4|--set: layer_types: 'windows=4' of 'attention:windows=4' is none of attention's window=N, rope and norope
$tiny --set layer_types=attention:rope:norope|'norope' of 'attention:rope:norope' is none of attention's window=N, rope and norope, or the second of its kind
$tiny --set layer_types=attention:window=4:rope:window=4|'window=4' of 'attention:window=4:rope:window=4' is none of
$tiny --set layer_types=mamba2*9|layer_types has 9 layers, but num_hidden_layers is
$tiny --set layer_types=mamba2 --set mamba2_num_heads=3|mamba2_num_heads 3 does not divide the 32 channels of the layers
$tiny --set mamba2_num_heads=4|layer_types has no mamba2 layer, but mamba2_num_heads is set
--init dev/test/fixtures/model/stack-all-kinds --set layer_types=hgrn2*3,deltanet,gated_deltanet|layer_types has no mamba2 layer, but mamba2_num_heads is set
--model fox-pro-nano --set layer_types=mamba2 --set num_heads=1|--set num_heads=1: a key of attention, and no layer is attention
$tiny --set layer_types=mamba2 --set num_kv_heads=1|--set num_kv_heads=1: a key of attention, and no layer is attention
$tiny --set layer_types=mamba2,hgrn2 --set num_hidden_layers=2 --set window_size=9|--set window_size=9: a key of attention
$tiny --set layer_types=mamba2 --set rope_base=100|--set rope_base=100: a key of attention
$tiny --set layer_types=mamba2 --set log_pruning_tolerance=-5|--set log_pruning_tolerance=-5: a key of attention
$tiny --set layer_types=mamba2 --set use_rope=true|--set use_rope=true: a key of attention
$tiny --set layer_types=attention:window=9 --set window_size=5|--set window_size: each layer of attention has a window of its own
$tiny --set layer_types=attention:rope --set use_rope=false|--set use_rope: each layer of attention says rope or norope itself
$tiny --set layer_types=mamba2 --sequence-ranks 2 --dry-run|--sequence-ranks 2: this model has no attention, whose heads ranks could share
$tiny --set layer_types=mamba2 --dry-run --gpu H200|--gpu: the memory of FoxStackForCausalLM is planned by ./train_foxcu alone
--model mamba2-nano --set window_size=9|--set: no config key is called 'window_size'
$tiny --set hidden_size|--set hidden_size: not of the form KEY=VALUE
$tiny --set =1|--set =1: not of the form KEY=VALUE
$tiny --set width=1|--set: no config key is called 'width'; --dry-run config prints those in config.json
$tiny --set hidden_size=|--set: hidden_size= is not a whole number
$tiny --set use_rope=1|--set: use_rope=1 is none of false, true
$tiny --set rope_scaling=llama3:8|--set: rope_scaling=llama3:8 is none of null, linear:FACTOR, ntk:FACTOR, yarn:FACTOR
$tiny --set use_rope=true --set rope_scaling=yarn:0|--set: rope_scaling=yarn:0: the factor is not a number from 1 to 1000000
$tiny --set rope_base=100|--set rope_base: no layer has RoPE: set use_rope=true, or attention:rope in layer_types, or leave it out
$tiny --set rope_scaling=yarn:4|rope_scaling: no layer has RoPE: set use_rope=true, or attention:rope in layer_types, or leave it out
$tiny --set use_rope=true --set layer_types=attention:norope --set rope_base=100|--set rope_base: no layer has RoPE: set use_rope=true, or attention:rope in layer_types, or leave it out
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
--init @/text.bin --prompt x|shards/text.bin: is a file; give the folder that it is in
$tiny $batches --data @/text.bin --out @/text.bin/x|cannot create this folder: Not a directory
$tiny $batches --data @/text.bin --out /proc/no|/proc/no: cannot create this folder
$tiny $batches --data @/text.bin --out=|--out: is empty: give DIR
$tiny --seq-len 16Mi --batch-tokens 1Ti --micro-batch 65536 --set num_hidden_layers=1024 --dry-run|more than any machine holds
END
    dies "a?b: not of the form KEY=VALUE" run $tiny --set $'a\nb'
    dies "which model?" env -i "$trainer"
    no_checkpoint
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

each_trainer refused_shards refused_folders refused_options refused_out

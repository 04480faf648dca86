#!/usr/bin/env bash
# Tests the command line of ./train_foxcu on a machine with a GPU: runs end and resume, --deterministic gives
# the same bits, ./train_fox resumes its checkpoints and vice versa, invalid input is refused in one line.
scratch=build/test/gpu
. dev/test/check.sh

export OMP_NUM_THREADS=2

for program in ./train_foxcu ./train_fox; do
    [ -x $program ] || { fail "$program is not built: make $program"; report; }
done
make_files

# A small model with head size 64, trained for 20 steps of two micro-batches.
steps=20
tiny="--model fox-pro-nano --set num_hidden_layers=2 --set intermediate_size=72"
batches="--seq-len 48 --batch-tokens 192 --micro-batch 2 --max-tokens $((steps * 192)) --warmup-tokens 768 --lr 5e-3"
data="--data $shards/text.bin"

gpu() { ./train_foxcu "$@"; }
# train OUT OPTION...
train() { gpu $tiny $batches $data --deterministic --shuffle --out "$scratch/$1" "${@:2}"; }
resume() { gpu --resume --out "$scratch/$1" "${@:2}"; }
ends_same() { same_bytes $steps "$scratch/$1" "$scratch/whole"; } # OUT: as the uninterrupted run

# tensor FOLDER NAME: prints the values of a tensor of a checkpoint
tensor() {
    "$python" -c 'import sys; sys.path.insert(0, "dev/test"); import cli_files as f
print(*f.values(*f.read(sys.argv[1] + "/model.safetensors"), sys.argv[2]))' "$@"
}

# ----------------------------------------------------------------------------

same_bits() {
    check "a run" train whole --val-data "$shards/part_2.bin" --val-every 7
    said "validation loss"
    said "% MFU"
    equals "" "$(cat "$scratch/stderr")"
    equals $steps "$(checkpoints "$scratch/whole")"
    check "the same run without validation" train again
    ends_same again
    for level in none fused qkv block; do
        check "--recompute $level" train $level --recompute $level
        ends_same $level
    done
    check "without --deterministic" gpu $tiny $batches $data --shuffle --out "$scratch/tuned"
    near 3.5e-3 whole tuned
}

resumed() {
    check "stop at step 7" train stopped --max-steps 7
    equals 7 "$(checkpoints "$scratch/stopped")"
    check "resume at step 7" resume stopped
    ends_same stopped
    check "the log" files same_steps "$scratch/stopped/log.jsonl" "$scratch/whole/log.jsonl"
    for signal in TERM INT; do
        check "SIG$signal" files strike $signal 4 0 ./train_foxcu $tiny $batches $data --deterministic --shuffle \
            --out "$scratch/$signal"
        equals 75 "$(cat "$scratch/stdout")"
        newest=$(checkpoints "$scratch/$signal")
        check "a checkpoint of the interrupted step" test "$newest" -ge 4 -a "$newest" -lt $steps
        check "resume after SIG$signal" resume $signal
        ends_same $signal
    done
}

# --fp8: the same bits in every run, at every --recompute and when resumed; near bf16; on the CPU as without it.
in_fp8() {
    local level wide="$tiny --set intermediate_size=80"
    if ! gpu $wide $batches $data --fp8 --dry-run >/dev/null 2>&1; then
        dies "FP8 begins with 8.9" gpu $wide $batches $data --fp8 --dry-run
        skip "--fp8, which this GPU does not have"
        return
    fi
    fp8() { gpu $wide $batches $data --deterministic --shuffle --fp8 --out "$scratch/$1" "${@:2}"; }
    check "a run in bf16" gpu $wide $batches $data --deterministic --shuffle --out "$scratch/in_bf16"
    check "--fp8" fp8 in_fp8
    said "GEMMs in FP8, recompute none"
    near 2.6e-2 in_fp8 in_bf16
    for level in none qkv block; do
        check "--fp8 --recompute $level" fp8 fp8_$level --recompute $level
        same "$scratch/fp8_$level/step_00000020/model.safetensors" "$scratch/in_fp8/step_00000020/model.safetensors"
    done
    check "--fp8 to step 7" fp8 fp8_stopped --max-steps 7
    check "its scales are recorded" grep -q '"fp8": "[0-9a-f]\{1024\}"' "$scratch/fp8_stopped/step_00000007/trainer.json"
    check "--fp8, resumed" resume fp8_stopped
    same_bytes $steps "$scratch/fp8_stopped" "$scratch/in_fp8"
    same <(grep '"fp8"' "$scratch/fp8_stopped/step_00000020/trainer.json") <(grep '"fp8"' "$scratch/in_fp8/step_00000020/trainer.json")
    check "--fp8 to step 10" fp8 fp8_there --max-steps 10
    check "second half on the CPU" ./train_fox --resume --out "$scratch/fp8_there"
    near 2.6e-2 fp8_there in_bf16
    check "--fp8 from a checkpoint without scales" gpu --resume --out "$scratch/fp8_there" --max-tokens 7680 --fp8
    check "--bench --fp8" gpu $wide --seq-len 48 --micro-batch 2 --fp8 --bench 2
    said "matmul, FP8"
    said "weights in FP8"
}

with_the_cpu() {
    check "initial weights of the GPU trainer" train drawn --max-steps 0
    check "initial weights of the CPU trainer" ./train_fox $tiny $batches $data --shuffle --out "$scratch/cpu" --max-steps 0
    same "$scratch/drawn/step_00000000/model.safetensors" "$scratch/cpu/step_00000000/model.safetensors"
    check "all steps on the CPU" ./train_fox --resume --out "$scratch/cpu"
    near 3.5e-3 whole cpu
    check "first half on the GPU" train there --max-steps 10
    check "second half on the CPU" ./train_fox --resume --out "$scratch/there"
    near 3.5e-3 whole there
    check "first half on the CPU" ./train_fox $tiny $batches $data --shuffle --out "$scratch/back" --max-steps 10
    check "second half on the GPU" resume back
    near 3.5e-3 whole back
    check "--dump" gpu --init "$scratch/whole/step_00000020" $batches $data --dump "$scratch/dump"
    check "the values and names of the dump" files dump "$scratch/dump" "$shards/text.bin" 2 48 257 "$scratch/whole/step_00000020"
}

# positions LIMIT OPTION...: --eval on the GPU and the CPU; the losses at each position differ by at most LIMIT
positions() {
    local program
    for program in ./train_foxcu ./train_fox; do
        check "--eval of $program" $program --init "$scratch/whole/step_00000020" --eval "$scratch/eval_$(basename $program)" \
            --deterministic --val-data "$shards/text.bin" "${@:2}"
        equals "" "$(cat "$scratch/stderr")"
    done
    "$python" - "$1" "$scratch"/eval_* <<'END' >"$scratch/stdout" 2>&1 && pass || fail "losses: $(tail -n 1 "$scratch/stdout")"
import json, sys
cpu, gpu = (json.load(open(path)) for path in sys.argv[2:])
assert cpu["tokens"] == gpu["tokens"] and len(cpu["loss"]) == len(gpu["loss"]) == cpu["seq_len"]
worst = max(abs(a - b) for a, b in zip(cpu["loss"], gpu["loss"]))
assert worst <= float(sys.argv[1]), f"differ by {worst:.4f}"
assert abs(cpu["loss_mean"] - gpu["loss_mean"]) <= 0.005
assert cpu["pruned"] is None and len(gpu["pruned"]) == 2 and all(0 <= share < 1 for share in gpu["pruned"]), gpu["pruned"]
END
}

# In batches that the sequences do not fill, and beyond the length of training.
evaluated() {
    positions 0.05 --seq-len 48 --val-tokens $((9 * 48)) --micro-batch 2
    positions 0.05 --seq-len 640 --val-tokens 1280 --micro-batch 1
    check "--eval" gpu --init "$scratch/whole/step_00000020" --eval "$scratch/again.json" --val-data "$shards/text.bin"
    said "GiB of weights and "
    check "a lm_head that overflows" cp -r "$scratch/whole/step_00000020" "$scratch/large"
    files fill "$scratch/large/model.safetensors" lm_head.weight 3e38
    dies "is not finite at position " gpu --init "$scratch/large" --eval "$scratch/large.json" --val-data "$shards/text.bin"
    check "writes nothing" test ! -e "$scratch/large.json"
}

# Targets that count, unevenly over micro-batches: as on the CPU; where all do, the bits of data without a mask.
masked() {
    local name program masks=$scratch/masks
    local run="$tiny --seq-len 16 --batch-tokens 192 --max-tokens 3840 --warmup-tokens 768 --lr 5e-3"
    check "make the masks" env PYTHONPATH=dev/test/trainer "$python" dev/test/tokens/masked.py make "$masks"
    check "passes of 2" gpu $run --data "$masks/ragged.bin" --micro-batch 2 --out "$scratch/masked2"
    check "passes of 12" gpu $run --data "$masks/ragged.bin" --micro-batch 12 --out "$scratch/masked12"
    check "on the CPU" ./train_fox $run --data "$masks/ragged.bin" --micro-batch 12 --out "$scratch/masked_cpu"
    near 2.4e-2 masked2 masked_cpu # an H200 is 1.2e-2 away, with passes of 12 1.0e-2, where the loss falls fastest
    near 2.4e-2 masked12 masked_cpu
    for name in all plain; do
        check "$name" gpu $run --data "$masks/$name.bin" --micro-batch 2 --deterministic --out "$scratch/masked_$name"
    done
    same "$scratch/masked_all/step_00000020/optimizer.safetensors" "$scratch/masked_plain/step_00000020/optimizer.safetensors"
    check "steps without targets" gpu $run --data "$masks/late.bin" --micro-batch 2 --out "$scratch/masked_late"
    said "step 1: none of its 192 targets counts" stderr
    for program in ./train_foxcu ./train_fox; do
        check "--eval of $program" $program --init "$scratch/masked_cpu" --val-data "$masks/ragged.bin" --seq-len 16 \
            --eval "$scratch/masked_$(basename $program).json"
    done
    "$python" - "$scratch"/masked_train_fox*.json <<'END' >"$scratch/stdout" 2>&1 && pass || fail "masks: $(tail -n 1 "$scratch/stdout")"
import json, sys
cpu, gpu = (json.load(open(path)) for path in sys.argv[1:])
assert cpu["targets"] == gpu["targets"] < cpu["tokens"], gpu["targets"]
assert abs(cpu["accuracy"] - gpu["accuracy"]) <= 0.1, gpu["accuracy"]
assert abs(cpu["loss_mean"] - gpu["loss_mean"]) <= 0.01, gpu["loss_mean"]
END
}

# text NAME PROGRAM OPTION...: writes the output of --generate to $scratch/NAME
text() {
    check "--generate on ${*:2}" "$2" --init "$scratch/whole/step_00000020" --generate 40 "${@:3}"
    cp "$scratch/stdout" "$scratch/$1"
    equals "" "$(cat "$scratch/stderr")"
}

texts() {
    text one ./train_foxcu --deterministic --seed 3
    text two ./train_foxcu --deterministic --seed 3
    same "$scratch/one" "$scratch/two"
    text other ./train_foxcu --deterministic --seed 4
    differ "$scratch/one" "$scratch/other"
    text prompted ./train_foxcu --prompt "A B" --top-k 5
    equals "A B" "$(head -c 3 "$scratch/prompted")"
    text cpu_one ./train_fox --prompt "A" --temperature 0
    text gpu_one ./train_foxcu --prompt "A" --temperature 0
    equals "$(head -c 4 "$scratch/cpu_one" | base64)" "$(head -c 4 "$scratch/gpu_one" | base64)"
    check "samples while training" train sampled --max-steps 4 --sample-every 2 --generate 8
    equals 2 "$(grep -c "sample: " "$scratch/stdout")"
    check "resume without samples" resume sampled --sample-every 0
    ends_same sampled # sampling does not change training
}

# --eval-every changes no bit of what is learnt, and sums what --requests answers; a signal ends it.
in_training() {
    local file=$scratch/in_training run=$scratch/measured
    printf '{"type":"%s}\n' 'score","context":"One","continuation":" two"' 'score","continuation":""' \
        'rolling","text":"A text of more than one window of the model, of 48 tokens."' \
        'generate","prompt":"On","max_tokens":9,"expected":""' 'generate","max_tokens":9,"prompt":"a","expected":[256]' >"$file"
    check "evaluations" train measured --val-data "$shards/part_2.bin" --eval-every 3 --eval-requests "$file"
    equals "" "$(cat "$scratch/stderr")"
    ends_same measured
    equals 7 "$(grep -c '"event":"evaluation"' "$run/log.jsonl")"
    check "its answers" "$python" dev/test/eval/requests.py in_training "$scratch" "$run/step_00000020" "$run/log.jsonl" \
        "$file" 0.02 ./train_foxcu --deterministic
    yes '{"type":"generate","prompt":"a","max_tokens":40}' | head -n 100000 >"$scratch/many"
    check "SIGTERM in an evaluation" files strike TERM 3 0 ./train_foxcu $tiny $batches $data --deterministic --shuffle \
        --out "$scratch/cut" --eval-every 3 --eval-requests "$scratch/many"
    equals "75 3" "$(cat "$scratch/stdout") $(checkpoints "$scratch/cut")"
    check "make up for it" resume cut --eval-requests "$file" --max-steps 4
    equals "3 4" "$(sed -n 's/.*"event":"evaluation","step":\([0-9]*\),.*/\1/p' "$scratch/cut/log.jsonl" | paste -sd ' ')"
    check "go on" resume cut --eval-every 0
    ends_same cut
}

# requests FROM OPTION...: greedy and sampled requests together, and slots that other sequences have left
requests() {
    local case
    for case in mixed reused; do
        check "--requests, $case, ${*:2}" "$python" dev/test/eval/requests.py $case "$scratch" "$1" ./train_foxcu \
            --deterministic "${@:2}"
    done
}

requested() {
    requests "$scratch/whole/step_00000020"
    check "a model without QK norm" train llama --set qk_norm=false
    requests "$scratch/llama/step_00000020"
    check "heads of keys that two heads read" train grouped --set num_kv_heads=1
    requests "$scratch/grouped/step_00000020"
}

refused() {
    dies "--out $scratch/whole: holds checkpoints of a run already; continue it with --resume" train whole
    dies "$scratch/whole: another process is training here" flock "$scratch/whole/lock" ./train_foxcu --resume \
        --out "$scratch/whole"
    dies "head sizes 64 and 128, not 32" gpu $tiny --set num_heads=4 $batches $data
    dies "--generate: with which model? give --init DIR" gpu $tiny --generate 5
    dies "intermediate_size" gpu $tiny --set intermediate_size=70 $batches $data
    dies "hidden_size, at most 8192," gpu $tiny --set hidden_size=8256 --set num_heads=129 $batches $data
    dies "at most 65535 heads of all sequences" gpu --model hgrn2-nano --seq-len 16 --batch-tokens 1Mi --micro-batch 65536 \
        $data
    dies "--recompute most: not one of none|fused|qkv|block" train refused --recompute most
    dies "--attention most: not one of fox|cudnn" train refused --attention most
    dies "cuDNN has no forget gate" train refused --attention cudnn
    local large="--model fox-pro-760m --batch-tokens 64Mi --bench 1"
    dies "does not fit into" gpu $large --micro-batch 4096
    dies "--micro-batch" gpu $large --micro-batch 256 --recompute none
    CUDA_VISIBLE_DEVICES="" dies "there is no GPU in CUDA_VISIBLE_DEVICES=''; ./train_fox trains on the CPU" train refused
    equals "" "$(find "$scratch/refused" -name '*step_*' 2>/dev/null)"
}

not_finite() {
    local model=$scratch/nan/step_00000015/model.safetensors code=0
    check "the first steps" train nan --max-steps 15
    rm "$scratch/nan/log.jsonl"
    check "write a NaN into the weights" files nan "$model" model.layers.0.attn.o_proj.weight
    resume nan --save-every 1 >"$scratch/stdout" 2>"$scratch/stderr" || code=$?
    equals "1 2" "$code $(wc -l <"$scratch/stderr")"
    said "step_00000015/model.safetensors: tensor 'model.layers.0.attn.o_proj.weight' contains nan" stderr
    check "repair it" files fill "$model" model.layers.0.attn.o_proj.weight 0.01
    check "embeddings that are too large to square" files fill "$model" model.embeddings.weight 1e20
    dies "nan (first in the gradient of " resume nan --save-every 1
    check "weights that do not matter" files fill "$model" lm_head.weight 0
    check "and their norm" files fill "$model" model.embeddings.weight 0.01
    check "and their norm" files fill "$model" model.norm.weight 0
    dies "step 16: the gradient is exactly 0 at a loss of " resume nan --save-every 1
    equals 15 "$(checkpoints "$scratch/nan")"
    equals 0 "$(grep -c '"event":"step"' "$scratch/nan/log.jsonl")"
}

gates() {
    local bias=model.layers.1.attn.fgate_bias
    for gate in fixed bias_only; do
        check "fgate_type=$gate, initial weights" train $gate --set fgate_type=$gate --max-steps 0
        check "fgate_type=$gate, all steps" resume $gate
    done
    equals "$(tensor "$scratch/fixed/step_00000000" $bias)" "$(tensor "$scratch/fixed/step_00000020" $bias)"
    for step in 00 20; do
        check "the bias of bias_only" tensor "$scratch/bias_only/step_000000$step" $bias
        cp "$scratch/stdout" "$scratch/bias_$step"
    done
    differ "$scratch/bias_00" "$scratch/bias_20"
    check "fgate_type=none" train no_gate --set fgate_type=none --set use_rope=true
}

# Gates at their initial values forget within one or two blocks: most of a longer sequence is pruned; losses
# are the same.
pruned() {
    local longer="$tiny --seq-len 640 --batch-tokens 640 --max-tokens 3200 --deterministic"
    check "pruning" gpu $longer $data --out "$scratch/pruned"
    said "% pruned)"
    equals 0 "$(grep -c ' 0% pruned' "$scratch/stdout")"
    check "no pruning" gpu $longer $data --set log_pruning_tolerance=null --out "$scratch/unpruned"
    equals 0 "$(grep -c '% pruned' "$scratch/stdout")"
    near 1.7e-4 pruned unpruned
    check "ACP's rule" gpu $longer $data --set pruning_rule=acp --out "$scratch/acp"
    said "% pruned)"
    near 1.7e-4 acp unpruned
}

# recurrent FAMILY KEY=VALUE: a small model of a recurrent family trains the same bits with every --recompute, resumes,
# and generates on both trainers.
recurrent() {
    local one=$1-whole two=$1-stopped from level
    local family="--model $1-nano --set num_hidden_layers=2 --set $2"
    check "$1" gpu $family $batches $data --deterministic --shuffle --out "$scratch/$one"
    equals $steps "$(checkpoints "$scratch/$one")"
    for level in fused qkv block; do
        check "$1, --recompute $level" gpu $family $batches $data --deterministic --shuffle --recompute $level \
            --out "$scratch/$1-$level"
        same "$scratch/$1-$level/step_00000020/model.safetensors" "$scratch/$one/step_00000020/model.safetensors"
    done
    check "$1, stop at step 7" gpu $family $batches $data --deterministic --shuffle --out "$scratch/$two" --max-steps 7
    check "$1, resume" resume $two
    same_bytes $steps "$scratch/$two" "$scratch/$one"
    # HGRN2 amplifies: at the rate of the other runs float and double part by 0.1 within 20 steps, and so do weights that
    # are rounded to bf16 once. At this rate these part by 5e-3, those of the other families by 5e-4.
    for program in ./train_foxcu ./train_fox; do
        check "$1 at a low learning rate" $program $family $batches $data --shuffle --lr 5e-5 --out "$scratch/$1-$(basename $program)"
    done
    near 3.5e-3 $1-train_foxcu $1-train_fox
    from=$scratch/$one/step_00000020
    for program in ./train_foxcu ./train_fox; do
        check "$1, --generate on $program" $program --init "$from" --prompt "A" --generate 40 --temperature 0
        cp "$scratch/stdout" "$scratch/$1-$(basename $program).txt"
    done
    equals "$(head -c 4 "$scratch/$1-train_fox.txt" | base64)" "$(head -c 4 "$scratch/$1-train_foxcu.txt" | base64)"
    check "$1, several samples of a prompt" gpu --init "$from" --prompt "A B" --generate 20 --samples 3 --seed 1
    requests "$from"
    check "$1, --eval" gpu --init "$from" --eval "$scratch/$1.json" --val-data "$shards/text.bin" --deterministic
    check "$1, --bench" gpu $family $batches --bench 1
    said "scan"
}

# A stack: the same bits with every --recompute and when resumed, and --maps of its layer with attention as on the CPU.
stack() {
    local run="--model fox-gdn-nano --set intermediate_size=72 --deterministic --shuffle" level program
    check "a stack" gpu $run $batches $data --out "$scratch/stack"
    for level in qkv block; do
        check "a stack, --recompute $level" gpu $run $batches $data --recompute $level --out "$scratch/stack.$level"
        same "$scratch/stack.$level/step_00000020/model.safetensors" "$scratch/stack/step_00000020/model.safetensors"
    done
    check "a stack, stop at step 7" gpu $run $batches $data --out "$scratch/stack.stopped" --max-steps 7
    check "a stack, resume" resume stack.stopped
    same "$scratch/stack.stopped/step_00000020/optimizer.safetensors" "$scratch/stack/step_00000020/optimizer.safetensors"
    requests "$scratch/stack/step_00000020"
    for program in ./train_foxcu ./train_fox; do
        check "a stack, --maps of $program" $program --init "$scratch/stack/step_00000020" --maps \
            "$scratch/$(basename $program).maps" --val-data "$shards/text.bin" --seq-len 48
    done
    "$python" - "$scratch"/train_fox*.maps <<'END' >"$scratch/stdout" 2>&1 && pass || fail "maps: $(tail -n 1 "$scratch/stdout")"
import sys
sys.path.insert(0, "dev/test")
import cli_files
cpu, gpu = map(cli_files.read, sys.argv[1:])
assert list(cpu[0]) == list(gpu[0]) and "3.1.attention" in gpu[0], list(gpu[0])
a, b = (cli_files.values(*maps, "3.1.attention") for maps in (cpu, gpu))
worst = max(abs(x - y) for x, y in zip(a, b))
assert worst <= 0.05, worst
END
}

# The baseline with cuDNN's attention, if the trainer was built with it.
cudnn() {
    local baseline="$tiny --set fgate_type=none --set use_rope=true --attention cudnn"
    if ./train_foxcu $baseline $batches --dry-run 2>&1 | grep -q "built without cuDNN"; then
        dies "build it with USE_CUDNN=1, or use --attention fox" gpu $baseline $batches $data
        return
    fi
    check "--attention cudnn" gpu $baseline $batches $data --deterministic --shuffle --out "$scratch/cudnn"
    said "attention by cuDNN"
    near 3.5e-3 cudnn no_gate
    dies "generation on the GPU has kernels for head sizes 64 and 128, not 96" gpu $baseline --set hidden_size=96 \
        --set num_heads=1 $batches $data --sample-every 2
}

plans() {
    for model in fox-pro-125m transformer-llama-760m; do
        check "--dry-run $model" gpu --model $model --dry-run config --data none --out "$scratch/dry"
        equals "" "$(cat "$scratch/stderr")"
        said "--recompute block  largest micro-batch that fits: "
        said '"hidden_size": '
    done
    check "--dry-run writes nothing" test ! -e "$scratch/dry"

    check "--dry-run" gpu --model fox-pro-125m --dry-run --batch-tokens 4Mi
    local fits
    fits=$(awk '/--recompute none/ { print $(NF - 1) }' "$scratch/stdout")
    check "the planned micro-batch of $fits sequences fits" gpu --model fox-pro-125m --batch-tokens $((fits * 16384)) \
        --micro-batch "$fits" --recompute none --bench 1
    check "--bench" gpu $tiny $batches --bench 1
    said "1 step of 2 x 2 x 48 tokens on 1 GPU"
    said "matmul"
    said "tokens/s"
    check "--bench, head size 128" gpu $tiny --set num_heads=1 $batches --bench 1 --recompute block
    said "attention by"
    said "recompute block"
    check "without --out" gpu $tiny $batches $data --max-steps 1
    said "without --out DIR nothing of this run is kept" stderr
    check "--help" gpu --help
    said "--recompute none|fused|qkv|block"
}

same_bits
resumed
with_the_cpu
in_fp8
evaluated
masked
texts
in_training
requested
refused
not_finite
gates
pruned
cudnn
recurrent deltanet intermediate_size=72
recurrent gated-deltanet intermediate_size=72
recurrent hgrn2 intermediate_size=72
recurrent mamba2 vocab_size=257
stack
plans
report

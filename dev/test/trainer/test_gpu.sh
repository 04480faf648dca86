#!/usr/bin/env bash
# The GPU trainer's command line on a machine that has one: how runs end and go on, the same bits with --deterministic,
# checkpoints that travel between it and the CPU trainer, and what it refuses in one line.
#
# Tests ./train_foxcu, beside ./train_fox.
scratch=build/test/gpu
. dev/test/check.sh

files=$scratch/files
shards=$files/shards
export OMP_NUM_THREADS=2

rm -rf "$scratch"
mkdir -p "$scratch"
for program in ./train_foxcu ./train_fox; do
    [ -x $program ] || { fail "$program is not built: make $program"; report; }
done
python=$(python3 -c 'import sys; print(sys.executable)') || { fail "python3 is missing"; report; }
files() { "$python" dev/test/cli_files.py "$@"; }
check "make the files" files make "$files"

# A model with heads of 64 channels that trains 20 steps of two passes in no time.
steps=20
tiny="--model fox-pro-nano --set num_hidden_layers=2 --set intermediate_size=72"
batches="--seq-len 48 --batch-tokens 192 --micro-batch 2 --max-tokens $((steps * 192)) --warmup-tokens 768 --lr 5e-3"
data="--data $shards/text.bin"

gpu() { ./train_foxcu "$@"; }
# train OUT OPTION...
train() { gpu $tiny $batches $data --deterministic --shuffle --out "$scratch/$1" "${@:2}"; }
resume() { gpu --resume --out "$scratch/$1" "${@:2}"; }
checkpoints() { (cd "$scratch/$1" && echo .tmp-* step_*) | sed 's/\.tmp-\* //; s/step_0*\([0-9]\)/\1/g'; }

# ends_same OUT: in the bytes of the run that nothing disturbed
ends_same() {
    same "$scratch/$1/step_00000020/model.safetensors" "$scratch/whole/step_00000020/model.safetensors"
    same "$scratch/$1/step_00000020/optimizer.safetensors" "$scratch/whole/step_00000020/optimizer.safetensors"
}

# near LIMIT OUT OUT: the losses of two runs' steps agree to within this
near() {
    "$python" - "$@" <<'END' >"$scratch/stdout" 2>&1 && pass || fail "losses: $(tail -n 1 "$scratch/stdout")"
import json, sys
limit, *logs = sys.argv[1:]
def losses(path):
    lines = [json.loads(line) for line in open(f"build/test/gpu/{path}/log.jsonl")]
    return {line["step"]: line["loss"] for line in lines if line["event"] == "step"}
a, b = map(losses, logs)
assert a.keys() == b.keys() and len(a) > 0, f"steps {sorted(a)} and {sorted(b)}"
worst = max(abs(a[step] - b[step]) for step in a)
assert worst <= float(limit), f"{logs[0]} and {logs[1]} differ by {worst:.4f}, more than {limit}"
print(f"differ by {worst:.4f}")
END
}

# tensor FOLDER NAME: its values
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
    equals $steps "$(checkpoints whole)"
    check "again" train again
    ends_same again # and validation changes nothing
    for level in none qkv block; do
        check "--recompute $level" train $level --recompute $level
        ends_same $level
    done
    check "not --deterministic" gpu $tiny $batches $data --shuffle --out "$scratch/tuned"
    near 0.02 tuned whole
}

resumed() {
    check "stop" train stopped --max-steps 7
    equals 7 "$(checkpoints stopped)"
    check "and go on" resume stopped
    ends_same stopped
    check "the log" files same_steps "$scratch/stopped/log.jsonl" "$scratch/whole/log.jsonl"
    for signal in TERM INT; do
        check "SIG$signal" files strike $signal 4 0 ./train_foxcu $tiny $batches $data --deterministic --shuffle \
            --out "$scratch/$signal"
        equals 75 "$(cat "$scratch/stdout")"
        newest=$(checkpoints $signal)
        check "a checkpoint of the step it was in" test "$newest" -ge 4 -a "$newest" -lt $steps
        check "go on after SIG$signal" resume $signal
        ends_same $signal
    done
}

with_the_cpu() {
    check "the weights drawn on the GPU" train drawn --max-steps 0
    check "and on the CPU" ./train_fox $tiny $batches $data --shuffle --out "$scratch/cpu" --max-steps 0
    same "$scratch/drawn/step_00000000/model.safetensors" "$scratch/cpu/step_00000000/model.safetensors"
    check "to the end on the CPU" ./train_fox --resume --out "$scratch/cpu"
    near 0.02 cpu whole
    check "half on the GPU" train there --max-steps 10
    check "half on the CPU" ./train_fox --resume --out "$scratch/there"
    near 0.02 there whole
    check "half on the CPU" ./train_fox $tiny $batches $data --shuffle --out "$scratch/back" --max-steps 10
    check "half on the GPU" resume back
    near 0.02 back whole
    check "--dump" gpu --init "$scratch/whole/step_00000020" $batches $data --dump "$scratch/dump"
    check "its numbers and names" files dump "$scratch/dump" "$shards/text.bin" 2 48 257 "$scratch/whole/step_00000020"
}

# text NAME PROGRAM OPTION...: what --generate writes, to $scratch/NAME
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
    resume sampled --sample-every 0 >"$scratch/stdout" && ends_same sampled # samples change nothing
}

refused() {
    dies "--out $scratch/whole: holds checkpoints of a run already; continue it with --resume" train whole
    dies "$scratch/whole: another process is training here" flock "$scratch/whole/lock" ./train_foxcu --resume \
        --out "$scratch/whole"
    dies "head sizes 64 and 128, not 32" gpu $tiny --set num_heads=4 $batches $data
    dies "--generate: with which model? give --init DIR" gpu $tiny --generate 5
    dies "intermediate_size" gpu $tiny --set intermediate_size=70 $batches $data
    dies "--recompute most: not one of none, qkv, block" train refused --recompute most
    dies "--attention most: not one of fox, cudnn" train refused --attention most
    dies "cuDNN has no forget gate" train refused --attention cudnn
    local large="--model fox-pro-760m --batch-tokens 64Mi --bench 1"
    dies "do not fit into" gpu $large --micro-batch 4096
    dies "--micro-batch" gpu $large --micro-batch 256 --recompute none
    CUDA_VISIBLE_DEVICES="" dies "there is no GPU in CUDA_VISIBLE_DEVICES=''; ./train_fox trains on the CPU" train refused
    equals "" "$(find "$scratch/refused" -name '*step_*' 2>/dev/null)"
}

not_finite() {
    cp -r "$scratch/whole" "$scratch/nan"
    rm "$scratch/nan/log.jsonl"
    check "damage it" files nan "$scratch/nan/step_00000020/model.safetensors" model.layers.0.attn.o_proj.weight
    dies "step 21: the loss is nan and the gradient norm nan (first in the weights of model.layers.0.attn.o_proj.weight)" \
        resume nan --max-tokens $((25 * 192)) --save-every 1
    equals 20 "$(checkpoints nan)"
    check "and the log has no step 21" sh -c "! grep -q '\"step\": 21' $scratch/nan/log.jsonl"
}

gates() {
    local bias=model.layers.1.attn.fgate_bias
    for gate in fixed bias_only; do
        check "$gate, the weights drawn" train $gate --set fgate_type=$gate --max-steps 0
        check "$gate, to the end" resume $gate
    done
    equals "$(tensor "$scratch/fixed/step_00000000" $bias)" "$(tensor "$scratch/fixed/step_00000020" $bias)"
    check "bias_only learns" test "$(tensor "$scratch/bias_only/step_00000000" $bias)" != \
        "$(tensor "$scratch/bias_only/step_00000020" $bias)"
    check "no gate" train no_gate --set fgate_type=none --set use_rope=true
}

# Gates as they are drawn forget within a block or two: most of a longer sequence is pruned, with the same losses.
pruned() {
    local longer="$tiny --seq-len 640 --batch-tokens 640 --max-tokens 3200 --deterministic"
    check "pruning" gpu $longer $data --out "$scratch/pruned"
    said "% pruned)"
    check "not nothing" sh -c "! grep -q ' 0% pruned' $scratch/stdout"
    check "no pruning" gpu $longer $data --set log_pruning_tolerance=null --out "$scratch/unpruned"
    check "says nothing of it" sh -c "! grep -q pruned $scratch/stdout"
    near 0.001 pruned unpruned
}

# The baseline through cuDNN's attention, if this build has it.
cudnn() {
    local baseline="$tiny --set fgate_type=none --set use_rope=true --attention cudnn"
    if ./train_foxcu $baseline $batches --dry-run 2>&1 | grep -q "built without cuDNN"; then
        dies "build it with USE_CUDNN=1, or use --attention fox" gpu $baseline $batches $data
        return
    fi
    check "--attention cudnn" gpu $baseline $batches $data --deterministic --shuffle --out "$scratch/cudnn"
    said "attention by cuDNN"
    near 0.02 cudnn no_gate
}

plans() {
    for model in fox-pro-125m transformer-llama-760m; do
        check "--dry-run $model" gpu --model $model --dry-run --data none --out "$scratch/dry"
        equals "" "$(cat "$scratch/stderr")"
        said "--recompute block  largest micro-batch that fits: "
        said '"hidden_size": '
    done
    check "nothing is made" test ! -e "$scratch/dry"

    check "--dry-run" gpu --model fox-pro-125m --dry-run --batch-tokens 4Mi
    local fits
    fits=$(awk '/--recompute none/ { print $(NF - 1) }' "$scratch/stdout")
    check "$fits sequences fit as promised" gpu --model fox-pro-125m --batch-tokens $((fits * 16384)) \
        --micro-batch "$fits" --recompute none --bench 1
    check "--bench" gpu $tiny $batches --bench 1
    said "1 steps of 2 x 48 tokens"
    said "matrix products"
    said "tokens/s"
    check "--bench of 128 channels a head" gpu $tiny --set num_heads=1 $batches --bench 1 --recompute block
    said "attention by"
    said "recompute block"
    check "without --out" gpu $tiny $batches $data --max-steps 1
    said "without --out DIR nothing of this run is kept" stderr
    check "--help" gpu --help
    said "--recompute none|qkv|block"
}

same_bits
resumed
with_the_cpu
texts
refused
not_finite
gates
pruned
cudnn
plans
report

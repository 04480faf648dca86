#!/usr/bin/env bash
# --resume: a run ends in the same bytes however often it is stopped, or resumed from an older checkpoint; what it keeps and
# what may change. And the files of a run: checkpoints and log.jsonl.
scratch=build/test/resume
. dev/test/resume/runs.sh

# ----------------------------------------------------------------------------

same_bits() {
    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive check "the same again, with two threads" run $long "$scratch/again"
    ends_same $long "$scratch/again" # and validation changes nothing
    check "another seed" run $short "$scratch/other" --seed 2
    differ "$scratch/other/step_00000020/model.safetensors" "$scratch/$short/step_00000020/model.safetensors"

    check "the weights drawn" run $short "$scratch/start" --max-steps 0
    equals 0 "$(checkpoints "$scratch/start")"
    check "to the end" resume "$scratch/start"
    ends_same $short "$scratch/start"
    check "stop" run $long "$scratch/stopped" --max-steps 7 --save-every 10 --keep 2
    equals 7 "$(checkpoints "$scratch/stopped")"
    check "and go on" resume "$scratch/stopped" --max-steps 75
    equals "70 75" "$(checkpoints "$scratch/stopped")"
    check "and to the end" resume "$scratch/stopped"
    equals "110 120" "$(checkpoints "$scratch/stopped")"
    ends_same $long "$scratch/stopped"
    check "the log" files same_steps "$scratch/stopped/log.jsonl" "$scratch/$long/log.jsonl"
}

# Layers of different kinds
stack() {
    local plain=$options
    options="$options --set num_hidden_layers=4 --set layer_types=deltanet,attention:window=5:rope,mamba2,hgrn2
        --set mamba2_state_size=8 --set document_reset=true"
    check "a stack of layers" run $short "$scratch/stack"
    check "stop" run $short "$scratch/stack_stopped" --max-steps 7
    check "and go on" resume "$scratch/stack_stopped"
    same_bytes 20 "$scratch/stack_stopped" "$scratch/stack"
    options=$plain
}

# --eval-every changes no bit of what is learnt, also where the run is stopped and resumed, and a signal ends it within an
# evaluation.
evaluated() {
    local of=$scratch/evaluated out=$scratch/evaluated/run endless
    mkdir "$of"
    printf '{"type":"%s}\n' 'score","context":"One","continuation":" two"' 'rolling","text":"A text of several windows."' \
        'generate","prompt":"a","max_tokens":9,"expected":"e"' >"$of/requests"
    check "with evaluations" run $short "$out" --eval-every 3 --val-data "$shards/val.bin" --eval-requests "$of/requests"
    equals "" "$(cat "$scratch/stderr")"
    ends_same $short "$out"
    equals 7 "$(grep -c '"event":"evaluation"' "$out/log.jsonl")"
    check "of requests alone" run $short "$out.requests" --eval-every 7 --eval-requests "$of/requests" --sample-every 2
    ends_same $short "$out.requests"
    check "of the loss alone" run $short "$out.loss" --eval-every 4 --val-data "$shards/val.bin" --max-steps 7
    check "is resumed with requests" resume "$out.loss" --eval-requests "$of/requests" --max-steps 13
    check "and with others" resume "$out.loss" --eval-every 1
    ends_same $short "$out.loss"
    steps_evaluated() { sed -n 's/.*"event":"evaluation","step":\([0-9]*\),.*/\1/p' "$1/log.jsonl" | paste -sd ' '; }
    equals "4 7 8 12 13 14 15 16 17 18 19 20" "$(steps_evaluated "$out.loss")"
    last() { sed -n '/"event":"evaluation","step":20/s/"ms":[^,]*,//p' "$1/log.jsonl"; }
    equals "$(last "$out")" "$(last "$out.loss")" # whatever was evaluated before

    # each would take minutes
    yes '{"type":"generate","prompt":"a","max_tokens":14}' | head -n 50000 >"$of/many"
    check "a long shard" "$python" -c "import sys; sys.path.insert(0, 'dev/test'); import cli_files as f
f.shard('$of/long.bin', f.tokens(4000, 257) * 1000, vocab=257)"
    for endless in "--eval-requests $of/many" "--val-data $of/long.bin --val-tokens 4M"; do
        rm -rf "$out"
        check "SIGTERM in an evaluation" files strike TERM 2 0 \
            "$trainer" $options --max-tokens $((short * 64)) --out "$out" --eval-every 2 $endless
        equals "75 2" "$(cat "$scratch/stdout") $(checkpoints "$out")"
        equals "" "$(steps_evaluated "$out")"
        check "make up for it" resume "$out" --val-every 0 --val-data "$shards/val.bin" --eval-requests "$of/requests" --max-steps 3
        equals "2 3" "$(steps_evaluated "$out")"
        check "go on" resume "$out" --eval-every 0 --val-every 0 --val-data "$shards/val.bin" --max-steps 19
        check "SIGTERM in the last one" files strike TERM 20 0 "$trainer" --resume --out "$out" --eval-every 2 $endless
        equals "75 20" "$(cat "$scratch/stdout") $(checkpoints "$out" | awk '{ print $NF }')"
        equals "2 3" "$(steps_evaluated "$out")"
        ends_same $short "$out"
    done
}

# kept WANT OPTION...: the checkpoints that a run of 20 steps leaves
kept() {
    rm -rf "$scratch/kept"
    check "${*:2}" run $short "$scratch/kept" "${@:2}"
    cp "$scratch/stdout" "$scratch/last"
    equals "$1" "$(checkpoints "$scratch/kept")"
}

# events OUT: texts of the log's last "resume" lines, from "at N tokens" on
events() { sed -n 's/.*"event":"resume",.*"text":"\(.*\)"}$/\1/p' "$1/log.jsonl" | tac | sed '/^at /q' | tac; }

# What a resumed run changes is said and logged; what would change nothing but the label of a run that is done is refused.
changed() {
    local out=$scratch/label
    check "half a run" run $short "$out" --max-steps 10
    check "the same command" run $short "$out" --max-steps 12 --resume
    equals "at 640 tokens" "$(events "$out")"
    cp "$shards/text.bin" "$scratch/moved.bin"
    check "other options" resume "$out" --lr 0.004 --micro-batch 4 --data "$scratch/moved.bin" --keep 2 --max-steps 16
    said "step 12/20  resume: lr 0.004 (was 0.002)"
    equals "at 768 tokens
data \\\"$scratch/moved.bin\\\" (was \\\"$shards/text.bin\\\")
micro-batch 4 (was 2)
lr 0.004 (was 0.002)
keep 2 (was 3)" "$(events "$out")"
    equals 3 "$(grep -c '"event":"run"' "$out/log.jsonl")"

    rm -rf "$scratch/before"
    cp -r "$out" "$scratch/before"
    dies "--weight-decay 0 (was 0.1): the run in $out is at step 16 of 20, at --max-steps 16, where nothing is left" \
        resume "$out" --weight-decay 0 --max-steps 16
    dies "--max-tokens 640 (was 1280): the run in $out is at step 16 of 16" resume "$out" --max-tokens 640
    dies "--data-changed: the run in $out is at step 16 of 20, at --max-steps 16" \
        resume "$out" --max-steps 16 --data "$shards/part_0.bin" --data-changed
    check "what changes no label" resume "$out" --max-steps 16 --keep 3 --data "$shards/text.bin" --log-every 7
    said "step 16/20  resume: keep 3 (was 2)"
    said "nothing left to do"
    check "nothing is written" diff -r "$out" "$scratch/before"
    check "held-out data" resume "$out" --max-steps 16 --val-data "$shards/val.bin" --val-tokens 16
    said "validation loss"
    equals "at 1024 tokens
val-data \\\"$shards/val.bin\\\" (was unset)
val-tokens 16 (was 128)" "$(events "$out")"
    check "other data" resume "$out" --data "$shards/part_0.bin" --data-changed --max-steps 17
    said "resume: other data than before (--data-changed)"
    differ "$out/log.jsonl" "$scratch/before/log.jsonl"
    check "an extension" resume "$out" --max-tokens 1344
    said "resume: max-tokens 1344 (was 1280)"
    equals 2 "$(grep '"event":"run"' "$out/log.jsonl" | sed 's/.*"data_fingerprint":"//; s/".*//' | sort -u | wc -l)"
}

# --init may name a run's folder: its newest checkpoint then. A resumed run keeps the one that it started from.
from_a_run() {
    local from=$scratch/teacher out=$scratch/pupil
    local start="--init $from --seq-len 16 --batch-tokens 64 --max-tokens 640 --data $shards/text.bin"
    check "a run" run $short "$from" --save-every 5 --max-steps 5
    check "starts from it" "$trainer" $start --out "$out" --max-steps 4
    said "$from/step_00000005: "
    check "goes on" "$trainer" --resume --out "$from"
    check "resumes" "$trainer" ${start/$from/$from/} --out "$out" --resume --max-steps 6
    rm -rf "$from/step_00000005"
    check "resumes without what it started from" "$trainer" $start --out "$out" --resume
    equals "at 384 tokens" "$(events "$out")"
    check "its record" grep -q "\"init\": \"$from/step_00000005\"" "$out/step_00000010/trainer.json"
    dies "--init $scratch/$short: the run in $out started from $from/step_00000005" \
        "$trainer" --init "$scratch/$short" --out "$out" --resume
    dies "--model fox-pro-nano: the run in $out started from $from/step_00000005" resume "$out" --model fox-pro-nano
    dies "of a model with another use_rope than the command line's; leave --model, --init and --set out, or choose" \
        "$trainer" $start --set use_rope=true --out "$out" --resume
    check "another starts from the newest" "$trainer" $start --out "$scratch/pupil2" --max-steps 1
    said "$from/step_00000020: "
    mkdir "$scratch/no_model"
    dies "--init $scratch/no_model: has no config.json" "$trainer" --init "$scratch/no_model" --dry-run
    touch "$scratch/no_model/log.jsonl"
    dies "--init $scratch/no_model: this run has no checkpoint yet" "$trainer" --init "$scratch/no_model" --dry-run
}

# A run goes on with longer rotations from a checkpoint of 16 tokens, and resumes with the same words.
rotations() {
    local base=$scratch/rotated plain=$scratch/unrotated start="--seq-len 64 --batch-tokens 64 --max-tokens 320 --data $shards/text.bin" out
    check "with RoPE" run $short "$plain" --set use_rope=true --max-steps 1
    for kind in ntk:4 yarn:4; do
        out=$base-${kind%:4}
        check "$kind" "$trainer" --init "$plain" $start --set rope_scaling=$kind --out "$out" --max-steps 2
        check "$kind goes on" "$trainer" --init "$plain" $start --set rope_scaling=$kind --out "$out" --resume --max-steps 3
        check "$kind.0 is the same" "$trainer" --init "$plain" $start --set rope_scaling=$kind.0 --out "$out" --resume --max-steps 3
        check "$kind goes on by itself" "$trainer" --out "$out" --resume --max-steps 4
    done
    check "the length of the training before" grep -q '"original_max_position_embeddings": 16' "$base-yarn/step_00000002/config.json"
    dies "--set rope_scaling=ntk:8: the run in $base-ntk began without it" \
        "$trainer" --init "$plain" $start --set rope_scaling=ntk:8 --out "$base-ntk" --resume
    dies "of a model with another rope_scaling than the command line's" \
        "$trainer" --init "$plain" $start --set rope_scaling=yarn:8 --out "$base-yarn" --resume
    check "ntk of a preset" run $short "$base" --set use_rope=true --set rope_scaling=ntk:4 --max-steps 1
    for out in "$base" "$base-ntk"; do
        check "ntk again" resume "$out" --set rope_scaling=ntk:4 --max-steps 4
        dies "--set rope_scaling=ntk:8: the run in $out began without it" resume "$out" --set rope_scaling=ntk:8
    done
    dies "of a model with another rope_base than the command line's" resume "$base" --set rope_base=123
    for kind in null yarn:8; do # of longer rotations: the length of the first training stays
        check "$kind" "$trainer" --init "$base-yarn" --dry-run config --set rope_scaling=$kind
    done
    said '"original_max_position_embeddings": 16'
}

# How a full gate was initialized is in trainer.json: the paper's code refuses it in config.json.
initialization() {
    local out=$scratch/initialized gate="--set fgate_bias_init=true --set decay_time_max=64" step kind
    check "a run" run $short "$out" $gate --save-every 5 --max-steps 10 --keep 0
    step=$out/step_00000010
    check "as the paper's code has it" grep -q '"fgate_bias_init": false' "$step/config.json"
    check "as the paper's code has it" grep -q '"decay_time_max": null' "$step/config.json"
    dies "of a model with another decay_time_max than the command line's" run $short "$out" $gate --resume --set decay_time_max=65
    dies "of a model with another fgate_bias_init than the command line's" "$trainer" $options --out "$out" --resume
    for kind in decay_time_max=65 num_heads=4; do # beside it the checkpoint's own model
        dies "of a model with another ${kind%=*} than the command line's" resume "$out" --set $kind
    done
    equals 10 "$(checkpoints "$out" | awk '{ print $NF }')"
    check "an item of --set" resume "$out" --set decay_time_max=64 --max-steps 11
    check "the same command" run $short "$out" $gate --resume
    check "uninterrupted" run $short "$scratch/uninterrupted" $gate
    same "$out/step_00000020/model.safetensors" "$scratch/uninterrupted/step_00000020/model.safetensors"
    check "the record" grep -q '"decay_time_max": 64' "$out/step_00000020/trainer.json"
}

# The tokenizer of the data is in every checkpoint; a bad one is refused before the first step.
tokenizers() {
    local data=$scratch/data/t out=$scratch/tokenizers model=${options/--data*/}
    mkdir -p "$scratch/data"
    cp "$shards/text.bin" "${data}_train_000000.bin"
    with_tokenizer() { "$trainer" $model --max-tokens $((short * 64)) --data "${data}_train_*.bin" --out "$@"; }
    echo '{"model": {"vocab": {"a": 0, "b": 256}}, "added_tokens": [{"id": 256, "content": "<end>"}]}' >"${data}_tokenizer.json"
    check "a tokenizer" with_tokenizer "$out" --max-steps 5
    same "$out/step_00000005/tokenizer.json" "${data}_tokenizer.json"
    check "its end of text" grep -q '"eos_token": "<end>"' "$out/step_00000005/tokenizer_config.json"
    mv "${data}_tokenizer.json" "$scratch/tokenizer.json"
    check "resume without it" resume "$out"
    for name in tokenizer.json tokenizer_config.json configuration_fox.py modeling_fox.py generation_config.json; do
        same "$out/step_00000020/$name" "$out/step_00000005/$name"
    done
    check "start from the checkpoint" "$trainer" --init "$out/step_00000020" --seq-len 16 --batch-tokens 64 \
        --data "${data}_train_*.bin" --max-tokens 64 --out "$scratch/from"
    same "$scratch/from/step_00000001/tokenizer.json" "$scratch/tokenizer.json"
    sed 's/"b": 256/"b": 257/' "$scratch/tokenizer.json" >"${data}_tokenizer.json"
    dies "t_tokenizer.json: has the token id 257, but the model's vocabulary has 257 tokens" with_tokenizer "$scratch/bad"
    check "no checkpoint" test ! -e "$scratch/bad/step_00000020"
}

# A trunk of constant learning rate, and a cool-down from one of its checkpoints as a run of its own
branches() {
    local trunk=$scratch/trunk branch=$scratch/branch wsd="--lr-schedule wsd --cooldown-tokens 512"
    check "a trunk" run 40 "$trunk" --lr-schedule constant --max-steps 16 --save-every 4 --keep 0
    check "20 steps with a cool-down from scratch" run $short "$scratch/whole" $wsd
    check "its plan" run $short "$branch" $wsd --resume-from "$trunk/step_00000012/" --dry-run
    said "12 of $trunk/step_00000012: 8 steps to train"
    check "from step 12 of the trunk" run $short "$branch" $wsd --resume-from "$trunk/step_00000012/" --max-steps 15
    equals 15 "$(checkpoints "$branch")"
    equals 1 "$(events "$branch" | grep -c '^lr-schedule .*wsd.* (was .*constant')"
    dies "--resume-from $trunk/step_00000008: the run in $branch began at $trunk/step_00000012/, which cannot change" \
        resume "$branch" --resume-from "$trunk/step_00000008"
    check "and resumed" resume "$branch" --resume-from "$trunk/step_00000012"
    same_bytes 20 "$branch" "$scratch/whole"
    check "it records its parent" grep -q "\"resume-from\": \"$trunk/step_00000012/\"" "$branch/step_00000020/trainer.json"
    equals "4 8 12 16" "$(checkpoints "$trunk")"
    check "one that would have begun before" run $short "$scratch/cooling" $wsd --resume-from "$trunk/step_00000016"
    said "at 1024 tokens, in a cool-down from 768 on: its learning rate falls at once; lower --cooldown-tokens to 256" stderr
    equals "" "$(run $short "$scratch/cooled" $wsd --cooldown-tokens 256 --resume-from "$trunk/step_00000016" 2>&1 >/dev/null)"
    check "stop before the cool-down" run $short "$scratch/uncooled" $wsd --max-steps 10
    check "go on without one, and with samples" resume "$scratch/uncooled" --lr-schedule constant --sample-every 4 --generate 3
    equals 1 "$(events "$scratch/uncooled" | grep -c '^cooldown-tokens unset (was 512)')"
    check "a longer training of the same kind" run $short "$scratch/longer" --lr-schedule linear
    check "beyond its end" resume "$scratch/longer" --max-tokens 1536 --max-steps 21
    said "at 1280 tokens the learning rate rises again, from 0.05 to 0.25 of --lr" stderr
    equals 1 "$(grep -c '"event":"warning","step":20,"text":"at 1280 tokens' "$scratch/longer/log.jsonl")"
    check "with a rate of 0" run $short "$scratch/still" --lr 0 --max-steps 5
    check "goes on" resume "$scratch/still"
    equals "" "$(cat "$scratch/stderr")"
    check "and on" resume "$scratch/longer"
    equals "" "$(cat "$scratch/stderr")"
    check "a cool-down of another kind" run 16 "$scratch/linear" --lr-schedule linear --lr-end 0.1 \
        --resume-from "$trunk/step_00000012"
}

# refused_branch MESSAGE OPTION...
refused_branch() {
    dies "$1" run $short "$scratch/refused" "${@:2}"
    check "no checkpoint" test ! -e "$scratch/refused/step_00000020"
}

branches_refused() {
    refused_branch "lies in the cool-down of its run, which began at 768 tokens" --resume-from "$scratch/branch/step_00000015"
    refused_branch "$scratch/trunk: not a checkpoint of a run, as in out/RUN/step_00001000" --resume-from "$scratch/trunk"
    refused_branch "step_00000099/trainer.json: cannot" --resume-from "$scratch/trunk/step_00000099"
    refused_branch "--seed 2: the run in $scratch/trunk/step_00000012 has 1" --resume-from "$scratch/trunk/step_00000012" --seed 2
    refused_branch "only a training begins where a checkpoint ends" --resume-from "$scratch/trunk/step_00000012" --bench 1
    dies "the run in $scratch/whole began without it; leave it out" resume "$scratch/whole" \
        --resume-from "$scratch/trunk/step_00000012"
    dies "holds checkpoints of a run already" run $short "$scratch/trunk" --resume-from "$scratch/trunk/step_00000012"
    cp -r "$scratch/trunk/step_00000012" "$scratch/step_00000012"
    printf x | dd of="$scratch/step_00000012/model.safetensors" bs=1 seek=2000 conv=notrunc status=none
    refused_branch "step_00000012/model.safetensors" --resume-from "$scratch/step_00000012"
}

# --skip-spikes: the weights are as if the step that is left out had not been, also where the run is stopped around it.
spikes() {
    local of=$scratch/spikes calm="--shuffle false --lr-schedule constant --data $shards"
    mkdir "$of"
    loss() { sed -n "s/.*\"event\":\"step\",\"step\":$2,.*\"loss\":\([^,]*\),.*/\1/p" "$of/$1/log.jsonl"; }
    check "a spike" run 171 "$of/skipped" $calm/spike.bin --skip-spikes 6
    equals "warning: step 151: left out, a spike" "$(cut -d: -f1-3 "$scratch/stderr")"
    check "the steps that are left out" files spikes "$of/skipped/log.jsonl" 6 1
    for stop in 151 $([[ $trainer = *sanitized ]] || echo 100 150 152); do
        check "stop" run 171 "$of/$stop" $calm/spike.bin --skip-spikes 6 --max-steps $stop
        [ -d "$of/bad" ] || cp -r "$of/$stop" "$of/bad"
        check "and go on" resume "$of/$stop"
        same "$of/$stop/step_00000171/model.safetensors" "$of/skipped/step_00000171/model.safetensors"
        check "the log" files same_steps "$of/$stop/log.jsonl" "$of/skipped/log.jsonl"
    done
    check "a checkpoint without a checksum" files unseal "$of/bad/step_00000151/trainer.json"
    sed -i 's/"grad_norms": \[[0-9.]*/"grad_norms": [-1/' "$of/bad/step_00000151/trainer.json"
    dies "step_00000151/trainer.json: 'grad_norms' is missing or not valid" "$trainer" --out "$of/worse" \
        --resume-from "$of/bad/step_00000151"
    dies "--skip-spikes" run 171 "$of/worse" --skip-spikes -1
    [[ $trainer != *sanitized ]] || return
    check "none" run 170 "$of/none" $calm/no_spike.bin --skip-spikes 6
    check "learnt from" run 171 "$of/learnt" $calm/spike.bin
    equals "" "$(cat "$scratch/stderr")"
    equals "$(loss learnt 151)" "$(loss skipped 151)"
    equals "$(loss none 151)" "$(loss skipped 152)"
    check "another loss" test "$(loss learnt 152)" != "$(loss skipped 152)"
    check "many" run 171 "$of/many" --skip-spikes 0.1
    check "the steps that are left out" files spikes "$of/many/log.jsonl" 0.1 20
}

left_behind() {
    kept "12 16 20" --save-every 4
    kept "4 8 12 16 20" --save-every 4 --keep 0
    kept "20" --save-every 4 --keep 1
    kept "6 12 18 20" --save-every 6 --keep 1Gi
    kept "20" --save-every 0
    kept "15 18 20" --save-every 3 --lr 0.03 --val-data "$shards/val.bin" --val-every 8 --sample-every 10 --log-every 7
    check "log.jsonl" files log "$scratch/kept/log.jsonl" 0.03 640 1280 64
    equals "1 7 14 20" "$(awk '/loss/ && /norm/ { split($2, a, "/"); printf sep a[1]; sep = " " }' "$scratch/last")"
}

each_trainer sizes uninterrupted same_bits stack evaluated changed from_a_run rotations initialization tokenizers branches branches_refused spikes left_behind

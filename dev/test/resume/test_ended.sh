#!/usr/bin/env bash
# What ends a run: kills, signals, closed pipes, damaged checkpoints, weights that are not finite, full disks, folders that are
# moved. It goes on to the same bytes, or is refused with one line.
scratch=build/test/ended
disk=$scratch/disk
unmount() { umount "$disk" 2>/dev/null; }
unmount
. dev/test/resume/runs.sh
trap unmount EXIT

# ----------------------------------------------------------------------------

killed() {
    local out=$scratch/killed
    RANDOM=22
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        newest=$(checkpoints "$out" 2>/dev/null | awk '{ print $NF + 0 }')
        check "kill" files strike KILL $((newest + 1 + RANDOM % 5)) $((RANDOM * 2)) \
            "$trainer" $options --max-tokens $((long * 64)) --out "$out" --save-every 2 --resume
        equals -9 "$(cat "$scratch/stdout")"
    done
    check "go on after ten kills" resume "$out" --save-every 5
    equals "110 115 120" "$(checkpoints "$out")"
    ends_same $long "$out"
    check "the log" files same_steps "$out/log.jsonl" "$scratch/$long/log.jsonl"
}

interrupted() {
    for signal in TERM INT; do
        local out=$scratch/$signal
        check "SIG$signal" files strike $signal 20 0 \
            "$trainer" $options --max-tokens $((long * 64)) --out "$out"
        equals 75 "$(cat "$scratch/stdout")"
        newest=$(checkpoints "$out")
        check "a checkpoint of the step it was in" test "$newest" -ge 20 -a "$newest" -lt $long
        check "go on after SIG$signal" resume "$out"
        equals "$newest $long" "$(checkpoints "$out")"
        ends_same $long "$out"
    done
    check "SIGTERM when all is done" files strike TERM $short 0 "$trainer" $options --max-tokens $((short * 64)) \
        --out "$scratch/late"
    equals 0 "$(cat "$scratch/stdout")"
    ends_same $short "$scratch/late"
}

# A closed stdout never costs a checkpoint: neither a pipe whose reader is gone, or is ended by Ctrl-C together with the
# trainer, nor a descriptor that was never open, whose number a file of the run could get.
stdout_closed() {
    local out=$scratch/no_reader
    run $short "$out" --save-every 5 --sample-every 4 2>"$scratch/stderr" | true
    equals "0 0" "${PIPESTATUS[*]}"
    ends_same $short "$out"

    out=$scratch/no_stdout
    run $short "$out" --save-every 5 >&- 2>&- <&-
    equals 0 $?
    equals "10 15 20" "$(checkpoints "$out")"
    ends_same $short "$out"
    check "the log" files same_steps "$out/log.jsonl" "$scratch/$short/log.jsonl"

    for _ in 1 2 3 4 5 6 7 8; do
        out=$scratch/ctrl_c
        rm -rf "$out"
        check "Ctrl-C behind a pipe" files strike_pipe INT 20 "$trainer" $options --max-tokens $((long * 64)) --out "$out"
        equals 75 "$(cat "$scratch/stdout")"
        newest=$(checkpoints "$out")
        check "a checkpoint of the step it was in" test "$newest" -ge 20 -a "$newest" -lt $long
    done
    check "go on after Ctrl-C" resume "$out"
    ends_same $long "$out"
}

# damage WHAT COMMAND...: in a folder with checkpoints 5 and 10, the command damages the later one
damage() {
    local what=$1 out=$scratch/damaged
    shift
    rm -rf "$out"
    cp -r "$scratch/$of" "$out"
    (cd "$out/step_00000010" && "$@")
    check "resume: $what" timeout 120 "$trainer" --resume --out "$out" --save-every 10
    equals 1 "$(grep -c '^warning: .*step_00000010.*; going back to the checkpoint before it$' "$scratch/stderr")"
    equals 1 "$(wc -l <"$scratch/stderr")"
    ends_same $short "$out"
    equals "5 10 20" "$(checkpoints "$out")"
}

damaged() {
    check "two checkpoints" run $short "$scratch/two" --save-every 5 --max-steps 10
    equals "5 10" "$(checkpoints "$scratch/two")"
    # without checksums, so that each file's own checks find the damage
    cp -r "$scratch/two" "$scratch/older"
    for step in 5 10; do check "without checksums" files unseal "$scratch/older/step_$(printf %08d $step)/trainer.json"; done
    local of=older
    damage "cut weights" truncate -s -1 model.safetensors
    damage "empty weights" truncate -s 0 model.safetensors
    damage "no weights" rm model.safetensors
    damage "weights of another model" cp "$PWD/dev/test/fixtures/model/fox-pro/model.safetensors" .
    damage "no optimizer" rm optimizer.safetensors
    damage "weights as the optimizer" cp model.safetensors optimizer.safetensors
    damage "no trainer.json" rm trainer.json
    damage "cut trainer.json" truncate -s 200 trainer.json
    damage "no tokens in trainer.json" sed -i 's/"tokens"/"tokns"/' trainer.json
    damage "a bad option in trainer.json" sed -i 's/"keep": 3/"keep": "many"/' trainer.json
    damage "empty config.json" truncate -s 0 config.json
    damage "another step" sed -i 's/"step": 10/"step": 9/' trainer.json
    damage "the checkpoint before under this name" cp ../step_00000005/trainer.json ../step_00000005/config.json \
        ../step_00000005/model.safetensors ../step_00000005/optimizer.safetensors .
    damage "an empty folder" rm config.json model.safetensors optimizer.safetensors trainer.json

    # a damaged checkpoint leaves none of the options that it records, whether config, options or weights are damaged
    local others='s/"keep": 3/"keep": 1/; s/"lr": [0-9.]*/"lr": 0.5/; s/"shuffle": true/"shuffle": false/
        s/"set": \[/&"num_layers=9",/; s|"data": "[^"]*"|"data": "nowhere"|; s/"max-tokens": [0-9]*/"max-tokens": 64/'
    damage "other options, empty config.json" sh -c 'sed -i "$1" trainer.json; truncate -s 0 config.json' - "$others"
    damage "other options, a bad one" sed -i "$others; s/\"seed\": 1,/\"seed\": \"one\",/" trainer.json
    damage "other options, a bad one at the end" sed -i "$others; s/\"deterministic\": false/\"deterministic\": 1/" trainer.json
    damage "other options, cut weights" sh -c 'sed -i "$1" trainer.json; truncate -s -1 model.safetensors' - "$others"
    damage "other options, no optimizer" sh -c 'sed -i "$1" trainer.json; rm optimizer.safetensors' - "$others"
    equals "$(grep -v 'save-every\|"trainer.json"' "$scratch/$short/step_00000020/trainer.json")" \
        "$(grep -v 'save-every\|"trainer.json"' "$scratch/damaged/step_00000020/trainer.json")"

    # any flipped bit, and options that are valid but not those of the run
    of=two
    for file in config.json trainer.json model.safetensors optimizer.safetensors; do
        for position in 0 0.37 0.61 0.83 1; do
            damage "a flipped bit at $position of $file" "$python" -S "$PWD/dev/test/cli_files.py" flip $file $position
            said "step_00000010/$file: " stderr
        done
    done
    damage "a pipe" sh -c "rm optimizer.safetensors; mkfifo optimizer.safetensors"
    damage "another learning rate" sed -i 's/"lr": [0-9.]*/"lr": 0.5/' trainer.json
    damage "no checksums" sed -i 's/"checksums"/"sums"/' trainer.json
    damage "another model" sed -i 's/"rope_base": 500000/"rope_base": 500001/' config.json

    local out=$scratch/damaged code=0
    rm -rf "$out"
    cp -r "$scratch/two" "$out"
    rm "$out/step_00000010/optimizer.safetensors"
    check "replace a damaged checkpoint" resume "$out" --max-steps 10
    equals "5 10" "$(checkpoints "$out")"
    check "by a complete one" diff -r "$out/step_00000010" "$scratch/two/step_00000010"

    rm "$out"/step_*/optimizer.safetensors
    resume "$out" >"$scratch/stdout" 2>"$scratch/stderr" || code=$?
    equals "1 3" "$code $(wc -l <"$scratch/stderr")"
    equals "error: $out: has 2 checkpoints, and none can be read; move them away to start anew" \
        "$(tail -n 1 "$scratch/stderr")"
    equals "step_00000010" "$(sed -n 's/^warning: .*\(step_0*[0-9]*\).*; going back to the checkpoint before it$/\1/p' "$scratch/stderr")"
    equals "5 10" "$(checkpoints "$out")"
}

# refused FILE TENSOR VALUE CONTAINS: a tensor of the later checkpoint has the value everywhere; it is not trained on
refused() {
    local of=older
    damage "$3 in $2" "$python" -S "$PWD/dev/test/cli_files.py" fill "$1" "$2" "$3"
    said "/$1: tensor '$2' contains $4, which is not a valid" stderr
}

not_finite() {
    local out=$scratch/nan weight=model.layers.0.attn.o_proj.weight code=0
    refused model.safetensors $weight nan nan
    refused model.safetensors model.embeddings.weight inf inf
    refused optimizer.safetensors exp_avg.$weight -inf -inf
    refused optimizer.safetensors exp_avg_sq.$weight nan nan
    refused optimizer.safetensors exp_avg_sq.$weight -1 -1

    cp -r "$scratch/older" "$out"
    for step in 5 10; do check "damage it" files nan "$out/step_$(printf %08d $step)/model.safetensors" $weight; done
    resume "$out" >"$scratch/stdout" 2>"$scratch/stderr" || code=$?
    equals "1 3" "$code $(wc -l <"$scratch/stderr")"
    said "$out: has 2 checkpoints, and none can be read" stderr
    equals "5 10" "$(checkpoints "$out")"
}

# Weights that are finite, but with which nothing can be learnt.
not_learning() {
    local start=$scratch/not_learning/step_00000000
    check "initial weights" run $short "$scratch/not_learning" --max-steps 0
    check "all 0" files fill "$start/model.safetensors" lm_head.weight 0
    check "all 0" files fill "$start/model.safetensors" model.norm.weight 0
    dies "step 1: the gradient is exactly 0 at a loss of 5.5" resume "$scratch/not_learning"
    check "too large to square" files fill "$start/model.safetensors" model.norm.weight 1
    check "too large to square" files fill "$start/model.safetensors" model.embeddings.weight 1e20
    dies "nan (first in the gradient of " resume "$scratch/not_learning"
    equals 0 "$(checkpoints "$scratch/not_learning")"
    check "large, but not too large" files fill "$start/model.safetensors" model.embeddings.weight 1e15
    check "trains" resume "$scratch/not_learning" --max-steps 1
}

# What would fail at the first save, or at the first resume, is refused at the start.
refused_at_the_start() {
    local latin1=$scratch/$'gr\xfcn' long=$scratch/long/
    mkdir -p "$latin1"
    cp "$shards/text.bin" "$latin1"
    local other=${options/--data*/}
    dies "--data: is not valid UTF-8" "$trainer" $other --data "$latin1/text.bin" --out "$scratch/latin1"
    dies "--val-data: is not valid UTF-8" run $short "$scratch/latin1" --val-data "$latin1/text.bin"
    equals "" "$(find "$scratch/latin1" -name '*step_*')"
    check "without a folder to resume from" "$trainer" $other --data "$latin1/text.bin" --max-tokens 64

    while [ ${#long} -lt 3800 ]; do long=$long$(printf 'x%.0s' $(seq 200))/; done
    long=$long$(printf 'y%.0s' $(seq $((4070 - ${#long}))))
    dies ": too long: names of checkpoints in it would exceed 4095 bytes" run $short "$long"
    check "no folder is made" test ! -e "$scratch/long"

    # more shards than the process may open, the soft limit of which it raises
    local many=$scratch/many i
    mkdir -p "$many"
    for i in $(seq 40); do # each with another first token
        cp "$shards/text.bin" "$many/$i.bin"
        printf "\\$(printf %o "$i")" | dd of="$many/$i.bin" bs=1 seek=1024 conv=notrunc status=none
    done
    few() { (ulimit "$1" 40 && "$trainer" $other --data "$many/*.bin" --max-tokens 640 --out "$many/$1"); }
    dies "open files at once" few -n
    said "raise its limit with ulimit -n" stderr
    check "no step" test ! -e "$many/-n/log.jsonl"
    check "raises its own limit" few -Sn

    mkdir -p "$scratch/pipe_log"
    mkfifo "$scratch/pipe_log/log.jsonl"
    dies "log.jsonl: is not a regular file" run $short "$scratch/pipe_log"

    # the shortest decay time: 1/T = 1000 overflows as exp(1/T)
    check "the fastest gate" run $short "$scratch/gate" --set fgate_bias_init=true --set decay_time_min=0.001 --max-steps 2
}

# full OUT COMMAND...: a run in OUT, resumed by the command, has no disk space for a second checkpoint
full() {
    local out=$1
    shift
    check "a first checkpoint" run $short "$out" --max-steps 5
    rm -rf "$scratch/first"
    cp -r "$out/step_00000005" "$scratch/first"
    dies "no checkpoint of step 10, older ones are unchanged" "$@" "$trainer" --resume --out "$out" --max-steps 10
    equals 5 "$(checkpoints "$out")"
    check "the first is as it was" diff -r "$out/step_00000005" "$scratch/first"
}

full_disk() {
    local of=$scratch/$short/step_00000020
    # in KiB: what the optimizer's file is larger than, and one and a half checkpoints
    local file=$(($(stat -c %s "$of/optimizer.safetensors") / 1024 - 1)) space=$(($(du -sk "$of" | cut -f1) * 3 / 2))
    full "$scratch/limited" bash -c "ulimit -f $file; exec \"\$@\"" -
    check "resume with enough space" resume "$scratch/limited"
    ends_same $short "$scratch/limited"

    mkdir -p "$disk"
    if ! mount -t tmpfs -o size=${space}k none "$disk" 2>/dev/null; then skip "a full disk: mount works only for root"; return; fi
    full "$disk/run" env
    check "more space" mount -o remount,size=2m "$disk"
    check "resume with enough space" resume "$disk/run"
    ends_same $short "$disk/run"
    unmount
}

# displaced OUT COMMAND...: a run of OUT ends with one line after the command, which runs at its step 5. Until then its
# stdout, a pipe, keeps it from reaching the end
displaced() {
    local out=$1 line pid code=0
    shift
    rm -f "$scratch/pipe"
    mkfifo "$scratch/pipe"
    "$trainer" $options --max-tokens $((5000 * 64)) --out "$out" --save-every 2500 >"$scratch/pipe" 2>"$scratch/stderr" &
    pid=$!
    exec 8<"$scratch/pipe"
    while read -r line <&8; do case $line in "step "*" 5/5000 "*) break ;; esac; done
    "$@"
    cat <&8 >/dev/null
    exec 8<&-
    wait $pid || code=$?
    equals "1 1" "$code $(wc -l <"$scratch/stderr")"
    said "error: --out $out: is no longer the folder of this run" stderr
}

# Folders that are moved or removed under a run, or lose their lock: the run changes nothing of what is there then.
moved_away() {
    local out=$scratch/place
    another() { { "$@" && run $short "$out" --save-every 5 --max-steps 10 && cp -r "$out" "$scratch/another"; } >"$scratch/log" 2>&1; }
    # another run, at its very start, seen by the first one when it is there
    begun() { kill -STOP "$pid" && rm -r "$out" && mkdir "$out" && : >"$out/lock" && kill -CONT "$pid"; }
    displaced "$out" begun
    equals lock "$(ls "$out")"
    for action in "mv $out $scratch/moved" "rm -r $out"; do
        rm -rf "$out" "$scratch/moved" "$scratch/another"
        displaced "$out" another $action
        [ -e "$scratch/another" ] || fail "another run after: $action: $(tail -n 1 "$scratch/log")"
        check "another run's folder after: $action" diff -r "$scratch/another" "$out"
        check "which goes on" resume "$out"
        ends_same $short "$out"
        rm -rf "$out"
        displaced "$out" $action
        check "no folder after: $action" test ! -e "$out"
    done
    displaced "$out" rm "$out/lock"
    equals "log.jsonl" "$(ls -A "$out")"
    check "the folder is free again" run $short "$out"
}

each_trainer sizes uninterrupted killed interrupted stdout_closed damaged not_finite not_learning refused_at_the_start full_disk moved_away

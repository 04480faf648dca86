#!/usr/bin/env bash
# Several ranks of the CPU trainer under mpirun: they train what one rank trains, save checkpoints that any number of
# ranks resumes, and leave together with one message, whatever ends one of them. TEST_ALL=1: also in double and with
# sanitizers, and several times as many runs are struck.
scratch=build/test/ranks
by_mpirun=yes
. dev/test/check.sh

disk=$scratch/disk
double=build/test/train_fox_double
sanitized=build/test/train_fox_sanitized
export OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 # MPI leaks
unset RANK WORLD_SIZE SLURM_PROCID

trap 'umount "$disk" 2>/dev/null' EXIT
ranks() { "$python" dev/test/trainer/ranks.py "$@"; }
make_files
shards=$PWD/$shards

launch="mpirun --bind-to none"
for program in ./train_fox $double $sanitized; do
    if ! command -v mpirun >/dev/null; then fail "mpirun is missing: scripts/setup.sh test"; report; fi
    if [ ! -x $program ]; then fail "$program is not built: make $program"; report; fi
    $launch -np 2 $program --nonsense 2>"$scratch/stderr"
    if ! grep -q 'no such option' "$scratch/stderr"; then
        fail "$program has no MPI: scripts/setup.sh test, then build it again"
        report
    fi
done

# Steps of 6 micro-batches of two sequences of 16 tokens
trainer=./train_fox
model="--model fox-pro-nano --set hidden_size=32 --set num_hidden_layers=1 --set num_heads=2
    --set intermediate_size=32 --seq-len 16 --batch-tokens 192 --warmup-tokens 640"
data="--shuffle --data $shards/text.bin"
short=20
long=250 # steps of a run that is struck

# Before a command whose ranks print where `ranks strike` reads, so that none gets far ahead of it
to_strike=(bash -c 'exec "$@" >"$RANKS_PY_STDOUT"' -)
start() { if [ "$1" != 0 ]; then echo "$launch -np $1"; fi; } # N ranks; 0: a process without mpirun
# each N COMMAND... : N COMMAND...: the first ranks, so many, have the one command, those behind them the next. mpirun
# takes colons, too, but that of OpenMPI 5.0.7 crashes on them
each() {
    local ranks=0 command
    : >"$scratch/each.sh"
    while [ $# -gt 0 ]; do
        ranks=$((ranks + $1)) command=
        shift
        for word; do
            [ "$word" != : ] || break
            command+=" $(printf %q "$word")"
            shift
        done
        echo "[ \$OMPI_COMM_WORLD_RANK -ge $ranks ] || exec$command" >>"$scratch/each.sh"
        [ $# = 0 ] || shift # the colon
    done
    timeout 60 $launch -np $ranks bash "$scratch/each.sh"
}
# run N STEPS OUT OPTION...
run() { $(start $1) $trainer $model $data --micro-batch 2 --max-tokens $(($2 * 192)) --out "${@:3}"; }
# resume N OUT OPTION...
resume() { $(start $1) $trainer --resume --out "${@:2}"; }
newest() { checkpoints "$1" 2>/dev/null | awk '{ print $NF + 0 }'; }

# one_line TEXT [FILE]: in all, our programs' stderr was this error
one_line() {
    own "$scratch/${2:-stderr}" >"$scratch/own"
    equals "1 line" "$(wc -l <"$scratch/own") line"
    equals "error: " "$(head -c 7 "$scratch/own")"
    said "$1" own
}

# ----------------------------------------------------------------------------

# numbers TOLERANCE N...: with the trainer set
numbers() {
    local tolerance=$1 out=$scratch/numbers n
    shift
    rm -rf "$out"
    check "one rank" run 0 $short "$out/alone" --val-data "$shards/part_2.bin" --val-every 8
    for n in "$@"; do
        check "$n ranks" run $n $short "$out/$n" --val-data "$shards/part_2.bin" --val-every 8
        case $n in
        1) ;;
        4 | 5) said "$n ranks with 1 to 2 micro-batches a step" ;;
        *) said "$n ranks with $((6 / n)) micro-batches a step" ;;
        esac
        equals "" "$(own "$scratch/stderr")"
        agree $short "$out/$n" "$out/alone" $tolerance
        equals 3 "$(grep -c '"validation"' "$out/$n/log.jsonl")"
        check "$n ranks again" run $n $short "$out/$n.again"
        same_bytes $short "$out/$n" "$out/$n.again"
    done
}

# saved_anywhere TOLERANCE: by two ranks, and resumed by another number. After --max-steps the schedule is that of the
# whole run.
saved_anywhere() {
    local out=$scratch/numbers n
    check "stop" run 2 $short "$out/saved" --max-steps 7 --val-data "$shards/part_2.bin" --val-every 8
    for n in 1 2 3 4; do
        rm -rf "$out/resumed"
        cp -r "$out/saved" "$out/resumed"
        check "go on with $n" resume $n "$out/resumed"
        agree $short "$out/resumed" "$out/alone" $1
    done
    check "go on with 2" resume 2 "$out/saved"
    same_bytes $short "$out/saved" "$out/2"
}

same_numbers() {
    numbers 1e-4 1 2 3 4 5
    same_bytes $short "$scratch/numbers/1" "$scratch/numbers/alone"
    saved_anywhere 1e-4
    check "two validation sequences on three ranks" run 3 $short "$scratch/few" --val-data "$shards/val.bin"
    check "on one" run 0 $short "$scratch/few_alone" --val-data "$shards/val.bin"
    agree $short "$scratch/few" "$scratch/few_alone" 1e-4
}

# With torchrun's variables gradients and weights go through the ranks' own connections, to the same numbers.
by_variables() {
    local rank pids n port out
    for n in 2 3; do
        pids=() out=$scratch/variables_$n port=$((20000 + $$ % 9000 + 10 * n))
        for ((rank = 0; rank < n; rank++)); do
            RANK=$rank WORLD_SIZE=$n LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$n MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
                timeout 60 $trainer $model $data --micro-batch 2 --max-tokens $((short * 192)) --out "$out" \
                --val-data "$shards/part_2.bin" --val-every 8 >/dev/null 2>"$scratch/rank_$rank" &
            pids+=($!)
        done
        for ((rank = 0; rank < n; rank++)); do check "rank $rank of $n" wait ${pids[rank]}; done
        equals "" "$(cat "$scratch"/rank_?)"
        agree $short "$out" "$scratch/numbers/alone" 1e-4
    done
    same_bytes $short "$scratch/variables_2" "$scratch/numbers/2"
}

# Two ranks take the memory of their plan, and that of the program itself.
planned() {
    local rank pids=() planned itself port=$((29100 + $$ % 900)) out=$scratch/planned
    local large="$model --set vocab_size=100000 --set hidden_size=64 --max-tokens 384 --micro-batch 2 $data --out $out"
    check "the plan of two ranks" $trainer --dry-run --ranks 2 $large
    planned=$(awk '$1 == "memory" { print $2 }' "$scratch/stdout")
    itself=$(ranks peak $trainer --version | tail -n 1)
    for rank in 0 1; do
        RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
            ranks peak timeout 60 $trainer $large >"$scratch/peak_$rank" 2>"$scratch/rank_$rank" &
        pids+=($!)
    done
    for rank in 0 1; do
        check "rank $rank" wait ${pids[rank]}
        check "its memory" awk -v room=$(awk "BEGIN { print $planned + $itself + 8 }") 'END { print $1, room; exit !($1 < room) }' \
            "$scratch/peak_$rank"
    done
}

# All ranks leave out the same step.
spikes() {
    local n spike="--shuffle false --batch-tokens 64 --data $shards/spike.bin --skip-spikes 6"
    for n in 0 2; do
        check "a spike on $n" run $n 57 "$scratch/spike_$n" $spike
        check "the steps that are left out" files spikes "$scratch/spike_$n/log.jsonl" 6 1
    done
    agree 171 "$scratch/spike_2" "$scratch/spike_0" 1e-4
}

# With the other builds, in the folders of same_numbers
other_builds() {
    [ "${TEST_ALL:-}" ] || return
    trainer=$double
    numbers 1e-10 1 2 3 5
    saved_anywhere 1e-10
    trainer=$sanitized
    numbers 1e-4 2 3
    saved_anywhere 1e-4
    trainer=./train_fox
}

# Rank 0 answers the requests of an evaluation, whose loss is that of all ranks.
evaluated() {
    local out=$scratch/evaluated n
    printf '{"type":"score","context":"a","continuation":"bc"}\n{"type":"generate","max_tokens":9,"prompt":"a"}\n' >"$scratch/requests"
    for n in 2 3; do
        check "$n ranks" run $n $short "$out/$n" --val-data "$shards/part_2.bin" --eval-every 8 --eval-requests "$scratch/requests"
        equals "" "$(own "$scratch/stderr")"
        same_bytes $short "$out/$n" "$scratch/numbers/$n"
        equals 3 "$(grep '"event":"evaluation"' "$out/$n/log.jsonl" | grep -c '"generate":{"requests":1,"tokens":9}')"
    done
    yes '{"type":"generate","prompt":"a","max_tokens":14}' | head -n 60000 >"$scratch/many"
    check "SIGUSR1 to mpirun in an evaluation" ranks strike USR1 mpirun 8 0 60 $launch -np 2 "${to_strike[@]}" $trainer $model $data \
        --micro-batch 2 --max-tokens $((short * 192)) --out "$out/struck" --eval-every 8 --eval-requests "$scratch/many"
    equals "75 0" "$(cat "$scratch/stdout") $(grep -c '"event":"evaluation"' "$out/struck/log.jsonl")"
    check "SIGUSR1 in the last one" ranks strike USR1 mpirun 8 0 60 $launch -np 2 "${to_strike[@]}" sh -c 'trap "" USR1; "$@"; echo $? >>"$0"' \
        "$scratch/codes" $trainer $model $data --micro-batch 2 --max-tokens 1536 --out "$out/last" --eval-every 8 \
        --eval-requests "$scratch/many"
    equals "75 75" "$(xargs <"$scratch/codes")"
    check "go on" resume 2 "$out/struck" --eval-every 0
    same_bytes $short "$out/struck" "$scratch/numbers/2"
    check "the loss of the evaluation" ranks evaluations "$out/2/log.jsonl" "$out/3/log.jsonl" 1e-4
    echo '{"type":"score"}' >>"$scratch/requests"
    run 2 $short "$out/bad" --eval-every 8 --eval-requests "$scratch/requests" 2>"$scratch/stderr" >"$scratch/stdout"
    equals 1 $?
    one_line "--eval-requests $scratch/requests: line 3: \"continuation\" is missing"
}

refused() {
    local tokens="--max-tokens 3840" plain="--model fox-pro-nano --seq-len 16"
    dies "13 ranks for the 12 sequences of a step" $launch -np 13 $trainer $model $data $tokens
    dies "4 micro-batches, too few for 5 ranks" $launch -np 5 $trainer $model $data $tokens --micro-batch 3
    dies "--nonsense: no such option" $launch -np 3 $trainer $model $data --nonsense
    dies "only training, --bench and --eval run on 2 ranks: start one process alone" \
        $launch -np 2 $trainer $model $data --dump "$scratch/dump"
    dies "only training, --bench and --eval run on 2 ranks: start one process alone" \
        $launch -np 2 $trainer $plain --requests "$scratch/requests"
    dies "--sequence-ranks 2: --generate, --requests, --maps and --dump run on one GPU: leave it out" \
        $launch -np 4 $trainer $plain --generate 3 --sequence-ranks 2
    for mode in "--requests x" "--maps x"; do
        # shellcheck disable=SC2086
        dies "--sequence-ranks 2: --generate, --requests, --maps and --dump run on one GPU: leave it out" \
            $trainer $plain $mode --sequence-ranks 2
    done
}

# ----------------------------------------------------------------------------
# differences

# odd EXPECTED OPTION...: rank 2 of 3 has these options more
odd() {
    local all="$model $data --micro-batch 2 --max-tokens 3840" expected=$1
    shift
    dies "$expected" each 2 $trainer $all : 1 $trainer $all "$@"
}

# elsewhere WHAT OPTION...: all ranks have the same options, but rank 2 of 3 works in another folder, where names
# stand for other files
elsewhere() {
    local all="$model --micro-batch 2 --max-tokens 3840 ${*:2}"
    dies "rank 2 ($(uname -n)) differs from other ranks in its $1" \
        each 2 env -C "$scratch/here" "$PWD/$trainer" $all : 1 env -C "$scratch/there" "$PWD/$trainer" $all
}

differences() {
    odd "rank 2 ($(uname -n)) differs from other ranks in its command line" --lr 0.01
    odd "differs from other ranks in its command line" --set num_heads=4
    odd "differs from other ranks in its command line" --out "$scratch/odd"
    odd "differs from other ranks in its command line" --bench 3
    odd "--nonsense: no such option" --nonsense
    dies "rank 1 (" each 1 $trainer $model $data --max-tokens 3840 : 1 $double $model $data --max-tokens 3840

    check "weights" run 0 $short "$scratch/one_start" --max-steps 1
    check "other weights" run 0 $short "$scratch/other_start" --max-steps 1 --seed 2
    mkdir -p "$scratch/here" "$scratch/there"
    cp "$shards/text.bin" "$scratch/here/data.bin" && cp "$shards/part_1.bin" "$scratch/there/data.bin"
    cp "$shards/text.bin" "$scratch/here/same.bin" && cp "$shards/text.bin" "$scratch/there/same.bin"
    cp -r "$(step "$scratch/one_start" 1)" "$scratch/here/init"
    cp -r "$(step "$scratch/other_start" 1)" "$scratch/there/init"
    elsewhere "shards in --data" --shuffle --data data.bin
    elsewhere "shards in --val-data" --shuffle --data same.bin --val-data data.bin
    local model="--init init --seq-len 16 --batch-tokens 192 --warmup-tokens 640"
    elsewhere "weights in --init" --shuffle --data same.bin
    sed -i 's/"rope_base": [0-9.]*/"rope_base": 10000.0/' "$scratch/there/init/config.json"
    elsewhere "model's configuration" --shuffle --data same.bin
}

# A rank that is another program, or ends at once, and a signal while ranks start. Within the timeout all others have to
# start, also on a busy machine.
not_together() {
    local all="$trainer $model $data --micro-batch 2 --max-tokens 3840 --timeout 6" odd code
    dies "rank 1 of 2 did not initialize MPI within 6 s" each 1 $all : 1 tail -f /dev/null
    # Once a rank has initialized MPI, mpirun ends all without a word as soon as one ends that has not
    for odd in "$trainer --help" true; do
        rm -f "$scratch/rank_1"
        dies "rank 1 of 2 did not initialize MPI within 6 s" each \
            1 bash -c 'until [ -s "$0" ] && ! kill -0 "$(cat "$0")" 2>/dev/null; do :; done; exec "$@"' "$scratch/rank_1" $all : \
            1 bash -c 'echo $$ >"$0"; exec "$@"' "$scratch/rank_1" $odd
    done
    dies "rank 0 of 3 did not initialize MPI within 6 s" each 1 tail -f /dev/null : 2 $all
    # while it waits in MPI_Init for rank 0, which begins after that
    all=${all% --timeout 6} code=0
    each 1 bash -c 'until grep -q "@train_fox $PMIX_NAMESPACE 1\$" /proc/net/unix; do :; done
        kill -USR1 "$(cat "$0")"; exec "$@"' "$scratch/rank_1" $all : \
        1 bash -c 'echo $$ >"$0"; exec "$@"' "$scratch/rank_1" $all >"$scratch/stdout" 2>"$scratch/stderr" || code=$?
    equals "75 1" "$code $(grep -c "^step" "$scratch/stdout")"
}

# Two runs in one folder, and other data than the checkpoint's.
folders() {
    local out=$scratch/locked
    ( # holds the lock, as the first run does, until dies has seen the second
        mkdir -p "$out"
        exec 9>"$out/lock"
        flock 9
        dies "another process is training here" run 3 $short "$out"
        exit $failed
    )
    if [ $? = $failed ]; then pass; else fail "two runs in one folder"; fi

    # moved away under a run that has long to go
    local line pid code=0
    out=$scratch/place
    mkfifo "$scratch/pipe"
    run 3 100000 "$out" --save-every 3 >"$scratch/pipe" 2>"$scratch/stderr" &
    pid=$!
    exec 8<"$scratch/pipe"
    while read -r line <&8; do case $line in "step "*" 5/100000 "*) break ;; esac; done
    mv "$out" "$scratch/moved"
    cat <&8 >/dev/null
    exec 8<&-
    wait $pid || code=$?
    equals 1 $code
    one_line "--out $out: is no longer the folder of this run"
    check "no other folder" test ! -e "$out"

    check "a run" run 2 $short "$scratch/changed" --max-steps 5
    dies "not the data that the run in $scratch/changed was trained on" \
        resume 3 "$scratch/changed" --data "$shards/part_1.bin"
    equals 5 "$(checkpoints "$scratch/changed")"
    check "on purpose" resume 3 "$scratch/changed" --data "$shards/part_1.bin" --data-changed
    equals "5 20" "$(checkpoints "$scratch/changed")"
}

# ----------------------------------------------------------------------------
# failures

# struck SIGNAL WHOM EVENT SPIN LIMIT N OUT OPTION...: the long run
struck() { ranks strike "${@:1:5}" $launch -np $6 "${to_strike[@]}" $trainer $model $data --micro-batch 2 \
    --max-tokens $((long * 192)) --out "${@:7}"; }

# trials ALL FEW: the numbers of the runs with and without TEST_ALL
trials() { if [ "${TEST_ALL:-}" ]; then seq "$1"; else seq "$2"; fi; }

references() {
    local n
    for n in 2 3 4; do check "$n ranks" run $n $long "$scratch/long_$n"; done
    for n in 0 3; do check "$n ranks" run $n $short "$scratch/short_$n"; done
}

# goes_on N OUT [OPTION...]: a run that has been struck, with the bytes of an uninterrupted one
goes_on() {
    check "go on" resume $1 "$2" --save-every 1000 "${@:3}"
    equals "" "$(own "$scratch/stderr")"
    same_bytes $long "$2" "$scratch/long_$1"
}

# Where a rank is killed mpirun kills the others after twice so many seconds, in which one of them prints its line.
killed() {
    local trial n victim event begin code
    local -x OMPI_MCA_odls_base_sigkill_timeout=3 PRTE_MCA_odls_base_sigkill_timeout=3
    RANDOM=7
    for trial in $(trials 20 5); do
        local out=$scratch/killed_$trial
        n=$((2 + trial % 3)) victim=$((RANDOM % (2 + trial % 3))) event=$((6 + RANDOM % 28 * 2))
        if [ $((trial % 2)) = 0 ]; then event=$out:$event; fi # while it is saved
        check "kill rank $victim of $n at $event" \
            struck KILL $victim $event $((RANDOM * 4)) 60 $n "$out" --save-every $((1 + trial % 4 / 2))
        code=$(cat "$scratch/stdout")
        one_line "rank $victim ("
        one_line "; continue with --resume"
        check "not a good end: $code" test "$code" -gt 0
        begin=$(newest "$out")
        check "checkpoints" test "$begin" -gt 0
        goes_on $n "$out"
        rm -rf "$out"
    done
}

# Several runs at a time, because they mostly wait. Within the timeout all of their ranks have to start.
stopped() {
    local trial round n
    RANDOM=8
    for round in $(trials 5 1); do
        local victims=() pids=()
        for trial in 0 1 2 3; do
            n=$((2 + RANDOM % 3)) victims[trial]=$((RANDOM % n))
            struck STOP ${victims[trial]} $((2 + RANDOM % 60)) $((RANDOM * 4)) 90 $n "$scratch/stopped_$trial" \
                --max-tokens 1e9 --timeout 8 >"$scratch/code_$trial" 2>"$scratch/stderr_$trial" &
            pids[trial]=$!
        done
        for trial in 0 1 2 3; do
            check "stop rank ${victims[trial]}" wait ${pids[trial]}
            equals 1 "$(cat "$scratch/code_$trial")"
            one_line "rank ${victims[trial]} (" stderr_$trial
            said "has been stopped or is unreachable" stderr_$trial
            rm -rf "$scratch/stopped_$trial"
        done
    done
}

orphaned() {
    local trial
    RANDOM=9
    for trial in $(trials 20 4); do
        local out=$scratch/orphaned n=$((2 + RANDOM % 3))
        rm -rf "$out"
        check "kill mpirun" struck KILL mpirun $((6 + RANDOM % 56)) $((RANDOM * 4)) 60 $n "$out" --save-every 2
        equals -9 "$(cat "$scratch/stdout")"
    done
    goes_on $n "$out"
}

# dies_and_keeps EXPECTED OUT COMMAND...: the command's run of several ranks ends with this error; the checkpoint of
# step 5 stays as it is
dies_and_keeps() {
    local out=$2
    rm -rf "$scratch/kept"
    cp -r "$(step "$out" 5)" "$scratch/kept"
    dies "$1" "${@:3}"
    equals 5 "$(checkpoints "$out")"
    check "it is as it was" diff -r "$(step "$out" 5)" "$scratch/kept"
}

data_error() {
    # Step 8 reads sequences 84 to 95, in order; of three ranks rank 1 reads 88 to 91.
    local out=$scratch/data_error all="$model --micro-batch 2 --max-tokens 3840 --shuffle false"
    check "a shard" ranks token "$shards/text.bin" "$scratch/high.bin" $((90 * 16 + 3)) 300
    check "stop" $launch -np 3 $trainer $all --data "$scratch/high.bin" --out "$out" --max-steps 5
    dies_and_keeps "rank 1 ($(uname -n)): $scratch/high.bin: " "$out" resume 3 "$out"
}

# The checkpoint in the making when an error of one rank ends the run is finished, and the run goes on from it.
error_while_saving() {
    local n out
    for n in 0 3; do
        out=$scratch/error_$n
        dies "high_id.bin: token 1000 has id 257" run $n $short "$out" --val-data "$shards/high_id.bin" --val-every 5 --val-tokens 1Mi \
            --save-every 5
        equals 5 "$(checkpoints "$out")"
        check "go on" resume $n "$out" --val-every 0 --val-data "$shards/val.bin"
        same_bytes $short "$out" "$scratch/short_$n"
    done
}

not_finite() {
    local out=$scratch/not_finite
    check "stop" run 3 $short "$out" --max-steps 5
    cp -r "$out" "$scratch/nan"
    dies_and_keeps "the weights were not updated; resume from the last checkpoint" "$out" \
        resume 3 "$out" --lr 1e3 --warmup-tokens 0

    out=$scratch/nan
    check "damage it" files nan "$(step "$out" 5)/model.safetensors" lm_head.weight
    local code=0
    resume 3 "$out" --save-every 1 >"$scratch/stdout" 2>"$scratch/stderr" || code=$?
    equals "1 2 5" "$code $(own "$scratch/stderr" | wc -l) $(checkpoints "$out")"
    said "has 1 checkpoint, and none can be read" stderr
    said "step_00000005/model.safetensors: tensor 'lm_head.weight' contains nan" stderr
    check "weights" run 0 $short "$scratch/nan_start" --max-steps 1
    check "damage them" files nan "$(step "$scratch/nan_start" 1)/model.safetensors" model.norm.weight
    dies "model.safetensors: tensor 'model.norm.weight' contains nan" $launch -np 3 $trainer --init "$(step "$scratch/nan_start" 1)" $data \
        --seq-len 16 --batch-tokens 192 --micro-batch 2 --max-tokens 3840 --out "$scratch/nan_end"
}

full_disk() {
    # The limit is the ranks' own: mpirun's files are larger. So are those of shared memory between ranks.
    local out=$scratch/limited limit='ulimit -f 150; exec "$@"'
    local one='if [ $OMPI_COMM_WORLD_RANK = 1 ]; then ulimit -f 150; fi; exec "$@"'
    check "a first checkpoint" run 3 $short "$out" --max-steps 5
    for text in "$limit" "$one"; do
        dies_and_keeps "File too large; no checkpoint of step 10, older ones are unchanged" "$out" \
            $launch --mca btl tcp,self --mca btl_tcp_if_include lo -np 3 bash -c "$text" - $trainer --resume --out "$out" --max-steps 10
    done
    check "with enough space" resume 3 "$out"
    same_bytes $short "$out" "$scratch/short_3"

    mkdir -p "$disk"
    if ! mount -t tmpfs -o size=500k none "$disk" 2>/dev/null; then skip "a full disk: mount works only for root"; return; fi
    out=$disk/run
    check "a first checkpoint" run 3 $short "$out" --max-steps 5
    dies_and_keeps "no checkpoint of step 10, older ones are unchanged" "$out" resume 3 "$out" --max-steps 10
    check "more space" mount -o remount,size=2m "$disk"
    check "with enough space" resume 3 "$out"
    same_bytes $short "$out" "$scratch/short_3"
    umount "$disk"
}

# ----------------------------------------------------------------------------
# the wish to stop

interrupted() {
    local whom signal n=2
    for strike in "USR1 mpirun" "TERM 1" "INT 1" "INT 0" ${TEST_ALL:+"USR1 0" "USR1 1" "TERM 0" "USR1 mpirun"}; do
        local out=$scratch/interrupted
        signal=${strike% *} whom=${strike#* }
        rm -rf "$out"
        check "SIG$signal to $whom" struck $signal $whom 20 0 60 $n "$out"
        equals 75 "$(cat "$scratch/stdout")"
        equals "" "$(own "$scratch/stderr")"
        [ "$strike" != "INT 0" ] || said "stopping all ranks after this step; mpirun may end them before" stderr
        check "a checkpoint" test "$(newest "$out")" -ge 20 -a "$(newest "$out")" -lt $long
        equals "$(newest "$out")" "$(grep -c '"event":"step"' "$out/log.jsonl")"
        goes_on $n "$out"
        n=$((n % 3 + 2))
    done
}

# Layers of different kinds, in double: HGRN2 in float makes much of how sums are rounded. In 20 steps rounding grows to
# 1.9e-9 (AVX-512), that of one rank with other micro-batches to 1.4e-9; half of the sequences change weights by 0.24
stack() {
    local plain=$model
    trainer=$double
    model="$model --set num_hidden_layers=5 --set mamba2_state_size=8 --set hgrn2_use_lower_bound=true
        --set layer_types=deltanet,attention:window=5,mamba2,hgrn2,gated_deltanet --set gated_deltanet_head_dim=8"
    numbers 1e-8 1 2 3
    same_bytes $short "$scratch/numbers/1" "$scratch/numbers/alone"
    model=$plain trainer=./train_fox
}

# ----------------------------------------------------------------------------
# Ranks 1 and 2 have a --out of their own, which stays empty.
not_shared() {
    local a=$scratch/host_a b=$scratch/host_b program=$PWD/$trainer n
    local all="$model $data --micro-batch 2 --out run --save-every 10"
    mkdir -p "$a" "$b"
    apart() { each 1 env -C "$a" $program "$@" : 2 env -C "$b" $program "$@"; }
    check "two folders" apart $all --max-tokens $((short * 192))
    same_bytes $short "$a/run" "$scratch/short_3"
    same_bytes 10 "$a/run" "$a/run" # it exists
    equals "" "$(find "$b" -name 'step_*' -o -name '.tmp-*')"

    rm -rf "$(step "$a/run" 20)"
    for n in 1 2 4; do
        rm -rf "$scratch/moved"
        cp -r "$a/run" "$scratch/moved"
        check "go on with $n" resume $n "$scratch/moved"
        check "weights" ranks close "$(step "$scratch/moved" $short)" "$(step "$scratch/short_0" $short)" 1e-4
    done
    check "go on in two folders" apart --resume --out run
    same_bytes $short "$a/run" "$scratch/short_3"
    equals "" "$(find "$b" -name 'step_*' -o -name '.tmp-*')"
}

same_numbers
by_variables
planned
spikes
evaluated
other_builds
refused
differences
not_together
folders
references
killed
stopped
orphaned
data_error
error_while_saving
not_finite
full_disk
interrupted
not_shared
stack
report

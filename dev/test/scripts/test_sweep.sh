#!/usr/bin/env bash
# scripts/sweep.sh: every run once, on the GPUs named; skips what is done, goes on where it was interrupted,
# and passes over what fails. With a program in the place of the trainer, and once with ./train_fox.
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/sweep
rm -rf $scratch
mkdir -p $scratch
. dev/test/check.sh

export CALLS=$scratch/calls READY=$scratch/ready
cat >$scratch/trainer <<'END'
#!/usr/bin/env bash
echo "GPU ${CUDA_VISIBLE_DEVICES:-none}: $*" >>"$CALLS"
out=$* out=${out#*--out } out=${out%% *}
mkdir "$out/training" || exit 4 # one process a folder
trap 'rmdir "$out/training"' EXIT
case $* in
*"--seed 8 "*) exit 3 ;;
*"--seed 9 "*)
    [ ! -p "$READY" ] || { # trains until it is interrupted
        mkfifo "$READY.$$"
        read -r <"$READY.$$" &
        trap 'kill $!; exit 75' USR1
        echo ready >"$READY"
        wait
    } ;;
esac
mkdir -p "$out/step_00000001" && echo "$*" >"$out/step_00000001/trainer.json"
END
chmod +x $scratch/trainer
sweep() { OUT=$scratch/$1 TRAINER=$scratch/trainer scripts/sweep.sh "${@:2}"; }
fails() { # fails CODE COMMAND...
    "${@:2}" >$scratch/stdout 2>$scratch/stderr
    equals "$1" $?
}

# every run once, the GPUs in use
export MODELS="a b" LRS="1e-3 2e-3" SEEDS="1 2" GPUS="0 3"
check "eight runs" sweep two --max-tokens 1k
equals "8 8" "$(wc -l <$CALLS) $(sort -u $CALLS | wc -l)"
equals "" "$(grep -v '^GPU [03]: ' $CALLS)"
equals "--model b --seed 2 --keep 1 --out $scratch/two/b_lr-2e-3_seed-2 --resume --lr 2e-3 --max-tokens 1k" \
    "$(grep -o -e '--model b --seed 2 .*2e-3 .*' $CALLS)"
# again: nothing to do; but another option or seed is
check "again" sweep two --max-tokens 1k
equals "8 8" "$(wc -l <$CALLS) $(grep -c '^done already: ' $scratch/stdout)"
check "another option" sweep two --max-tokens 2k
equals 16 "$(wc -l <$CALLS)"
SEEDS="1 3" check "another seed" sweep two --max-tokens 2k
equals 20 "$(wc -l <$CALLS)"
# nor is a run done that was resumed with other options, that has lost its checkpoint, or that had other data
one() { GPUS=0 MODELS=a LRS='' SEEDS=1 check "$1" sweep one --data "$scratch/d_[0-9],$scratch/e" --val-data=$scratch/v; }
calls() { equals "$1" "$(wc -l <$CALLS)"; }
echo 1 | tee $scratch/d_1 $scratch/e >$scratch/v
one "a run"
one "again"
calls 21
for file in d_1 e v; do
    echo more >>$scratch/$file
    one "more in $file"
    one "again"
done
calls 24
touch $scratch/d_2
one "a shard more"
calls 25
echo other >$scratch/one/a_lr-preset_seed-1/step_00000001/trainer.json
one "resumed by hand"
calls 26
rm -r $scratch/one/a_lr-preset_seed-1/step_00000001
one "no checkpoint"
one "again"
calls 27
# two sweeps on one folder: each run once, and neither fails
sweep both >$scratch/first 2>&1 &
check "the second of two" sweep both
wait $!
equals 0 $?
calls 35
equals "" "$(grep FAILED $scratch/first $scratch/stdout)"
( # a run that another sweep has comes last, when that has ended
    mkdir -p $scratch/busy/a_lr-1e-3_seed-1
    exec 8>$scratch/busy/a_lr-1e-3_seed-1/sweep.lock
    flock 8
    mkfifo $scratch/pipe
    GPUS=0 SEEDS=1 sweep busy >$scratch/pipe 8>&- &
    exec 7<$scratch/pipe
    while read -r line <&7; do
        echo "${line#*: $scratch/busy/}"
        case $line in waiting*) exec 8>&- ;; esac
    done
    wait $! || echo failed
) >$scratch/order
equals "b_lr-1e-3_seed-1 (0) a_lr-2e-3_seed-1 (0) b_lr-2e-3_seed-1 (0) a_lr-1e-3_seed-1 a_lr-1e-3_seed-1 (0)" \
    "$(xargs <$scratch/order)"
calls 39
for option in "--seed 1" --model=a "--out x" "--lr 1"; do LRS='' dies "${option%%[ =]*}: " sweep refused $option; done
calls 39
rm $CALLS
# a run that fails
SEEDS="8 1" GPUS=0 LRS='' fails 1 sweep failing
said "FAILED with exit code 3: $scratch/failing/a_lr-preset_seed-8/output.txt"
equals "" "$(grep -e --lr $scratch/failing/b_lr-preset_seed-1/done)"
SEEDS="8 1" GPUS=0 LRS='' fails 1 sweep failing
equals 6 "$(wc -l <$CALLS)" # those two that failed, again
# interrupted: the run gets SIGUSR1, and no other begins
mkfifo $READY
export SEEDS="9 1" LRS=1
GPUS=0 MODELS=a OUT=$scratch/stopped TRAINER=$scratch/trainer scripts/sweep.sh >$scratch/stdout &
sweeping=$!
read -r line <$READY
equals ready "$line"
kill -USR1 $sweeping
wait $sweeping
equals 75 $?
equals "a_lr-1_seed-9" "$(ls $scratch/stopped)"
rm $READY
GPUS=0 MODELS=a check "goes on" sweep stopped
equals "2" "$(ls $scratch/stopped/*/done | wc -l)"

dies "is not built" env TRAINER=$scratch/none scripts/sweep.sh
dies "MODELS is not set" env -u MODELS scripts/sweep.sh

# the trainer
check "data" data/text_to_shards --tokenizer byte --out $scratch/bytes llmc/base
export TRAINER=./train_fox GPUS='' LRS='' SEEDS="1 2" MODELS="fox-pro-nano transformer-llama-nano"
tiny="--set hidden_size=32 --set num_heads=2 --set num_hidden_layers=1 --seq-len 16 --batch-tokens 64"
data="--data $scratch/bytes_train_*.bin --val-data $scratch/bytes_train_*.bin --val-tokens 64"
check "train_fox" env OUT=$scratch/real scripts/sweep.sh $tiny $data --max-steps 3
equals 12 "$(cat $scratch/real/*/log.jsonl | grep -c '"event":"step"')"
check "compare them" python3 scripts/compare.py --no-plots $scratch/real/*
said "| fox-pro-nano "
said "|     2 |    192 |"
cp $scratch/stdout $scratch/table
fails 1 env OUT=$scratch/real scripts/sweep.sh $tiny $data --max-steps 3 --weight-decay 0
equals 4 "$(cat $scratch/real/*/output.txt | grep -c '^error: --weight-decay 0 (was 0.1): ')"
check "another decay changes nothing" python3 scripts/compare.py --no-plots $scratch/real/*
same $scratch/stdout $scratch/table
check "the same command" env OUT=$scratch/real scripts/sweep.sh $tiny $data --max-steps 3
equals 4 "$(grep -c '^done already: ' $scratch/stdout)"
report

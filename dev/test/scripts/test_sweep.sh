#!/usr/bin/env bash
# scripts/sweep.sh: every run once, on the GPUs named; skips what is done, goes on where it was interrupted,
# and passes over what fails; searches learning rates. With programs in the place of the trainer, and with ./train_fox.
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/sweep
. dev/test/check.sh
export OMP_NUM_THREADS=1 # threads of small models mostly wait for each other

export CALLS=$scratch/calls READY=$scratch/ready
cat >$scratch/trainer <<'END'
#!/usr/bin/env bash
case $* in *--help | --dry-run*) exit ;; esac
echo "GPU ${CUDA_VISIBLE_DEVICES:-none}: $*" >>"$CALLS"
out=$* out=${out#*--out } out=${out%% *}
mkdir "$out/training" || exit 4 # one process a folder
trap 'rmdir "$out/training"' EXIT
case $* in
*"--seed 8 "*)
    echo "error: no luck" >&2
    exit 3
    ;;
*"--seed 7 "*) kill -KILL $PPID ;; # the part of the sweep that has started it
*"--seed 6 "*)                     # the same, and trains on
    mkfifo "$out/never"
    read -r <>"$out/never" &
    trap 'kill $!; mkdir "$out/saved"; exit 75' USR1
    kill -KILL $PPID
    wait
    ;;
*"--seed 9 "*)
    [ ! -p "$READY" ] || { # trains until it is interrupted
        mkfifo "$READY.$$"
        read -r <"$READY.$$" &
        # the terminal and the sweep signal it: a trap within a trap can hang bash
        trap 'trap "" USR1 HUP; kill $!; head -c 256M /dev/zero | cksum; mkdir "$out/saved"; exit 75' USR1 HUP
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
# without a GPU, or where nvidia-smi fails, which it says on standard output, on the CPU
mkdir -p $scratch/smi/scripts && cp -r scripts/sweep.sh scripts/shell $scratch/smi/scripts
printf '#!/bin/sh\necho No devices were found\nexit 6\n' >$scratch/smi/nvidia-smi && chmod +x $scratch/smi/nvidia-smi
dies "./train_fox is not built" env -u GPUS -u CUDA_VISIBLE_DEVICES -C $scratch/smi PATH="$PWD/$scratch/smi:$PATH" scripts/sweep.sh
# again: nothing to do; but another option or seed is
check "again" sweep two --max-tokens 1k
equals "8 8" "$(wc -l <$CALLS) $(grep -c '^done already: ' $scratch/stdout)"
check "another option" sweep two --max-tokens 2k
equals 16 "$(wc -l <$CALLS)"
SEEDS="1 3" check "another seed" sweep two --max-tokens 2k
equals 20 "$(wc -l <$CALLS)"
# nor is a run done that was resumed with other options, that has lost its checkpoint, or that had other data
one() { GPUS=0 MODELS=a LRS='' SEEDS=1 check "$1" sweep one --data "$scratch/d_[0-9],$scratch/e" --val-data="$scratch/v[1]"; }
calls() { equals "$1" "$(wc -l <$CALLS)"; }
echo 1 | tee $scratch/d_1 $scratch/e $scratch/v1 >"$scratch/v[1]" # of which v1 is not read
one "a run"
one "again"
calls 21
for file in d_1 e "v[1]"; do
    echo more >>"$scratch/$file"
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
for option in "--seed 1" --model=a "--out x" "--lr 1" --dry-run --bench=2 "--dump x"; do
    LRS='' dies "${option%%[ =]*}: " sweep refused $option
done
calls 39
rm $CALLS
# a run that fails
SEEDS="8 1" GPUS=0 LRS='' fails 1 sweep failing
said "FAILED with exit code 3: $scratch/failing/a_lr-preset_seed-8/output.txt: error: no luck"
equals "" "$(grep -e --lr $scratch/failing/b_lr-preset_seed-1/done)"
SEEDS="8 1" GPUS=0 LRS='' fails 1 sweep failing
equals 6 "$(wc -l <$CALLS)" # those two that failed, again
# a part of the sweep is killed, as by a system without memory: what it has not trained is told
SEEDS="7 1" MODELS=a GPUS=0 LRS='' fails 1 sweep killed
for seed in 7 1; do said "NOT TRAINED: $scratch/killed/a_lr-preset_seed-$seed: the process that runs it was killed"; done
SEEDS="6 1" MODELS=a GPUS="0 1" LRS='' fails 1 sweep orphan
orphan=$scratch/orphan/a_lr-preset_seed-6
said "NOT TRAINED: $orphan: the process that runs it was killed; its trainer, process "
check "the trainer ends" flock -w 300 $orphan/sweep.lock true
check "and has saved" test -d $orphan/saved
SEEDS=" " dies "SEEDS is blank" sweep refused
SETS=$'\t' dies "SETS is blank" sweep refused
ROWS=' ' dies "ROWS is blank" scripts/sweep/ablations.sh
# nobody reads what it prints, which ends no run
cat >$scratch/unread.py <<'END'
import os, subprocess, sys
reading, writing = os.pipe()
os.close(reading)
sys.exit(subprocess.call(sys.argv[1:], stdout=writing))
END
SEEDS="1 2" MODELS=a GPUS=0 LRS='' OUT=$scratch/unread TRAINER=$scratch/trainer \
    check "a pipe that is closed" python3 $scratch/unread.py scripts/sweep.sh
equals "a_lr-preset_seed-1 a_lr-preset_seed-2" "$(cd $scratch/unread && ls -d */step_00000001 | xargs dirname | xargs)"
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
equals "$scratch/stopped/a_lr-1_seed-9/saved" "$(ls -d $scratch/stopped/*/saved)"
# Ctrl-C of a terminal, and its end, go to all processes of the sweep, which ends once the run has saved
for signal in INT QUIT HUP; do
    equals "75 a_lr-1_seed-9/saved" "$(GPUS=0 MODELS=a OUT=$scratch/$signal TRAINER=$scratch/trainer python3 - $signal <<'END'
import os, pathlib, signal, subprocess, sys
number = signal.Signals["SIG" + sys.argv[1]]
sweep = subprocess.Popen("scripts/sweep.sh", stdout=subprocess.DEVNULL, start_new_session=True,
                         preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
open(os.environ["READY"]).readline()
os.killpg(sweep.pid, number)
code, out = sweep.wait(), pathlib.Path(os.environ["OUT"])
print(code, *(path.relative_to(out) for path in out.glob("*/saved")))
END
    )"
done
rm $READY
GPUS=0 MODELS=a check "goes on" sweep stopped
equals "2" "$(ls $scratch/stopped/*/done | wc -l)"

# settings: in the command after the arguments, and in the folder's name
export LRS='' SEEDS=1 MODELS="a b,qk_norm=false" GPUS=0
SETS="preset num_heads=6,--weight-decay=0" check "settings" sweep sets --set num_heads=2
equals "a a_lr-preset_seed-1 --set num_heads=2
a a_num_heads-6+weight-decay-0_lr-preset_seed-1 --set num_heads=2 --set num_heads=6 --weight-decay=0
b b_qk_norm-false+num_heads-6+weight-decay-0_lr-preset_seed-1 --set num_heads=2 --set qk_norm=false --set num_heads=6 --weight-decay=0
b b_qk_norm-false_lr-preset_seed-1 --set num_heads=2 --set qk_norm=false" \
    "$(sed -n "s|.* --model \(.*\) --seed .* --out $scratch/sets/\(.*\) --resume |\1 \2 |p" $CALLS | sort)"
SETS="preset num_heads=6,--weight-decay=0" check "settings again" sweep sets --set num_heads=2
equals 4 "$(grep -c '^done already: ' $scratch/stdout)"
MODELS=base:a,qk_norm=false SETS="preset x=1" check "a name" sweep named
equals "base_lr-preset_seed-1 base_x-1_lr-preset_seed-1" "$(ls $scratch/named | xargs)"
equals 1 "$(grep -c -e "--model a --seed 1 --keep 1 --out $scratch/named/base_x-1_.* --resume --set qk_norm=false --set x=1$" $CALLS)"
# layer_types, whose pattern has commas, colons and a sign of equality
MODELS="a,layer_types=deltanet*3,attention:window=64,attention,num_heads=6 y:b" SETS="preset layer_types=attention:window=8:rope,mamba2,--lr-end=0" \
    check "layer_types" sweep kinds
equals "a a_layer_types-deltanetx3+attention.window-64+attention+num_heads-6+layer_types-attention.window-8.rope+mamba2+lr-end-0_lr-preset_seed-1 \
--set layer_types=deltanet*3,attention:window=64,attention --set num_heads=6 --set layer_types=attention:window=8:rope,mamba2 --lr-end=0
a a_layer_types-deltanetx3+attention.window-64+attention+num_heads-6_lr-preset_seed-1 \
--set layer_types=deltanet*3,attention:window=64,attention --set num_heads=6
b y_layer_types-attention.window-8.rope+mamba2+lr-end-0_lr-preset_seed-1 --set layer_types=attention:window=8:rope,mamba2 --lr-end=0
b y_lr-preset_seed-1" \
    "$(sed -n "s|.* --model \(.*\) --seed .* --out $scratch/kinds/\(.*\) --resume|\1 \2|p" $CALLS | sort)"
MODELS="x:a x:b" dies "x: the name of two models: b and a" sweep refused
SETS=use_rope dies "use_rope: not a setting" sweep refused
fails 1 env TMPDIR=$scratch/none OUT=$scratch/refused TRAINER=$scratch/trainer scripts/sweep.sh
grep -q "^error: no folder for temporary files: TMPDIR=$scratch/none$" $scratch/stderr || fail "TMPDIR: $(cat $scratch/stderr)"
SETS=--lr=1 dies "--lr: LRS names" sweep refused
MODELS=a,--seed=2 dies "--seed: SEEDS names" sweep refused
LRS="1e-3 2e-3 0.001" dies "LRS='1e-3 2e-3 0.001': has one rate twice" sweep refused
SETS=--val-data=x dies "--val-data=x: files are options of all runs" sweep refused
SETS=--init=x/y dies "--init=x/y: files are options of all runs" sweep refused
mkdir $scratch/taken && touch $scratch/taken/a_lr-preset_seed-1
LRS='' SEEDS=1 MODELS=a fails 1 sweep taken
equals "FAILED with exit code 1: $scratch/taken/a_lr-preset_seed-1/output.txt: cannot be written" "$(cat $scratch/stdout $scratch/stderr)"
KEEP=x TRAINER=./train_fox dies "--keep x: not a whole number" env OUT=$scratch/refused scripts/sweep.sh
TRAINER=./train_fox dies "--dtaa: no such option" env OUT=$scratch/refused scripts/sweep.sh --dtaa x
dies "error: OUT: $scratch/trainer/out: cannot be made" sweep trainer/out
for option in "--data $scratch/none_*.bin" "--val-data=$scratch/none_*.bin:0.5" "--data $scratch/none_*.bin:5e-1"; do
    dies "error: '$scratch/none_*.bin': no file matches" sweep refused $option
done
for refused in "b:fox-pr-nano|--model fox-pr-nano: no such preset (is fox-pro-nano meant?)" \
    "fox-pro-nano,use_rop=true|--set: no config key is called 'use_rop'" "fox-pro-nano,use_rope=2,--seq-len=64|--set: use_rope=2 is none of" \
    "fox-pro-nano,layer_types=deltanet,attenton|layer_types: no kind of layer is called 'attenton'" \
    "fox-pro-nano,num_heads=3|fox-pro-nano: hidden_size 100 is not a multiple of num_heads 3" \
    "fox-pro-nano,--seq-len=60|--batch-tokens 64: not a multiple of the 60 tokens of a sequence"; do
    dies "${refused#*|}" env TRAINER=./train_fox MODELS="a:fox-pro-nano ${refused%%|*}" OUT=$scratch/refused scripts/sweep.sh \
        --set hidden_size=100 --seq-len 16 --batch-tokens 64
done

# learning rates. A trainer whose held-out loss is that of the rate in $LOSSES, as is its training loss, or another one
# that follows a slash; which diverges at a rate that is not there
export LOSSES=$scratch/losses MODELS=a
rm $CALLS
cat >$scratch/learner <<'END'
#!/usr/bin/env bash
case $* in *--help | --dry-run*) exit ;; esac
out=$* out=${out#*--out } out=${out%% *}
lr=$* lr=${lr#*--lr } lr=${lr%% *}
echo "$lr ${out##*/}" >>"$CALLS"
loss=$(sed -n "s/^$lr //p" "$LOSSES")
case $loss in
wait) # trains until it is interrupted
    mkfifo "$READY.$$"
    read -r <"$READY.$$" &
    trap 'kill $!; exit 75' USR1
    echo ready >"$READY"
    wait
    ;;
crash) exit 3 ;;
'')
    echo "error: step 3: the loss is nan and the gradient norm nan (first in the weights of x)" >&2
    exit 1
    ;;
esac
mkdir -p "$out/step_00000001" && echo "$*" >"$out/step_00000001/trainer.json"
{
    echo '{"event":"run","step":0,"num_steps":40,"ranks":1,"started":"s","version":"v","device":"d",' \
        '"flops_per_token":1,"options":{},"config":{}}'
    for step in {1..40}; do # the last two are 5%, and no target of the first of them counts
        case $step in 40) at=${loss#*/} ;; 39) at=null ;; *) at=9 ;; esac
        echo '{"event":"step","step":'$step',"tokens":1,"loss":'$at',"ms":1,"tokens_per_s":1}'
    done
    [ -z "${loss%/*}" ] || echo '{"event":"validation","step":40,"val_loss":'"${loss%/*}"',"ms":1,"by_position":[]}'
} >"$out/log.jsonl"
END
chmod +x $scratch/learner
search() { OUT=$scratch/$1 TRAINER=$scratch/learner LRS="grid $2" scripts/sweep.sh "${@:3}"; }
losses() { printf '%s\n' "$@" >$LOSSES; }
rates() { cut -d' ' -f1 $CALLS | xargs; }
# upwards to where it diverges: the other seed at the chosen rate alone
losses "5e-4 5" "1e-3 4" "2e-3 3" "5e-3 2.5"
SEEDS="1 2" check "upwards" search up 1e-3
equals "5e-4 1e-3 2e-3 5e-3 1e-2 5e-3" "$(rates)"
said "diverged: $scratch/up/a_lr-1e-2_seed-1"
said "learning rate of a: 5e-3; held-out loss: 5e-4 5.0000, 1e-3 4.0000, 2e-3 3.0000, 5e-3 2.5000, 1e-2 diverged; $scratch/up/a_lr.json"
equals "a_lr-1e-2_seed-1 a_lr-1e-3_seed-1 a_lr-2e-3_seed-1 a_lr-5e-3_seed-1 a_lr-5e-3_seed-2 a_lr-5e-4_seed-1 a_lr.json" \
    "$(ls $scratch/up | xargs)"
equals '{"lr": 0.005, "measure": "held-out loss", "runs": [{"lr": 0.0005, "loss": 5}, {"lr": 0.001, "loss": 4}, {"lr": 0.002, "loss": 3}, {"lr": 0.005, "loss": 2.5}, {"lr": 0.01, "loss": null}]}' \
    "$(cat $scratch/up/a_lr.json)"
SEEDS="1 2 3" check "again, and another seed" search up 1e-3
equals "5e-3 a_lr-5e-3_seed-3" "$(sed 1,6d $CALLS)"
said "diverged already: $scratch/up/a_lr-1e-2_seed-1"
# with another option nothing is known
check "another option" search up 1e-3 --max-tokens 2k
equals "5e-4 1e-3 2e-3 5e-3 1e-2" "$(sed 1,7d $CALLS | cut -d' ' -f1 | xargs)"
# downwards, by the training loss where a run was not validated; on two GPUs, each setting apart, beside another search
rm $CALLS
losses "1e0 1/4" "5e-1 /3" "2e-1 1/2" "1e-1 1/1" "5e-2 1/1.5"
searches=()
for name in first second; do
    MODELS="a b,x=1" GPUS="0 3" SETS="preset use_rope=true" search down 0.5 >$scratch/$name 2>&1 &
    searches+=($!)
done
for job in "${searches[@]}"; do
    wait $job
    equals 0 $?
done
equals "20 20" "$(wc -l <$CALLS) $(sort -u $CALLS | wc -l)"
for name in a a_use_rope-true b_x-1 b_x-1+use_rope-true; do
    equals 0.1 "$(sed -n 's/^{"lr": \([^,]*\), "measure": "training loss".*/\1/p' $scratch/down/${name}_lr.json)"
done
# of equal ones the lowest rate is the best
rm $CALLS
losses "5e-4 3" "1e-3 2" "2e-3 2" "2e-4 1"
check "equal" search equal 1e-3
equals "5e-4 1e-3 2e-3" "$(rates)"
# a run that fails in another way decides nothing
losses "5e-4 3" "1e-3 crash" "2e-3 2"
fails 1 search crash 1e-3
said "FAILED with exit code 3: $scratch/crash/a_lr-1e-3_seed-1/output.txt"
said "no learning rate of a: a run failed"
equals "" "$(ls $scratch/crash/*.json 2>/dev/null)"
losses "5e-4 3" "1e-3 2" "2e-3 3"
rm $CALLS
check "goes on" search crash 1e-3
equals "1e-3" "$(rates)"
# nothing but divergence
: >$LOSSES
rm $CALLS
fails 1 search worst 1e-8
said "error: no learning rate is better than both of its neighbours: the best one of the grid is its edge, 1e-9" stderr
equals "5e-9 1e-8 2e-8 2e-9 1e-9" "$(rates)"
# interrupted
losses "5e-4 3" "1e-3 wait" "2e-3 2"
mkfifo $READY
OUT=$scratch/halted TRAINER=$scratch/learner LRS="grid 1e-3" scripts/sweep.sh >$scratch/stdout &
sweeping=$!
read -r line <$READY
kill -USR1 $sweeping
wait $sweeping
equals 75 $?
equals "a_lr-1e-3_seed-1 a_lr-5e-4_seed-1" "$(ls $scratch/halted | xargs)"
rm $READY
check "its usage" python3 scripts/sweep/learning_rate.py --help
dies "error: learning rate 3e-3: not of the grid" search refused 3e-3
dies "error: learning rate x: not a number" search refused x
LRS=grid dies "LRS='grid': a search has one start" sweep refused
dies "LRS='grid 1 2': a search has one start" search refused "1 2"

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
# from a checkpoint, which must be of the model, and may be gone by the time the same command goes on
branch="--resume-from $scratch/trunk/step_00000003 --max-steps 4"
cp -r $scratch/real/fox-pro-nano_lr-preset_seed-1 $scratch/trunk
dies "$scratch/trunk/step_00000003: is of a model with another qk_norm than the command line's" env SEEDS=1 \
    MODELS=fox-pro-nano,qk_norm=false OUT=$scratch/branches scripts/sweep.sh $tiny $data $branch
for time in first second; do
    check "branches" env SEEDS=1 MODELS=fox-pro-nano OUT=$scratch/branches scripts/sweep.sh $tiny $data $branch
    rm -rf $scratch/trunk
done
said "done already: "
# a search with it: the largest rates diverge
check "grid" env OUT=$scratch/grid SEEDS=1 MODELS=transformer-llama-nano LRS="grid 1e2" scripts/sweep.sh $tiny $data \
    --max-steps 8 --warmup-tokens 0 --grad-clip 1e9
said "learning rate of transformer-llama-nano: "
said "diverged: "

# scripts/sweep/ablations.sh: the rows are models of 360M parameters, the paper's
unset MODELS LRS SEEDS
cat >$scratch/plan <<'END'
#!/usr/bin/env bash
case $* in *--help | --dry-run*) exit ;; esac
options=()
for word; do
    case $word in --resume) ;; *) options+=("$word") ;; esac
done
./train_fox "${options[@]}" --dry-run | sed -n 's/^ *non-embedding *//p' >>"$CALLS"
END
chmod +x $scratch/plan
ablations() { env OUT=$scratch/$1 "${@:2}"; }
rm -f $CALLS
check "all rows" ablations rows TRAINER=$scratch/plan scripts/sweep/ablations.sh $data
equals 26 "$(wc -l <$CALLS)"
equals "" "$(awk '$1 < 355e6 || $1 > 370e6' $CALLS)"
equals "26 26" "$(ls $scratch/rows | wc -l) $(ls -d $scratch/rows/*_lr-preset_seed-1 | wc -l)"
equals "| fox-pro | - | - | 6.62 | - | - | - | - | - |" "$(grep '^| fox-pro  ' $scratch/stdout | tr -s ' ')"
# two of them trained, with two seeds, and the table: of another rate, an unfinished run and one not validated nothing
rows="fox-pro-no-qk-norm transformer-llama-no-rope"
small() { ablations small SIZE=nano EVAL="--seq-len 128 --val-tokens 256" ROWS="$rows" SEEDS="1 2" scripts/sweep/ablations.sh $tiny --data=$scratch/bytes_train_000000.bin "$@"; }
check "two rows" small --val-data "$scratch/bytes_train_*.bin" --val-tokens 64 --max-tokens 192
for row in $rows; do
    python3 - "$row" $scratch/small <<'END' >$scratch/wanted
import json, math, statistics, sys
runs = [map(json.loads, open(f"{sys.argv[2]}/{sys.argv[1]}_lr-preset_seed-{seed}/log.jsonl")) for seed in (1, 2)]
losses = [[line["val_loss"] for line in run if line["event"] == "validation"][-1] for run in runs]
values = [math.exp(loss) for loss in losses]
print(f"| {sys.argv[1]} | {statistics.fmean(values):.3f} | {statistics.stdev(values):.3f} |")
END
    equals "$(cat $scratch/wanted)" "$(grep "^| $row " $scratch/stdout | tr -s ' ' | cut -d'|' -f-4)|"
    paper=$(sed -n "s/^$row *\([0-9.]*\) .*/\1/p" scripts/sweep/ablations.sh)
    equals " $paper | 2 | 0.002 | 192 | 16 | CPU |" "$(grep "^| $row " $scratch/stdout | tr -s ' ' | cut -d'|' -f5-)"
done
set_of() { grep -o '"set":[^]]*' $scratch/small/$1_lr-preset_seed-1/log.jsonl; }
equals '"set":["hidden_size=32","num_heads=2","num_hidden_layers=1","qk_norm=false"' "$(set_of fox-pro-no-qk-norm)"
for seed in 1 2 3; do
    log=$scratch/small/transformer-llama-no-rope_lr-preset_seed-1/log.jsonl
    for other in lr-1 lr-3; do mkdir $scratch/small/transformer-llama-no-rope_${other}_seed-$seed; done
    sed '3,$d; s/"lr":0.002/"lr":1/' $log >$scratch/small/transformer-llama-no-rope_lr-1_seed-$seed/log.jsonl
    sed '/"validation"/d; s/"lr":0.002/"lr":3/' $log >$scratch/small/transformer-llama-no-rope_lr-3_seed-$seed/log.jsonl
done
cp $scratch/stdout $scratch/table
check "the same command" small --val-data "$scratch/bytes_train_*.bin" --val-tokens 64 --max-tokens 192
equals 4 "$(grep -c '^done already: ' $scratch/stdout)"
equals "$(grep '^|' $scratch/table)" "$(grep '^|' $scratch/stdout)"
fails 1 small --weight-decay 0 --max-tokens 192
said "| fox-pro-no-qk-norm "
dies "ROWS: no row fox; the rows are transformer-llama-no-rope transformer-llama fox" ablations none ROWS=fox scripts/sweep/ablations.sh
dies "SIZE=nano: give --data and --val-data" ablations none SIZE=nano scripts/sweep/ablations.sh
check "the table's usage" python3 scripts/sweep/perplexities.py --help
for rows in "" fox-pro; do
    dies "standard input: not lines of a name and the paper's perplexity" python3 scripts/sweep/perplexities.py "$scratch" <<<"$rows"
done
losses "1e-3 wait"
mkfifo $READY
TRAINER=$scratch/learner LRS=1e-3 ROWS=fox-pro OUT=$scratch/halted_rows scripts/sweep/ablations.sh $data >$scratch/stdout &
running=$!
read -r line <$READY
kill -USR1 $running
wait $running
equals "75 0" "$? $(grep -c '^|' $scratch/stdout)"
rm $READY
# scripts/sweep/lengths.sh, tokens.sh and sizes.sh: which rows there are, what is measured, and the picture
unset ROWS
figure() { env OUT=$scratch/$1 SIZE=nano SIZES=nano EVAL="--seq-len 128 --val-tokens 256" "${@:2}" $tiny $data --max-tokens 128; }
rows() { (cd $scratch/$1 && ls -d */eval.json | sed 's/_lr-preset_seed-1.*//' | xargs); }
check "lengths" figure lengths FAMILIES=fox-pro LENGTHS="16 32" scripts/sweep/lengths.sh
equals "fox-pro-nano_seq-len-16 fox-pro-nano_seq-len-32" "$(rows lengths)"
equals "2 2" "$(grep -c '^measuring: ' $scratch/stdout) $(grep -c '^| seq-len ' $scratch/stdout)"
if python3 -c 'import matplotlib' 2>/dev/null; then
    said "loss by position: $scratch/lengths/positions.svg"
    check "both are drawn" grep -q 'fox-pro-nano_seq-len-32' $scratch/lengths/positions.svg
else
    said "no picture without matplotlib"
    skip "no matplotlib: pictures of lengths.sh"
fi
check "again" figure lengths FAMILIES=fox-pro LENGTHS="16 32" scripts/sweep/lengths.sh
equals "2 0" "$(grep -c '^done already: ' $scratch/stdout) $(grep -c '^measuring: ' $scratch/stdout)"
check "tokens" figure tokens FAMILIES=transformer-llama TOKENS="64 128" scripts/sweep/tokens.sh
equals "transformer-llama-nano_max-tokens-128 transformer-llama-nano_max-tokens-64" "$(rows tokens)"
equals "64 128" "$(for n in 64 128; do sed -n 's/.*"event":"step".*"tokens":\([0-9]*\),.*/\1/p' \
    $scratch/tokens/*max-tokens-${n}_*/log.jsonl | tail -n 1; done | xargs)"
check "sizes" figure sizes scripts/sweep/sizes.sh
equals "fox-pro-nano transformer-pro-nano" "$(rows sizes)"
for script in lengths tokens; do dies "SIZE=nano: give --data" env SIZE=nano scripts/sweep/$script.sh; done
dies "SIZES=360m 760m: give --data" env SIZES="360m 760m" scripts/sweep/sizes.sh
dies "lengths/fox-pro-nano_seq-len-16_lr-preset_seed-1/eval.txt: error: '" \
    sh -c "touch -r / $scratch/lengths/*/eval.json; OUT=$scratch/lengths SIZE=nano FAMILIES=fox-pro LENGTHS=16 EVAL='--seq-len 9Mi' \
        scripts/sweep/lengths.sh $tiny $data --max-tokens 128"
# a wrong value: one line, before anything is trained
dies "error: --seq-len 0: " figure none EVAL="--seq-len 0" scripts/sweep/lengths.sh
dies "error: --seq-len 16x: " figure none LENGTHS="16x 32" scripts/sweep/lengths.sh
dies "error: --max-tokens x: " figure none TOKENS="64 x" scripts/sweep/tokens.sh
dies "error: --lr fast: " figure none LRS="1e-3 fast" scripts/sweep/sizes.sh
dies "error: --seed -1: " figure none SEEDS="1 -1" scripts/sweep/sizes.sh
for list in lengths:LENGTHS tokens:TOKENS sizes:SIZES lengths:FAMILIES; do
    dies "error: ${list#*:} is blank" figure none "${list#*:}= " scripts/sweep/${list%:*}.sh
done
dies "error: --model foxy-nano: no such preset" figure none FAMILIES="fox-pro foxy" LENGTHS=16 scripts/sweep/lengths.sh
dies "error: --model fox-pro-big: no such preset" figure none SIZES="nano big" scripts/sweep/sizes.sh
[ ! -e $scratch/none ] && pass || fail "a row was begun"
dies "not a multiple of the 4194304 tokens" figure none FAMILIES=fox-pro LENGTHS=4Mi scripts/sweep/lengths.sh # and no table
# without --data it is LongCrawl64
mkdir -p $scratch/bin $scratch/elsewhere/data
touch $scratch/elsewhere/data/longcrawl64_{train,val}_000000.bin
for program in bin/make elsewhere/data/longcrawl64 elsewhere/train_foxcu; do
    printf '#!/bin/sh\ncase $* in *--help | --dry-run*) exit ;; esac\necho "$*" >>%s\n' "$PWD/$scratch/recipe" >$scratch/$program && chmod +x $scratch/$program
done
check "LongCrawl64" env -u TRAINER -C $scratch/elsewhere PATH="$PWD/$scratch/bin:$PATH" GPUS=0 ROWS=fox-pro SOURCE=/copy \
    "$PWD/scripts/sweep/ablations.sh" --recompute qkv
split="--vocab dev/test/fixtures/gpt2/vocab.bpe --out data/longcrawl64 --source /copy"
equals "train_foxcu data/longcrawl64
--split train --tokens 7Gi $split
--split heldout --tokens 32Mi $split
--model fox-pro-360m --seed 1 --keep 1 --out out/ablations-360m/fox-pro_lr-preset_seed-1 --resume \
--data data/longcrawl64_train_*.bin --val-data data/longcrawl64_val_*.bin --val-every 2000 --val-tokens 8Mi --save-every 250 \
--log-every 10 --json-escape --recompute qkv" "$(cat $scratch/recipe)"
report

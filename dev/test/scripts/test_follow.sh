#!/usr/bin/env bash
# scripts/follow.py: what TensorBoard's own reader finds of a log that grows and of one that is done, and what
# the library of Weights & Biases is called with. PYTHON: a python with tensorboard.
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/follow
rm -rf $scratch
mkdir -p $scratch
. dev/test/check.sh
python=${PYTHON:-python3}
logs() { $python dev/test/scripts/logs.py "$@"; }
logs runs $scratch/runs || fail "logs"
r=$scratch/runs

# Weights & Biases, as its library is called
mkdir $scratch/fake
cat >$scratch/fake/wandb.py <<'END'
class Run:
    config = type("", (), {"update": lambda self, run, allow_val_change: print("run", run["seed"])})()
    def define_metric(self, name, step_metric): print("metric", name, step_metric)
    def log(self, values):
        print("log", values["step"], values.get("train/loss"), values.get("validation/val_loss"))
def init(project, name, resume, dir, id, reinit):
    print("init", project, name, resume)
    return Run()
END
check "wandb" env PYTHONPATH=$scratch/fake $python scripts/follow.py --wandb fox --once $r/transformer1
equals "init fox transformer1 allow;metric * step;run 1;log 1 12.5 None;" "$(head -n 4 $scratch/stdout |
    tr '\n' ';')"
equals "log 100 None 2.5" "$(tail -n 1 $scratch/stdout)"
check "nothing new" env PYTHONPATH=$scratch/fake $python scripts/follow.py --wandb fox --once $r/transformer1
equals 2 "$(wc -l <$scratch/stdout)"

if ! $python -c 'import tensorboard' 2>$scratch/stderr; then
    echo "follow.py is not tested: $(tail -n 1 $scratch/stderr)"
    report
fi
follow() { $python scripts/follow.py "$@"; }
log=$r/fox2/log.jsonl # the one that was resumed
bytes=$(wc -c <$log)
mkdir $scratch/live
for part in 3 2 1; do # the file as it grows, in the midst of lines
    logs cut $log $((bytes / part - 40 * (part > 1))) >$scratch/live/log.jsonl
    check "a part of the log" follow --once $scratch/live
done
check "events" logs events $scratch/live/tensorboard $log
check "nothing new" follow --once $scratch/live
check "no more events" logs events $scratch/live/tensorboard $log
check "until the end of two runs" timeout 300 $python scripts/follow.py $r/fox1 $r/fox3
check "events" logs events $r/fox3/tensorboard $r/fox3/log.jsonl
check "no log yet" follow --once $scratch/none
report

#!/usr/bin/env bash
# scripts/follow.py: what TensorBoard's own reader finds of a log that grows and of one that is done, and what
# the library of Weights & Biases is called with. PYTHON: a python with tensorboard.
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/follow
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

# tags LINE [CONFIG]: the tags of an evaluation, whose parts may be missing
tags() { PYTHONPATH=scripts $python -c 'import follow, common, json, sys
line, config = common.log_line("log", 1, sys.argv[1].encode()), json.loads(sys.argv[2])
print(*(f"{tag} {x:g}" for tag, x in sorted(follow.numbers(line, config).items())), sep=";")' "$1" "${2:-{\}}"; }
equals "evaluation/val_loss 2.5;perplexity/below_1024 7;perplexity/below_512 8;position/below_1 3;requests/generate_match 0.5;requests/score_greedy 0.25;requests/score_logprob -2;requests/score_requests 4" \
    "$(tags '{"event":"evaluation","step":3,"val_tokens":9,"val_loss":2.5,"ms":4,"by_position":[{"from":0,"to":1,"tokens":1,"loss":3}],
        "perplexity_by_length":{"512":8,"1024":7},"requests":{"score":{"requests":4,"logprob":-2,"greedy":0.25},
        "rolling":{"logprob":null},"generate":{"match":0.5},"errors":0}}')"
equals "" "$(tags '{"event":"evaluation","step":3,"ms":4}' 2>&1)"
equals "val_loss_of/a/*.bin 2;val_loss_of/b/*.bin 3;validation/val_loss 2.5" \
    "$(tags '{"event":"validation","step":3,"val_loss":2.5,"ms":4,"by_position":[],"val_loss_of":{"a/*.bin":2,"b/*.bin":3}}')"
# shares are of the layers with attention, by their numbers in the model
pruned='{"event":"step","step":3,"loss":1,"tokens":8,"ms":4,"tokens_per_s":2,"pruned_by_layer":[0.25,0.5]}'
of_layers() { tags "$pruned" "$@" | tr ';' '\n' | grep ^pruned/ | tr '\n' ';'; }
equals "pruned/layer_00 0.25;pruned/layer_01 0.5;" "$(of_layers)"
equals "pruned/layer_01 0.25;pruned/layer_03 0.5;" \
    "$(of_layers '{"layer_types":["mamba2","attention","mamba2","attention:window=9"]}')"
for part in '"ms":"4"' '"ms":4,"requests":[1]' '"ms":4,"perplexity_by_length":3' '"ms":4,"val_loss_of":3'; do
    tags "{\"event\":\"evaluation\",\"step\":3,$part}" 2>&1 | grep -q "BadLine: log: line 1: '" && pass || fail "$part is taken"
done
{
    sed -n 1p $r/transformer1/log.jsonl
    echo '{"event": "evaluation", "step": 1, "ms": 4, "val_loss": 3.5}'
} >$scratch/evaluated.jsonl
mkdir $scratch/evaluated && mv $scratch/evaluated.jsonl $scratch/evaluated/log.jsonl
check "an evaluation" env PYTHONPATH=$scratch/fake $python scripts/follow.py --wandb fox --once $scratch/evaluated
equals "log 1 None None" "$(tail -n 1 $scratch/stdout)"

# damaged lines are passed over, and named by their number in the file, also when the file was read in parts
mkdir $scratch/bad
bad=$scratch/bad/log.jsonl
wandb() { env PYTHONPATH=$scratch/fake $python scripts/follow.py --wandb fox --once $scratch/bad; }
warned() { equals "warning: $bad: line $1; it is passed over" "$(sed -n "$2p" $scratch/stderr)"; }
{
    sed -n 1,5p $r/transformer1/log.jsonl
    printf '[1]\n{"event": "note", "text": "\xff"}\n{"step": 5}\n{"event": "step", "step": 5}\n{"event": "step", "step\n'
} >$bad
check "damaged lines" wandb
equals "log 4 5.0 None" "$(tail -n 1 $scratch/stdout)"
equals 4 "$(wc -l <$scratch/stderr)"
warned "6: not a JSON object" 1
warned "7: not UTF-8" 2
warned "8: 'event' is missing or not of the kind that a run writes" 3
warned "9: 'tokens' is missing or not of the kind that a run writes" 4
sed '1!d; s/"started": "[^"]*"/"started": "now"/' $r/transformer1/log.jsonl >>$bad
sed -n '6,$p' $r/transformer1/log.jsonl >>$bad
check "the rest" wandb
warned "11: 'started' is not a time" 1
equals "log 5 4.5 None;log 100 None 2.5" "$(sed -n '3p;$p' $scratch/stdout | tr '\n' ';' | sed 's/;$//')"

dies "$scratch/none/log.jsonl: no such file" env PYTHONPATH=$scratch/fake $python scripts/follow.py --wandb fox --once $scratch/none \
    $r/fox1
said "init fox fox1 allow"
check "no folder" test ! -e $scratch/none

if ! $python -c 'import tensorboard' 2>$scratch/stderr; then
    skip "follow.py: $(tail -n 1 $scratch/stderr)"
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
equals "" "$(ls $scratch/live/tensorboard/events* | cut -d. -f4 | uniq -d)" # seconds: TensorBoard's order
check "events" logs events $scratch/live/tensorboard $log
check "nothing new" follow --once $scratch/live
check "no more events" logs events $scratch/live/tensorboard $log
check "until the end of two runs" timeout 300 $python scripts/follow.py $r/fox1 $r/fox3
check "events" logs events $r/fox3/tensorboard $r/fox3/log.jsonl
report

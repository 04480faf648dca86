#!/usr/bin/env bash
# dev/study: which runs are next, that they train and measure once and within the time, and what they leave, with the
# CPU trainer and models of a few thousand parameters; the tables of STUDY.md
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/study
. dev/test/check.sh
mkdir -p $scratch/results
export OMP_NUM_THREADS=1 # threads of small models mostly wait for each other
python=${PYTHON:-python3}

# documents of 256 bytes out of this project's own files, each folder a document's source
check "documents" data/text_to_shards --tokenizer byte --document folder --doc-len 256 --val-fraction 0.2 \
    --out $scratch/corpus llmc/attention/ llmc/cpu/ llmc/layers/ # few, so that results stay small
echo '{"name": "tiny"}' >$scratch/corpus.json
cat >$scratch/runs.txt <<'END'
# name minutes measures options
test needle_data --documents 12 --length 128 --pairs 2 --words 65,66/67/68 --vocab-size 257
test needle_train --seq-len 128 --batch-tokens 256 --max-tokens 1536 --warmup-tokens 256 --lr 3e-4 --lr-schedule linear --lr-end 0 --seed 1 --save-every 1 --val-every 0
test needle_score --words 65,66/67/68 --distractors 0,3 --gaps 32,128 --samples 2
every --set num_hidden_layers=1 --set hidden_size=16 --set num_heads=2 --seq-len 64 --batch-tokens 256 --max-tokens 2048 --warmup-tokens 256 --shuffle --val-every 4 --val-tokens 512
lr_fox-pro_1e-3   2 loss --model fox-pro-nano --seed 1 --lr 1e-3
lr_fox-pro_4e-3   2 loss --model fox-pro-nano --seed 1 --lr 4e-3
lr_fox-pro_1e-4   2 edge --model fox-pro-nano --seed 1 --lr 1e-4
lr_fox-pro_1e-2   2 edge --model fox-pro-nano --seed 1 --lr 1e-2
fox-pro_11        2 needle  --model fox-pro-nano --seed 11 --lr best:fox-pro
transformer_11  100 loss --model transformer-pro-nano --seed 11 --lr 1e-3
END
study() {
    $python dev/study/run.py --corpus $scratch/corpus --work $scratch/checkpoints --results $scratch/out \
        --trainer ./train_fox --runs $scratch/runs.txt --moments 4 --gpus cpu \
        --task-options '--samples 1 --segment 8 --gaps 64 --lengths 64 --targets 8' "$@"
}

# the trainer accepts the study's own runs, which are of the sizes that STUDY.md says
check "the study's runs" $python - <<'END'
import re, subprocess, sys
sys.path[:0] = ["dev/study", "scripts"]
import plan
for line in plan.read_lines("dev/study/runs.txt"):
    words = ["1e-3" if word.startswith(plan.BEST) else word for word in line.options]
    text = subprocess.run(["./train_fox", *words, "--dry-run"], capture_output=True, text=True)
    assert text.returncode == 0, (line.name, text.stderr)
    parameters = int(re.search(r"^parameters +(\d+)", text.stdout, re.M)[1])
    if task := plan.task_of(line):
        mqar = "mqar" in task
        size = "655360000 tokens: 10000 steps" if not mqar else "1048576000 tokens: 32000 steps" if "plain" in line.name \
            else "262144000 tokens: 8000 steps"
        width = int(re.search(r"d(64|128|256)$", line.name + "_d128" * line.name.startswith(("lr_", "mqar-fresh", "gate-mqar"))
                              + "_d256" * line.name.startswith(("over", "gate-over")))[1])
        least = {64: 1.17e6, 128: 2.6e6, 256: 5.8e6 if mqar else 7.6e6}[width]
        assert size in text.stdout and least < parameters < 1.05 * least, (line.name, parameters)
        continue
    size = ("134217728 tokens: 2048 steps", "8388608 tokens of warm-up") if plan.corpus_of(line) == "short" else \
        ("268435456 tokens: 4096 steps", "16777216 tokens of warm-up")
    assert all(part in text.stdout for part in size), line.name
    least = 160e6 if line.name.startswith("125m") else 64e6
    assert least < parameters < 1.25 * least, (line.name, parameters)
END

# nothing starts without time for it
check "no time" study --minutes 1.5
equals "" "$(cat $scratch/stdout)"
check "list" study --minutes 5 --list
equals "next next not not waits next" "$(awk '{ printf "%s%s", s, $4; s = " " }' $scratch/stdout)"
dies "has no run nope" study --minutes 5 nope
# broken() LINE: the study with a line more
broken() {
    { cat $scratch/runs.txt; echo "$1"; } >$scratch/broken.txt
    study --minutes 5 --list --runs $scratch/broken.txt
}
at="broken.txt: line $(($(wc -l <$scratch/runs.txt) + 1)):"
dies "$at not a name, minutes, measures and options" broken "x 2"
dies "$at most is not all, needle, loss, edge, short or task:DATA" broken "x 2 most"
dies "$at transformer_11 occurs twice" broken "transformer_11 2 loss"
for option in --model --lr --seed --seq-len; do
    dies "$at $option has no value" broken "x 2 loss $option"
    dies "$at $option has no value" broken "x 2 loss $option --shuffle"
    dies "$at $option has no value" broken "every $option"
done
for rate in "" "--lr fast" "--lr best:fox-pro"; do
    dies "$at a run lr_GROUP_* needs --lr, a number" broken "lr_fox-pro_x 2 loss --model fox-pro-nano $rate"
done
dies "nope.json: not there" study --minutes 5 --corpus nope
CUDA_VISIBLE_DEVICES= dies "is empty: name GPUs with --gpus" $python dev/study/run.py --minutes 5 --corpus $scratch/corpus \
    --work $scratch/checkpoints --results $scratch/out --trainer ./train_fox --runs $scratch/runs.txt
dies "--corpus PREFIX is missing" $python dev/study/run.py --minutes 5 --work $scratch/checkpoints --results $scratch/out \
    --trainer ./train_fox --runs $scratch/runs.txt

# a run that is stopped, here once another program was seen on its GPU, leaves its checkpoint, and the next command goes on from it; runs too long do not start
check "stopped" $python - $scratch <<'END'
import sys
from pathlib import Path
sys.path[:0] = ["dev/study", "scripts"]
import run
scratch = sys.argv[1]
sys.argv = ["run.py", "--minutes", "5", "--corpus", f"{scratch}/corpus", "--work", f"{scratch}/checkpoints", "--results",
            f"{scratch}/out", "--trainer", "./train_fox", "--runs", f"{scratch}/runs.txt", "--gpus", "cpu"]
study = run.Study(run.arguments())
line, words = study.take()
job = run.Job(study, line, [*words, "--max-steps", "4"], "cpu")
job.folder.mkdir(parents=True)
run.WATCH, run.programs_on, job.gpu = 0, lambda gpu: 1, "0"
job.train()
assert not job.shared.exists()
run.programs_on = lambda gpu: 2  # another program beside this one: the result says so
job.call(sys.executable, "-c", "")
(job.folder / "run.done").unlink()
repeat = run.Job(study, line._replace(name="fox-pro_11_repeat"), [*words, "--max-steps", "4"], "cpu")
repeat.folder.mkdir()
repeat.shared.touch()
try:
    repeat.run()  # its hours would not count: it is not kept
except run.Error as e:
    assert "another program used its GPU" in str(e) and not repeat.folder.exists(), e
    assert not list(study.options.results.glob("*repeat*"))
else:
    sys.exit("a repeat that was not alone is kept")
study.end = 0
try:
    run.Job(study, line, words, "cpu").run()
except run.Stopped:
    print("stopped with", *sorted(p.name for p in (job.folder / "run").glob("step_*")))
END
said "stopped with step_00000004"
check "learning rates" study --minutes 5 --later 20
said "running: lr_fox-pro_1e-3"
grep -q '^running: transformer_11' $scratch/stdout && fail "a run of 100 minutes"
equals "fox-pro_11 lr_fox-pro_1e-2 lr_fox-pro_1e-3 lr_fox-pro_4e-3" \
    "$(cd $scratch/out && echo *.json | sed 's/\.json//g')"
equals "data" "$(ls $scratch/checkpoints)"
check "done" study --minutes 5 --later 20
equals "" "$(cat $scratch/stdout)"

# moments are those of the options, wherever the run was stopped
mkdir -p $scratch/moments/step_000000{31,32,58,64}
check "moments" $python - $scratch/moments <<'END'
import sys
from pathlib import Path
sys.path[:0] = ["dev/study", "scripts"]
import run
assert [step for step, _ in run.checkpoints(Path(sys.argv[1]), 32)] == [32, 64]
END

# what a run leaves
check "results" $python - $scratch <<'END'
import json, sys
from pathlib import Path
sys.path[:0] = ["dev/study", "scripts"]
import plan
out = Path(sys.argv[1]) / "out"
load = lambda name: json.loads((out / f"{name}.json").read_text())
first, main = load("lr_fox-pro_1e-3"), load("fox-pro_11")
assert first["resumed"] == 1 and first["steps"] == 8 and first["corpus"] == "tiny", first
assert first["shared_gpu"] is True and "shared_gpu" not in main
assert [(v["step"], len(v["by_octave"])) for v in first["validations"]] == [(4, 7), (8, 7)] and "unpruned" not in first
rates = {name: load(name)["val_loss"] for name in ("lr_fox-pro_1e-3", "lr_fox-pro_4e-3", "lr_fox-pro_1e-2")}
best = min(rates, key=rates.get)
assert main["lr"] == float(best.rpartition("_")[2]), (main["lr"], rates)
assert main["missing"] == [], main["missing"]
assert main["seed"] == 11 and list(main["half_lives"]) == ["4", "8"], main
# ACP's rule prunes no more, here nothing; shares by layer at each moment
assert list(main["pruned_shares"]) == ["4", "8"] and len(main["pruned_shares"]["8"]) == 1, main
shares, acp = main["maps"]["pruned_share"][0], main["maps"]["pruned_share_acp"][0]
assert len(acp) == 2 and all(a <= b for a, b in zip(acp, shares)), (acp, shares)
needles = {task: plan.unpacked(means) for task, means in main["tasks"].items() if task.startswith("needle")}
assert list(needles) == ["needle_000", "needle_001", "needle_002", "needle_004"], list(needles)
assert [(p["distractors"], p["gap"], p["samples"]) for p in needles["needle_004"]] == \
    [(0, 32, 2), (0, 128, 2), (3, 32, 2), (3, 128, 2)], needles
assert needles["needle_000"] != needles["needle_004"]  # tuning changes the scores
assert len(main["half_lives"]["8"]) == 1 and len(main["half_lives"]["8"][0]) == 2
assert main["eval"]["seq_len"] == 64 and abs(main["unpruned"]["loss_mean"] - main["eval"]["loss_mean"]) < 1e-3
sizes = {name: len((out / f"{name}.json").read_bytes()) for name in (*rates, "fox-pro_11")}
assert max(sizes.values()) <= 30_000, (sizes, main["eval"]["sequences"])
END

# a Transformer is evaluated with a window of its training length, too, which on sequences of this length changes nothing,
# and with YaRN
printf '#!/bin/sh\necho "$@" >>%s\nexec ./train_fox "$@"\n' $scratch/calls >$scratch/recorded
chmod +x $scratch/recorded
check "a Transformer" study --minutes 5 --later 100 --trainer $scratch/recorded --rolled 7 transformer_11
equals 1 "$(grep -c -- '--roll 7' $scratch/calls)"
check "rolled documents" $python - $scratch/out/rolled <<'END'
import json, sys
plain, rolled = (json.load(open(f"{sys.argv[1]}/transformer_11{suffix}.json")) for suffix in ("", ".rolled"))
assert rolled["roll"] == 7 and "roll" not in plain and rolled["sequences"] == plain["sequences"]
assert rolled["loss"] != plain["loss"]
END
equals 1 "$(grep -c -- '--set window_size=64 --eval .*/window.json' $scratch/calls)"
equals 1 "$(grep -c -- '--set rope_scaling=yarn:1024 --eval .*/yarn.json' $scratch/calls)"
check "its window" $python - $scratch <<'END'
import json, sys
r = json.load(open(f"{sys.argv[1]}/out/transformer_11.json"))
assert r["missing"] == [] and r["window"]["loss_mean"] == r["eval"]["loss_mean"], r
assert r["yarn"]["loss_mean"] != r["eval"]["loss_mean"], r
END
rm $scratch/out/transformer_11.json

# at the study's size, 256 documents and everything measured, a result stays below 30 KB
check "size" $python - $scratch <<'END'
import json, sys
sys.path[:0] = ["dev/study", "scripts"]
import collect, plan
r = json.load(open(f"{sys.argv[1]}/out/fox-pro_11.json"))
heads = lambda life: [[life] * 8] * 8
points = lambda n, *names: plan.packed([dict(zip(names, (16384, 63, 32, 56.125, 12.345, -12.345, 1.234)))] * n)
r |= {"curve": [[4096, 2.3456, 0.123456, 0.512]] * 64, "pruned_by_layer": [0.512] * 8,
      "validations": [{"step": 4096, "hours": 0.123456, "loss": 2.34567, "by_octave": [2.3456] * 15}] * 8,
      "half_lives": {str(512 * k): heads(12.3) for k in range(8)}, "pruned_shares": {str(k): [0.512] * 8 for k in range(8)},
      "maps": {name: heads(0.123) for name in ("pruned_share", "effective_window", "pruned_share_acp")},
      "tasks": {name: points(n, "length", "x", "samples", "one", "one_error", "two", "two_error") for name, n in
                [("copy", 5), ("conflict", 10), ("corrupted", 7), *((f"needle_{k:03}", 12) for k in range(5))]}}
r["eval"] |= {"loss": collect.binned([2.3456] * 65536), "pruned": [0.512] * 8}
r["eval"]["documents"] |= {"loss": [[2.345] * 5] * 256, "last_loss": [[2.345] * 4] * 256}
size = len(collect.text_of(r))
assert 28_000 < size < 30_000, size
END

# a run that went on with another program is not one run
check "versions" $python - $scratch <<'END'
import json, sys
sys.path[:0] = ["dev/study", "scripts"]
import collect
from common import Error
log = f"{sys.argv[1]}/versions.jsonl"
start = {"event": "run", "step": 0, "num_steps": 8, "ranks": 1, "started": "", "version": "1", "device": "one",
         "flops_per_token": 1, "options": {}, "config": {}}
validation = {"event": "validation", "step": 4, "val_loss": 2, "ms": 1, "by_position": []}
for version, fits in ("1", True), ("2", False):
    with open(log, "w") as f:
        f.writelines(json.dumps(event) + "\n" for event in (start, validation, {**start, "version": version}, validation))
    try:
        collect.read_log(log)
        assert fits
    except Error as e:
        assert not fits and "went on with another program" in str(e), e
END

# needles: the answer stands so many tokens before the question, others behind other keys; every other document has none
check "needles" $python - $scratch <<'END'
import argparse, random, sys
sys.path[:0] = ["dev/study", "scripts"]
import needle
text = needle.Text(argparse.Namespace(data=f"{sys.argv[1]}/corpus_train_*.bin", words=[[65, 66], [67], [68]]))
for gap in (16, 100, 200):
    for distractors in (0, 1, 5):
        ids, answer = text.sample(random.Random(gap), distractors, gap)
        question = ids[-5:]
        places = [i for i in range(len(ids) - 4) if ids[i:i + 5] == question]
        assert question[:2] == [65, 66] and question[4:] == [67] and len(places) == 2, places
        at = places[0]
        assert ids[at + 5:at + 9] == [*answer, 68], (ids[at:at + 9], answer)
        behind = len(ids) - 5 - (at + 9)
        assert behind == gap or gap == 16 and distractors and behind > gap, (behind, gap)
        asked = [i for i in range(len(ids) - 8) if ids[i:i + 2] == [65, 66] and ids[i + 4] == 67 and ids[i + 8] == 68]
        assert len(asked) == 1 + distractors, (len(asked), distractors)
ids = text.document(random.Random(1), 256, 4)
assert len(ids) == 256
starts = [tuple(ids[i:i + 9]) for i in range(248) if ids[i:i + 2] == [65, 66] and ids[i + 4] == 67 and ids[i + 8] == 68]
assert len(starts) == 8 and len(set(starts)) == 4, starts  # each a second time, as question and answer
END

# a task from scratch: data that are drawn once, accuracy on data sets of its name, answers apart; no corpus
cat >$scratch/tasks.txt <<'END'
data over overwritten --seq-len 64 --keys 2:4 --rewrites 0:2 --tokens 8Ki --val-tokens 1Ki --seed 1
data over_T128 overwritten --seq-len 128 --keys 4 --rewrites 4 --tokens 1Ki --seed 2
data unused overwritten --seq-len 64 --keys 4 --rewrites 2 --tokens 1Ki --seed 3
test over_keys overwritten --lengths 64 --keys 2 --rewrites 0,1 --samples 1
every --set num_hidden_layers=1 --set hidden_size=16 --set num_heads=2 --set vocab_size=8192 --set bos_token_id=0 --set eos_token_id=0 --seq-len 64 --batch-tokens 256 --max-tokens 1024 --warmup-tokens 256 --shuffle --val-every 2 --val-tokens 1Ki
lr_over-fox-pro_1e-3 2 task:over --model fox-pro-nano --seed 1 --lr 1e-3
over-fox-pro_x 2 task:over --model fox-pro-nano --seed 1 --lr best:over-fox-pro
over-other 2 task:over --model fox-pro-nano --seed 1 --lr 1e-3
END
tasks() {
    $python dev/study/run.py --work $scratch/checkpoints --results $scratch/out --trainer ./train_fox --runs $scratch/tasks.txt \
        --gpus cpu,cpu --minutes 5 "$@"
}
dies "has no run nope*" tasks 'nope*'
sed 's/task:over /task:none /' $scratch/tasks.txt >$scratch/no_data.txt
dies "lr_over-fox-pro_1e-3: there is no line \`data none\`" tasks --runs $scratch/no_data.txt
if $python -c 'import numpy' 2>/dev/null; then
    check "tasks" tasks '*fox-pro*'
    check "results of tasks" $python - $scratch <<'END'
import json, math, sys
from pathlib import Path
sys.path[:0] = ["dev/study", "scripts"]
import from_scratch, plan
runs = Path(sys.argv[1], "tasks.txt")
results = {name: r for name, r in plan.read_results(Path(sys.argv[1], "out")).items() if "over" in name}
assert list(results) == ["lr_over-fox-pro_1e-3", "over-fox-pro_x"], list(results)
for r in results.values():
    assert r["missing"] == [] and r["lr"] == 1e-3 and "eval" not in r, r
    assert r["corpus"].startswith("overwritten --seq-len 64") and [v["step"] for v in r["validations"]] == [2, 4], r
    assert all(0 <= v["accuracy"] <= 1 and "by_octave" not in v for v in r["validations"])
    assert list(r["tests"]) == ["over_T128"] and r["tests"]["over_T128"]["targets"] == 8 * 4, r["tests"]
    assert [(p["keys"], p["rewrites"]) for p in plan.unpacked(r["tasks"]["over_keys"])] == [(2, 0), (2, 1)]
    assert "margin" not in plan.unpacked(r["tasks"]["over_keys"])[0]  # nothing is stale
    gates = r["gates"]
    assert [[len(head) for head in gates[name]] for name in ("bias", "mean", "sd")] == [[2], [2], [2]], gates
    for bias, mean, life in zip(gates["bias"][0], gates["mean"][0], r["half_lives"]["4"][0]):
        assert abs(bias) < 0.1 and abs(mean) < 0.1  # after four steps a gate is near sigmoid(bias)
        assert abs(life / (math.log(2) / math.log1p(math.exp(-bias - mean))) - 1) < 0.01, (bias, mean, life)
lines, data, tests = plan.read_lines(runs), plan.read_sets(runs, "data"), plan.read_sets(runs, "test")
rows = from_scratch.rows_of_task("over", lines, results, data)
below = [name for name in results if from_scratch.stays_below(results[name], ["over_T128"])]  # after four steps likely both
assert rows[0][-1] == "lowest of 1 test" and len(rows) == 4 - len(below) and rows[-1][:2] == ("1 run", from_scratch.NONE), rows
last = from_scratch.lines_of_task("over", lines, results, data)[-1]
assert not below or (last.startswith("Below 1% right everywhere") and last.endswith(f": {', '.join(below)}.")), last
assert [row[0] for row in from_scratch.rows_of_keys("over", lines, results, tests)[1:]] == ["no run that learned it yet"]

# runs that differ in the seed alone: accuracies as a range, the largest move of a bias from where it began
options = ["--model", "fox-pro-nano", "--set", "decay_time_min=2", "--seed"]
lines = [plan.Line(f"gate-over-T2_{seed}", 1, "task:over", [*options, seed]) for seed in "123"]
made = {line.name: {"validations": [{"step": 5 * n, "accuracy": n / 2}], "tests": {"over_T128": {"accuracy": n / 8}}, "lr": 0.5,
                    "steps": 8, "gates": {"bias": [[0.0, 1.0 - n]], "mean": [[None, n / 4]]}} for n, line in enumerate(lines, 1)}
assert abs(from_scratch.start_of(lines[0]) + math.log(math.expm1(0.5))) < 1e-12
_, row = from_scratch.rows_of_gates("over", lines, made, data)
assert row == ("gate-over-T2", 3, "never, 10, 15", "12.5 to 37.5", "2.43", "0.75"), row
made[lines[2].name] = {"diverged": "step 3: the loss is nan"}
_, row = from_scratch.rows_of_gates("over", lines, made, data)
assert row[1:4] == (3, "never, 10, diverged", "12.5 to 25.0") and row[4] == "1.43", row
_, row = from_scratch.rows_of_gates("over", lines, {}, data)
assert row[:2] == ("gate-over-T2", from_scratch.NONE), row
END
    equals "needle over over_T128" "$(cd $scratch/checkpoints/data && echo *.done | sed 's/\.done//g')"
    rm $scratch/out/*over*
else
    skip "tasks from scratch: no numpy"
fi

# packed documents: a stream with walls and without, then each held-out document alone; the corpus decides which runs fit
mkdir $scratch/short
check "a stream, and documents in rows" $python - $scratch <<'END'
import array, json, random, subprocess, sys
prefix, rng = f"{sys.argv[1]}/short/corpus", random.Random(1)
def write(prefix, documents, *options):
    command = ["data/ids_to_shards", "--out", prefix, "--tokenizer", f"{sys.argv[1]}/corpus_tokenizer.json", "--vocab-size", "257",
               "--end-of-text", "256", *options]
    records = b"".join(array.array("I", [kind, len(ids), *ids]).tobytes() for kind, ids in [*documents, (4, [])])
    subprocess.run(command, input=records, check=True)
write(prefix, [(2 + (n % 5 == 0), rng.choices(range(97, 123), k=rng.randrange(4, 40))) for n in range(300)])
rows = [[1 << 31 | 97 + i % 5 for i in range(size - 1)] + [1 << 31 | 256] + [256] * (64 - size) for size in (63, 20, 41)]
write(f"{prefix}_intact", [(2, row) for row in rows], "--doc-len", "64", "--masked")
open(f"{prefix}.json", "w").write(json.dumps({"name": "tiny stream", "kind": "short"}))
END
for name in fox transformer; do
    for walls in false true; do
        echo "short-$name-${walls}_11 2 short --model $name-pro-nano --set document_reset=$walls --seed 11 --lr 3e-3"
    done
done | cat <(grep -v ' 11 ' $scratch/runs.txt) - >$scratch/short.txt
short() { study --runs $scratch/short.txt --corpus $scratch/short/corpus --minutes 5 "$@"; }
dies "short/corpus: a corpus whose documents are short, which lr_fox-pro_1e-3 is not trained on" short lr_fox-pro_1e-3
dies "/corpus: a corpus whose documents are long, which short-fox-true_11 is not trained on" study --minutes 5 \
    --runs $scratch/short.txt short-fox-true_11
check "a list of those that fit" short --list
equals "4" "$(grep -c '^short-.* next$' $scratch/stdout)"
check "packed documents" short
equals "4" "$(grep -c '^done: short-' $scratch/stdout)"
check "their results" $python - $scratch <<'END'
import json, sys
from pathlib import Path
load = lambda name: json.loads(Path(sys.argv[1], f"out/short-{name}_11.json").read_text())
for name in ("fox", "transformer"):
    without, walls = load(f"{name}-false"), load(f"{name}-true")
    assert walls["config"]["document_reset"] is True and "document_reset" not in without["config"]
    assert without["validations"][0]["loss"] != walls["validations"][0]["loss"], name
    for r in (without, walls):
        found = r["intact"]
        assert r["corpus"] == "tiny stream" and "eval" not in r and r["missing"] == [], r
        assert found["targets"] == 63 + 20 + 41 and len(found["documents"]) == 3
        assert (found["octaves"], found["octave_targets"]) == ([1, 2, 4, 8, 16, 32, 64], [3, 3, 6, 12, 24, 36, 40])
        total = sum(n * loss for n, loss in zip((63, 20, 41), found["documents"]))
        assert abs(total / 124 - found["loss_mean"]) < 1e-3, found
        total = sum(n * loss for n, loss in zip(found["octave_targets"], found["by_octave"]))
        assert abs(total / 124 - found["loss_mean"]) < 1e-3, found
END
rm $scratch/out/short-*

# training beside other code: fox.py, on the same batches and at the same rates, has the losses of the run
beside() { # FAMILY
    local small="--seq-len 64 --batch-tokens 512 --shuffle false --data $scratch/stream_train_000000.bin"
    check "$1: start" ./train_fox --model "$1-nano" --set num_hidden_layers=2 --set hidden_size=64 $small --max-steps 1 --out $scratch/start
    check "$1: a run" ./train_fox --init $scratch/start/step_00000001 $small --micro-batch 4 --warmup-tokens 2048 --max-steps 12 \
        --out $scratch/one
    check "$1: beside it" $python dev/reference/train_beside.py $scratch/one --code reference --out $scratch/beside.json
    check "$1: differences" $python -c 'import json, sys
found = json.load(open(sys.argv[1]))["from_this_program"]
assert list(found) == ["fox.py, run 1", "fox.py, run 2"] and list(found["fox.py, run 1"]) == ["1-12"], found
assert all(most < 1e-3 for spans in found.values() for _, most in spans.values()), found' $scratch/beside.json
    rm -r $scratch/start $scratch/one
}
if $python -c 'import torch, safetensors' 2>/dev/null; then
    check "a stream" data/text_to_shards --tokenizer byte --out $scratch/stream llmc/layers/
    for family in fox-pro transformer-pro; do beside $family; done
    check "a shuffled run" ./train_fox --model fox-pro-nano --set num_hidden_layers=1 --set hidden_size=32 --seq-len 64 \
        --batch-tokens 512 --shuffle --data $scratch/stream_train_000000.bin --max-steps 1 --out $scratch/start
    dies "$scratch/start: did not begin with --init" $python dev/reference/train_beside.py $scratch/start --out $scratch/beside.json
else
    skip "training beside fox.py: no PyTorch"
fi

# --add takes nothing from a folder that is not there, or of what is no result, and files are text
cp dev/study/results.jsonl $scratch/kept.jsonl
add() { $python dev/study/report.py --no-pictures --page $scratch/page.md --results $scratch/kept.jsonl --add "$@"; }
cp dev/STUDY.md $scratch/page.md
dies "--add $scratch/none: not a folder" add $scratch/none
mkdir $scratch/added
echo '{"name": "lr_fox-pro_1e-3"}' >$scratch/added/lr_fox-pro_1e-3.json
dies "added/lr_fox-pro_1e-3.json: not the result of a run" add $scratch/added
same dev/study/results.jsonl $scratch/kept.jsonl
rm $scratch/added/*
printf '\xff\n' >$scratch/bytes.txt
dies "bytes.txt: is not UTF-8" add $scratch/added --runs $scratch/bytes.txt
dies "bytes.txt: is not UTF-8" add $scratch/added --page $scratch/bytes.txt

# tables; the page in the repository is what its results make
check "tables" $python dev/test/study/report.py $scratch/report
report_of() {
    cp dev/STUDY.md $scratch/page.md
    $python dev/study/report.py --page $scratch/page.md --pictures $scratch
}
check "the page" report_of
check "make study-report changes nothing" cmp dev/STUDY.md $scratch/page.md

# a program that fails: its last line, and the other runs go on
printf '#!/bin/sh\necho "error: broken" >&2\nexit 1\n' >$scratch/broken
chmod +x $scratch/broken
rm -r $scratch/out
dies "2 runs failed: lr_fox-pro_1e-3 lr_fox-pro_4e-3" study --minutes 5 --trainer $scratch/broken \
    lr_fox-pro_1e-3 lr_fox-pro_4e-3

# a learning rate at which the loss diverges is the worst of its group, and not run again
printf '#!/bin/sh\necho "error: step 3: the loss is nan and the gradient norm nan (first in x)" >&2\nexit 1\n' >$scratch/broken
check "a run that diverges" study --minutes 5 --trainer $scratch/broken lr_fox-pro_4e-3
check "its result" $python - $scratch <<'END'
import sys
sys.path[:0] = ["dev/study", "scripts"]
import plan
lines, results = plan.read_lines(f"{sys.argv[1]}/runs.txt"), plan.read_results(f"{sys.argv[1]}/out")
assert results["lr_fox-pro_4e-3"]["diverged"] == "step 3: the loss is nan and the gradient norm nan", results
results["lr_fox-pro_1e-3"] = {"val_loss": 5.0}
assert [line.name for line in plan.wanted("fox-pro", lines, results)] == ["lr_fox-pro_1e-4"]
results["lr_fox-pro_1e-4"] = {"val_loss": 5.5}
assert plan.best_lr("fox-pro", lines, results) == "1e-3"
END
report

#!/usr/bin/env bash
# dev/study: which runs are next, that they train and measure once and within the time, and what they leave, with the
# CPU trainer and models of a few thousand parameters; the tables of STUDY.md
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/study
rm -rf $scratch
mkdir -p $scratch/results
. dev/test/check.sh
python=${PYTHON:-python3}

# documents of 256 bytes out of this project's own files, each folder a document's source
check "documents" data/text_to_shards --tokenizer byte --document folder --doc-len 256 --val-fraction 0.2 \
    --out $scratch/corpus llmc/*/
echo '{"name": "tiny"}' >$scratch/corpus.json
cat >$scratch/runs.txt <<'END'
# name minutes measures options
every --set num_hidden_layers=1 --set hidden_size=16 --set num_heads=2 --seq-len 64 --batch-tokens 256 --max-tokens 2048 --warmup-tokens 256 --shuffle --val-every 4 --val-tokens 512
lr_fox-pro_1e-3   2 loss --model fox-pro-nano --seed 1 --lr 1e-3
lr_fox-pro_4e-3   2 loss --model fox-pro-nano --seed 1 --lr 4e-3
lr_fox-pro_1e-4   2 edge --model fox-pro-nano --seed 1 --lr 1e-4
lr_fox-pro_1e-2   2 edge --model fox-pro-nano --seed 1 --lr 1e-2
fox-pro_11        2 all  --model fox-pro-nano --seed 11 --lr best:fox-pro
transformer_11  100 loss --model transformer-pro-nano --seed 11 --lr 1e-3
END
study() {
    $python dev/study/run.py --corpus $scratch/corpus --work $scratch/work --results $scratch/out \
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
    assert "268435456 tokens: 4096 steps" in text.stdout and "16777216 tokens of warm-up" in text.stdout, line.name
    parameters = int(re.search(r"^parameters +(\d+)", text.stdout, re.M)[1])
    assert 64e6 < parameters < 79e6, (line.name, parameters)
END

# nothing starts without time for it
check "no time" study --minutes 1.5
equals "" "$(cat $scratch/stdout)"
check "list" study --minutes 5 --list
equals "next next not not waits next" "$(awk '{ printf "%s%s", s, $4; s = " " }' $scratch/stdout)"
dies "has no run nope" study --minutes 5 nope
dies "nope.json: not there" study --minutes 5 --corpus nope

# a run that is stopped leaves its checkpoint, and the next command goes on from it; runs too long do not start
check "stopped" $python - $scratch <<'END'
import sys
from pathlib import Path
sys.path[:0] = ["dev/study", "scripts"]
import run
scratch = sys.argv[1]
sys.argv = ["run.py", "--minutes", "5", "--corpus", f"{scratch}/corpus", "--work", f"{scratch}/work", "--results",
            f"{scratch}/out", "--trainer", "./train_fox", "--runs", f"{scratch}/runs.txt", "--gpus", "cpu"]
study = run.Study(run.arguments())
line, words = study.take()
job = run.Job(study, line, [*words, "--max-steps", "4"], "cpu")
job.folder.mkdir(parents=True)
job.train()
(job.folder / "run.done").unlink()
study.end = 0
try:
    run.Job(study, line, words, "cpu").run()
except run.Stopped:
    print("stopped with", *sorted(p.name for p in (job.folder / "run").glob("step_*")))
END
said "stopped with step_00000004"
check "learning rates" study --minutes 5 --later 20
said "running: lr_fox-pro_1e-3"
grep -q '^transformer_11' $scratch/stdout && fail "a run of 100 minutes"
equals "fox-pro_11 lr_fox-pro_1e-2 lr_fox-pro_1e-3 lr_fox-pro_4e-3" \
    "$(cd $scratch/out && echo *.json | sed 's/\.json//g')"
equals "" "$(ls $scratch/work)"
check "done" study --minutes 5 --later 20
equals "" "$(cat $scratch/stdout)"

# what a run leaves
check "results" $python - $scratch <<'END'
import json, sys
from pathlib import Path
out = Path(sys.argv[1]) / "out"
load = lambda name: json.loads((out / f"{name}.json").read_text())
first, main = load("lr_fox-pro_1e-3"), load("fox-pro_11")
assert first["resumed"] == 1 and first["steps"] == 8 and first["corpus"] == "tiny", first
assert [v["step"] for v in first["validations"]] == [4, 8] and "unpruned" not in first
rates = {name: load(name)["val_loss"] for name in ("lr_fox-pro_1e-3", "lr_fox-pro_4e-3", "lr_fox-pro_1e-2")}
best = min(rates, key=rates.get)
assert main["lr"] == float(best.rpartition("_")[2]), (main["lr"], rates)
assert main["missing"] == [], main["missing"]
assert main["seed"] == 11 and list(main["half_lives"]) == ["4", "8"], main
assert len(main["half_lives"]["8"]) == 1 and len(main["half_lives"]["8"][0]) == 2
assert main["eval"]["seq_len"] == 64 and abs(main["unpruned"]["loss_mean"] - main["eval"]["loss_mean"]) < 1e-3
assert all(len((out / f"{name}.json").read_bytes()) <= 30_000 for name in (*rates, "fox-pro_11"))
END

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
report

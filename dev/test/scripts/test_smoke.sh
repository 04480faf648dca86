#!/usr/bin/env bash
# Every target of `make help` and every script of scripts/, data/ and dev/ runs. One that has no row in the table below
# fails this test. HF_PYTHON: a Python with PyTorch, numpy and safetensors.
cd "$(dirname "$0")/../../.." || exit 1
root=$PWD scratch=build/test/smoke
. dev/test/check.sh
export OMP_NUM_THREADS=1
unset MAKEFLAGS MFLAGS MAKELEVEL
python=$(command -v "${HF_PYTHON:-build/hf/bin/python}" || echo python3)
torch=$($python -c 'import numpy, safetensors, torch; print("yes")' 2>/dev/null)

# How each is run. in FILE: by this test or program. run, torch, all COMMAND: by the command, which needs nothing, needs
# PyTorch, takes too long for `make test`. here: below.
table='
train_fox            run ./train_fox --version
data/text_to_shards  run data/text_to_shards --help
data/ids_to_shards   run data/ids_to_shards --help
data/longcrawl64     run data/longcrawl64 --help
train_foxcu          in .ci/run
test_foxcu           in Makefile
all                  in Makefile
check                run make -s check
quickstart           here
test                 in .ci/run
test-all             in .ci/run
faults               in dev/test/faults/test_faults.sh
torture              all env JOBS=2 dev/test/faults/torture.py 0.002 1
gradcheck            in Makefile
fuzz                 in Makefile
tsan                 in .ci/run
valgrind             in .ci/run
test-gpu             in Makefile
sanitize-gpu         in Makefile
bench-gpu            in Makefile
cuda-check           in .ci/run
bench                here
fixtures             torch $python dev/reference/make_fixtures.py none
format               in .ci/run
clean                in Makefile
help                 run make -s help
study-report         in dev/test/study/test_study.sh
dev/study/corpus/corpus.py  in dev/test/study/test_corpus.sh
dev/study/corpus/doc_text.py in dev/study/corpus/corpus.py
dev/study/run.py     in dev/test/study/test_study.sh
dev/study/plan.py    in dev/test/study/test_study.sh
dev/study/collect.py in dev/test/study/test_study.sh
dev/study/needle.py  in dev/test/study/test_study.sh
dev/study/from_scratch.py in dev/test/study/test_study.sh
dev/study/report.py  in dev/test/study/test_study.sh
dev/study/measures.py in dev/test/study/report.py
dev/study/findings.py in dev/study/report.py
dev/study/lead.py    in dev/study/report.py
dev/study/registered.py in dev/test/study/report.py
dev/study/packed.py  in dev/study/report.py
dev/study/pictures.py in dev/study/report.py
dev/study/paper_code.py in dev/test/study/report.py

scripts/check.sh             in dev/test/scripts/test_check.sh
scripts/setup.sh             in dev/test/scripts/test_check.sh
scripts/shell/help.sh        here
scripts/shell/figure.sh      in scripts/sweep/lengths.sh
scripts/shell/trainer.sh     in scripts/sweep.sh
scripts/quickstart.sh        here
scripts/gpu_quickstart.sh    here
scripts/longcrawl64.sh       in dev/test/scripts/test_recipes.sh
scripts/short_context.sh     in dev/test/scripts/test_short_context.sh
scripts/multi_node_mpirun.sh in dev/test/scripts/test_recipes.sh
scripts/slurm.sbatch         in dev/test/scripts/test_recipes.sh
scripts/sweep.sh             in dev/test/scripts/test_sweep.sh
scripts/sweep/ablations.sh   in dev/test/scripts/test_sweep.sh
scripts/sweep/lengths.sh     in dev/test/scripts/test_sweep.sh
scripts/sweep/tokens.sh      in dev/test/scripts/test_sweep.sh
scripts/sweep/sizes.sh       in dev/test/scripts/test_sweep.sh
scripts/sweep/perplexities.py in dev/test/scripts/test_sweep.sh
scripts/sweep/million.sh     in dev/test/scripts/test_recipes.sh
scripts/sweep/learning_rate.py in dev/test/scripts/test_sweep.sh
scripts/compare.py           in dev/test/scripts/test_compare.sh
scripts/speedrun.sh          in dev/test/scripts/test_compare.sh
scripts/sweep/to_loss.py     in scripts/speedrun.sh
scripts/follow.py            in dev/test/scripts/test_follow.sh
scripts/make_shards.py       in dev/test/data/test_make_shards.sh
scripts/prompt.py            run python3 scripts/prompt.py --help
scripts/common.py            run python3 scripts/common.py
scripts/eval/plots.py        in scripts/compare.py
scripts/eval/fox.py          in dev/test/eval/test_eval.py
scripts/eval/harness.py      in dev/test/eval/test_harness.py
scripts/eval/pruning.py      in dev/test/eval/test_maps.sh
scripts/eval/maps.py         run python3 scripts/eval/maps.py --help
scripts/eval/needle.py       run python3 scripts/eval/needle.py --help
scripts/eval/needle_text.py  run python3 scripts/eval/needle_text.py --help
scripts/eval/positions.py    run python3 scripts/eval/positions.py --help
scripts/eval/rolled.py       run python3 scripts/eval/rolled.py --help
scripts/eval/runs.py         in scripts/compare.py
scripts/eval/results.py      run python3 scripts/eval/results.py --help
scripts/eval/samples.py      in scripts/eval/needle.py
scripts/eval/all.sh          in dev/test/tasks/test_all.sh
scripts/eval/tasks/ruler.py  in dev/test/tasks/test_ruler.py
scripts/eval/recall.py       in dev/test/tasks/test_recall.py
scripts/eval/recall_shards.py in dev/test/tasks/test_recall.py
scripts/eval/tasks/ruler_prompts.py in dev/test/tasks/test_ruler.py
scripts/eval/tasks/lookup.py in dev/test/tasks/test_lookup.py
scripts/eval/tasks/keys.py   in dev/test/tasks/test_keys.py
scripts/eval/tasks/zero_shot.py in dev/test/tasks/test_zero_shot.py
scripts/hf/to_llama.py       run python3 scripts/hf/to_llama.py --help
data/corpus.sh               run data/corpus.sh $scratch/corpus
data/source_corpus.sh        run sh -n data/source_corpus.sh
dev/reference/bench_cpu.sh             here
dev/reference/bench_cpu.py             torch $python dev/reference/bench_cpu.py --steps 1 --batch 1 --attention naive
dev/identical.sh             all env STEPS=2 dev/identical.sh $scratch/corpus_train_000000.bin ./train_fox ./train_fox
dev/turns.sh                 in dev/test/make/test_turns.sh
dev/structure.py             in dev/test/test_structure.sh
dev/counts.py                in dev/structure.py
dev/functions.py             in dev/structure.py
dev/cuda/bench_forgetting.py run python3 dev/cuda/bench_forgetting.py --help
dev/fuzz/run.sh              all dev/fuzz/run.sh 0.2
dev/reference/accuracy.py       torch $python dev/reference/accuracy.py --fp8 --program ./train_fox --device cpu --seq-len 64 --hidden-size 64 --num-heads 1 --vocab-size 300 --draws 1
dev/reference/bench_fla.py      torch $python dev/reference/bench_fla.py --help
dev/reference/bench_paper.py    torch $python dev/reference/bench_paper.py --help
dev/reference/bench_generate.py torch $python dev/reference/bench_generate.py --help
dev/reference/compare_fla.py    torch $python dev/reference/compare_fla.py --help
dev/reference/fox.py            torch $python dev/reference/fox.py --check
dev/reference/stack.py      in dev/reference/make_fixtures.py
dev/reference/recurrent.py      torch $python dev/reference/recurrent.py --check
dev/reference/make_fixtures.py  torch $python dev/reference/make_fixtures.py none
dev/reference/make_unicode.py   run python3 dev/reference/make_unicode.py
dev/reference/make_zarr.py      in dev/test/data/test_longcrawl64.sh
dev/reference/train_beside.py   in dev/test/study/test_study.sh
dev/reference/residual.py       torch $python -c "import sys; sys.path.append(\"dev/reference\"); import residual"
'

# try KIND COMMAND...
try() {
    case $1 in
    in) check "$name in $2" grep -qwF -e "$(basename "$name")" -e "$(basename "$name" .py)" "$2" ;;
    torch) if [ "$torch" ]; then check "$name" eval "${*:2}"; else without_torch+=" $name"; fi ;;
    all) if [ "${TEST_ALL:-}" ]; then check "$name" eval "${*:2}"; fi ;;
    run) check "$name" eval "${*:2}" ;;
    here) ;;
    *) fail "$name: no way to run it is called $1" ;;
    esac
}

# fake PATH TEXT: a program
fake() {
    mkdir -p "$(dirname "$1")"
    printf '#!/bin/sh\n%s\n' "$2" >"$1" && chmod +x "$1"
}

# place NAME: a folder $place in which a script runs with other programs
place() {
    place=$scratch/$1
    mkdir -p $place/scripts $place/data
    cp -r scripts/$1.sh scripts/shell $place/scripts
    fake $place/scripts/check.sh :
    fake $place/bin/make :
    fake $place/trainer 'case $* in *--help) exit ;; esac
echo "$*" >>calls
while [ $# -gt 1 ]; do
    [ "$1" != --out ] || mkdir -p "$2/step_00000896"
    shift
done'
}

# options: every call of the trainer of $place has options that there are
options() {
    local n=0
    while read -r line; do
        n=$((n + 1))
        set -f
        line=$(sed 's/--prompt .*//; s/--init [^ ]*/--model fox-pro-nano/' <<<"$line")
        check "options of call $n" ./train_fox --dry-run $line
        set +f
    done < <(grep '^--' $place/calls)
    equals "$1 calls" "$n calls"
}

quickstart() {
    place quickstart
    mv $place/trainer $place/train_fox
    touch $place/data/corpus_train_000000.bin
    for n in 0 1 2; do
        check "make quickstart, $n before" env -C $place scripts/quickstart.sh
        [ $n = 0 ] || said "the previous run is now in out/quickstart_$n"
        echo $n >$place/out/quickstart/number
    done
    equals "2 0 1" "$(cd $place/out && xargs <<<"$(cat quickstart/number quickstart_1/number quickstart_2/number)")"
    rm $place/calls
    check "make quickstart" env -C $place scripts/quickstart.sh
    # its last words are commands that there are
    sed -n '/^    /{ :a; /\\$/ { N; s/\\\n//; ta; }; s/ && / --help \&\& /; s/$/ --help/; p; }' $scratch/stdout >$scratch/next
    equals "3 ./train_fox" "$(wc -l <$scratch/next) $(awk '{ print $1 }' $scratch/next | sort -u)"
    check "what to try next" sh -e $scratch/next
    options 3

    # Ctrl-C on a terminal, in make: the trainer saves, the script says how to go on, and the same command goes on
    mv $place/train_fox $place/trainer
    cat >$place/train_fox <<'END'
#!/usr/bin/env python3
import os, signal
def save(*signal):
    os.makedirs("out/quickstart/step_00000100")
    os._exit(75)
signal.signal(signal.SIGINT, save)
print("step 100", flush=True)
while True:
    signal.pause()
END
    chmod +x $place/train_fox
    printf 'quickstart:\n\t@scripts/quickstart.sh\n' >$place/Makefile
    check "Ctrl-C" env -C $place python3 -c 'if True:
        import os, pty, sys
        child, terminal = pty.fork()
        if child == 0:
            os.execvp("make", ["make", "quickstart"])
        shown = b""
        while b"step 100" not in shown:
            shown += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        try:
            while more := os.read(terminal, 1000):
                shown += more
        except OSError: # the last process of the terminal has ended
            pass
        print(shown.decode(), "make ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))'
    said "interrupted; to go on: make quickstart"
    check "the trainer saved" test -d $place/out/quickstart/step_00000100
    mv $place/trainer $place/train_fox
    check "make quickstart again" make -C $place quickstart
    said "going on with the run in out/quickstart, which is not done"
    equals "quickstart quickstart_1 quickstart_2 quickstart_3 quickstart_4" "$(ls -d $place/out/*/ | xargs -n 1 basename | xargs)"
    check "is done" test -d $place/out/quickstart/step_00000896 -a -d $place/out/quickstart/step_00000100

    place gpu_quickstart
    mv $place/trainer $place/train_foxcu
    touch $place/data/linux_train_000000.bin
    check "gpu_quickstart.sh" env -C $place PATH="$root/$place/bin:$PATH" scripts/gpu_quickstart.sh --seed 3
    options 2
}

# -h and --help of every script, outside of the repository: print its opening comment, and nothing is made or called. A
# mistyped option of one in Python is answered with the nearest name, though what the script needs is missing too
helps() {
    mkdir -p $scratch/elsewhere
    for program in make curl apt-get mpirun ssh; do fake $scratch/none/$program "exit 9"; done
    PATH="$root/$scratch/none:$PATH" python3 - $scratch/elsewhere <<'END' >$scratch/stdout || fail "no help: $(cat $scratch/stdout)"
import ast, os, pathlib, re, subprocess, sys
def run(*command):
    return subprocess.run(command, cwd=sys.argv[1], stdin=subprocess.DEVNULL, capture_output=True, text=True)
bad = 0
for folder in ".ci", "data", "dev", "scripts":
    for script in sorted(pathlib.Path(folder).rglob("*")):
        text = script.read_bytes()[:2] == b"#!" and script.read_text() if script.is_file() else ""
        if not text or not os.access(script, os.X_OK) or "dev/test/" in str(script):
            continue
        if script.suffix == ".py":
            comment = ast.get_docstring(ast.parse(text))
        else:
            lines = text.splitlines()[1:]
            end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
            comment = "\n".join(line[1:].removeprefix(" ") for line in lines[:end])
        for option in ["--help"] if "Parser(" in text else ["-h", "--help"]:
            r = run(script.resolve(), option)
            shown = comment in r.stdout if script.suffix == ".py" else comment == r.stdout.strip()
            if r.returncode or r.stderr or not shown or os.listdir(sys.argv[1]):
                bad += 1
                print(f"{script} {option}: exit code {r.returncode}: {r.stderr[-200:] or r.stdout[:200]}")
        if script.suffix != ".py" or folder == "dev" and "study" not in script.parts or script.name == "harness.py": # of lm_eval
            continue
        name = (re.findall(r"^  (?:-h, )?(--[a-z-]+)", r.stdout, re.M) or ["--help"])[-1]
        typo = name[:4] + "q" + name[4:]
        r = run(script.resolve(), typo + "=1")
        if (r.returncode, r.stderr) != (2, f"error: {typo}: no such option (is {name} meant?); --help lists them\n"):
            bad += 1
            print(f"{script} {typo}: exit code {r.returncode}: {r.stderr[-300:]}")
sys.exit(bad > 0)
END
    equals "" "$(cat $scratch/stdout)"
    # what no option is called is refused before anything is made or downloaded
    dies "--hlep: this script takes no options" env -C $scratch/elsewhere "$root/scripts/quickstart.sh" --hlep
    place short_context
    ln -s "$root/train_fox" $place/train_fox
    dies "--hlep: no such option" env -C $place PATH="$root/$place/bin:$PATH" scripts/short_context.sh --hlep
    place gpu_quickstart
    ln -sf "$root/train_fox" $place/train_foxcu
    dies "--hlep: no such option" env -C $place PATH="$root/$place/bin:$PATH" scripts/gpu_quickstart.sh --hlep
    dies "--hlep: no such option" env -C $place PATH="$root/$place/bin:$PATH" "$root/scripts/sweep/ablations.sh" --hlep
    dies "--hlep: no such option" env -C $place PATH="$root/$place/bin:$PATH" TREES=. "$root/scripts/sweep/million.sh" --hlep
    rm -r $scratch/{short_context,gpu_quickstart}
}

# bench_cpu.sh with a Python that measures what is written here; with PyTorch for once
bench() {
    fake $scratch/python 'case $* in
*bench_cpu.py*) echo "{\"tokens_per_s\": 5, \"peak_rss_mib\": 1000000}" ;;
*version*) echo "PyTorch 9.9" ;;
*json*) exec python3 "$@" ;;
esac'
    check "make bench" env PYTHON=$scratch/python THREADS=1 BATCH=1 STEPS=1 dev/reference/bench_cpu.sh
    said "PyTorch 9.9, threads: 1"
    equals 2 "$(grep -c 'train_fox / PyTorch  *[0-9.]*x  *0.00x' $scratch/stdout)"
    mv $scratch/stdout $scratch/bench
    check "plausible numbers: $(grep '^train_fox' $scratch/bench)" awk '$1 == "train_fox" && NF == 3 {
        ok = $2 > 100 && $2 < 1e6 && $3 > 10 && $3 < 10000 }
        END { exit !ok }' $scratch/bench
    [ ! "$torch" ] || check "make bench" env PYTHON=$python THREADS=1 BATCH=1 STEPS=1 dev/reference/bench_cpu.sh
}

targets=$(make -s help | awk '/^Variables/ { exit } /^  / { print $1 }')
there=$(printf '%s\n' $targets
    ls scripts/*.sh scripts/*.sbatch scripts/*.py scripts/*/*.sh scripts/*/*.py scripts/*/*/*.py data/*.sh dev/*.sh dev/*.py dev/*/*.py dev/*/*/*.py dev/fuzz/*.sh dev/reference/*.sh |
        grep -v '^dev/test/')
rows=$(awk 'NF { print $1 }' <<<"$table")
equals "rows that are missing, or of nothing: " \
    "rows that are missing, or of nothing: $(printf '%s\n' $there $rows | sort | uniq -u | xargs)"
without_torch=
while read -r name how; do
    [ ! "$name" ] || try $how </dev/null # mpirun would read the table
done <<<"$table"
check "all targets, dry" make -n NVCC=true $targets
helps
quickstart
bench
dies "Python package numpy is missing: pip install -c scripts/requirements.txt numpy torch safetensors" \
    env -u PYTHONPATH python3 -S dev/reference/make_fixtures.py # with the standard library alone
dies "Python package numpy is missing: python3 -m venv build/python && build/python/bin/pip install -c scripts/requirements.txt numpy" \
    env -u PYTHONPATH python3 -S scripts/eval/recall_shards.py mqar --seq-len 8 --pairs 2 --tokens 8 --out $scratch/none
[ ! "$without_torch" ] || skip "$python has no PyTorch, numpy and safetensors (HF_PYTHON), for$without_torch"
report

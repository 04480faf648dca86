"""Writes results of runs that never were, with known differences, and checks what dev/study/report.py makes of them."""
import json
import math
import re
import subprocess
import sys
from pathlib import Path

sys.path[:0] = ["dev/study", "scripts"]
import paper_code  # noqa: E402
import plan  # noqa: E402
import measures  # noqa: E402
import registered  # noqa: E402

FOLDER = Path(sys.argv[1])
PAGE, RESULTS = FOLDER / "STUDY.md", FOLDER / "results"
RESULTS.mkdir(parents=True, exist_ok=True)
corpus = json.loads(Path("dev/study/corpus/corpus.json").read_text())
DOCUMENTS = len(corpus["held"]["documents"])
LINES = {line.name: line for line in plan.read_lines("dev/study/runs.txt")}


def options(name, best="2e-3"):
    """What a run of runs.txt was trained with, where the best learning rates are these."""
    return [best if word.startswith(plan.BEST) else word for word in LINES[name].options] if name in LINES else []


def result(name, seed, within, beyond, hours, lr=2e-3):
    mean = (16384 * within + 49152 * beyond) / 65536
    row = [within, within, within, beyond, beyond]
    return {
        "name": name, "measures": LINES[name].measures if name in LINES else "all", "options": options(name), "missing": [],
        "seed": seed, "lr": lr, "corpus": corpus["name"], "device": "one", "version": "1", "val_loss": within, "steps": 4096, "pruned_by_layer": [0.5, 0.7], "tasks": {},
        "curve": [[64 * i, 8 - i / 10, i * hours / 64, 0.5] for i in range(1, 65)],
        "validations": [{"step": 512 * i, "hours": hours * i / 8, "loss": within + 8 - i, "by_octave": [within] * 16}
                        for i in range(1, 9)],
        "half_lives": {"512": [[10, 100]], "4096": [[20, None]]},
        "eval": {"loss_mean": mean, "perplexity": {"16384": math.exp(within), "65536": math.exp(mean)},
                 "tokens_per_second": 100, "pruned": [0.5], "loss": [[1, within + 1], [3, within], [4, within], [128, 3], [65536, 2]],
                 "documents": {"ends": [1024, 4096, 16384, 32768, 65536], "loss": [row] * DOCUMENTS,
                               "contexts": [1024, 63488], "last_targets": 2048, "last_loss": [[within, beyond]] * DOCUMENTS}}}


def write(r):
    (RESULTS / f"{r['name']}.json").write_text(json.dumps(r))


def run(*more, pictures=("--no-pictures",)):
    command = [sys.executable, "dev/study/report.py", "--results", RESULTS, "--page", PAGE, *pictures, *more]
    return subprocess.run(command, capture_output=True, text=True)


def rows(page, table):
    text = page.partition(f"<!-- table {table} -->\n")[2].partition("<!-- end -->")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


# no result: every table has its rows
PAGE.write_text(Path("dev/STUDY.md").read_text())
done = run(pictures=("--pictures", FOLDER))
assert done.returncode == 0, done.stderr
page = PAGE.read_text()
assert [row[2] for row in rows(page, "primary")[2:]] == ["no pair yet"] * 3
assert "claim" not in page.partition("## Results")[2].partition("### Noise")[0]

# training beside the paper's code: the table has the file's numbers, and the README's sentence those of the page
data = paper_code.load()
beside = page.partition("<!-- table paper_code -->\n")[2].partition("<!-- end -->")[0]
for name, runs in data["runs"].items():
    for steps, d in runs["largest_difference"].items():
        assert f"| {name} | {steps.replace('-', ' to ')} | {d['largest']:.4f} | {d['mean']:+.4f} |" in beside, (name, steps)
assert "differs by 0.014 at most over 100 steps, where two runs of this program differ by 0.013." in beside, beside
assert "0.0077 and two runs by 0.0012" in beside and "fox-llama by 0.0024, 0.0434, 0.0459" in beside, beside
assert "pruned 259,297 beside 100,296 tokens/s, 2.6 times; gates" in beside and "129,013 tokens/s, 2.7 times." in beside, beside
found = {tuple(row[:2]): row[2:] for row in rows(page, "paper_code_python")}
assert found["fox-pro", "31 to 40"] == ["+0.0112, 0.0232", "-0.0020, 0.0042", "-0.0061, 0.0361"], found
assert "differs by 0.087 at most, in steps 1 to 12, and by 0.023 after them, where two runs of this program differ by 0.004" in page
data = paper_code.load_repeats()
found = {tuple(row[:2]): row[2:] for row in rows(page, "paper_code_repeats")}
for name in data["runs"]:  # as the losses of every step have them
    ours, theirs = (data["loss"][name][of][12:30] for of in ("this program", "the paper's code, run 1"))
    differences = [b - a for a, b in zip(ours, theirs)]
    mean, largest = map(float, found[name, "13 to 30"][0].split(", "))
    assert abs(mean - sum(differences) / 18) < 2e-4 and abs(largest - max(map(abs, differences))) < 2e-4, (name, found)
first_screen = " ".join(Path("README.md").read_text().split()[:400])
for words in ("0.014 at most over 100 steps of C files (two runs of train_fox: 0.013)", "0.087 at most up to step 12, by 0.023 after"):
    assert words in first_screen, (words, first_screen)
for row in rows(Path("dev/STUDY.md").read_text(), "primary")[2:4]:  # the losses, as the README's caption has them
    mean, low, high = (x.strip("-") for x in (row[2], *row[3].split(" to ")))
    assert f"{mean} nats lower" in first_screen and f"{high} to {low}" in first_screen, row
row = rows(Path("dev/STUDY.md").read_text(), "primary")[4]
mean, low, high = (f"{math.exp(float(x)):.2f}" for x in (row[2], *row[3].split(" to ")))
assert f"{mean} times the GPU-hours ({low} to {high}" in first_screen, row

# the questions' advice on learning rates is what the study found
advice = " ".join(Path("dev/QUESTIONS.md").read_text().split())
answer = next(row[2] for row in rows(Path("dev/STUDY.md").read_text(), "registered")[2:] if row[0] == "4")
assert answer.startswith("**1e-3**: 1e-3 minus 5e-4 -0.033 ") and "1e-3 for FoX and Transformers" in advice, answer
assert "fox-pro's loss is 0.033 nats lower than at 5e-4" in advice
for row in rows(Path("dev/STUDY.md").read_text(), "rates")[2:6]:
    assert row[2] in (("5e-4", "1e-3") if row[0].startswith("fox") else ("1e-3",)), row
picture = FOLDER / paper_code.PICTURE
if "no matplotlib" not in done.stdout:
    assert all(name in picture.read_text() for name in data["runs"])

# labels of lengths, of up to five digits, do not touch: six fit below each of the two panels
labels = re.findall(r">(\d{3,5})<", Path("dev/pictures/study/position.svg").read_text())
assert 8 <= len(labels) <= 12, labels

# measured numbers stand in what report.py writes, and not between: there, only numbers of the design
between = re.sub("<!-- table.*?<!-- end -->", "", Path("dev/STUDY.md").read_text().partition("\n## Results\n")[2], flags=re.S)
found = re.findall(r"[\d.,]*\d(?:%| (?:nats|points|times|steps))", " ".join(between.split()))
assert {*found} <= {"8.318 nats", "3 nats", "1%", "90%", "3.9 times", "8 times", "1.09 times", "8,000 steps",
                       "10,000 steps"}, found

# the paired t-test: differences of -0.10, -0.12, -0.08, -0.11, -0.09 have the mean -0.1 and the error 0.00707
for seed, d in zip(range(11, 16), (-0.10, -0.12, -0.08, -0.11, -0.09)):
    write(result(f"fox-pro_{seed}", seed, 2 + d, 2.5 + (0.3 if seed % 2 else -0.3), 1))
    write(result(f"transformer-pro_{seed}", seed, 2, 2.5, 2))
    write(result(f"fox-pro_{seed}_repeat", seed, 2 + d + 4e-4, 2.5 + (0.3 if seed % 2 else -0.3), 1))
    write(result(f"transformer-pro_{seed}_repeat", seed, 2.0004, 2.5, 2))
for seed, within in zip((11, 12, 13), (1.902, 1.884, 1.926)):  # 0.002, 0.004 and 0.006 above fox-pro's
    write(result(f"fox-pro-fp8_{seed}", seed, within, 2.8, 0.8))
beyond = {way: {"perplexity": {"16384": math.exp(1.75)}, "loss_mean": loss} for way, loss in (("window", 2), ("yarn", 1))}
write({**result("transformer-pro-4heads_11", 11, 1.75, 2.5, 4), **beyond})
write({**result("again_transformer-pro_11", 11, 2, 2.5, 4), "window": beyond["window"]})
write({**result("again_transformer-pro_12", 12, 2, 2.5, 4), **beyond})
write(result("again_fox-pro_11", 11, 1.91, 2.8, 1))
write(result("again_fox-pro_12", 12, 1.91, 2.8, 1))
for k, (lr, loss) in enumerate([(1e-3, 3), (2e-3, 2), (5e-3, 2.5)]):
    write(result(f"lr_fox-pro_{['1e-3', '2e-3', '5e-3'][k]}", 1, loss, 3, 1, lr))
assert run().returncode == 0
page = PAGE.read_text()
primary = rows(page, "primary")[2:]
assert primary[0][1:4] == ["5", "-0.1000", "-0.1196 to -0.0804"] and primary[0][6] == "fox-pro", primary
assert primary[0][4:6] == ["0.00015", "0.00029"], primary  # t = 14.14, 4 degrees; the second of Holm's three
assert primary[1][6] == "no claim", primary
# the pair's larger last loss is the transformer's, which fox-pro has where its line between validations crosses it
want = sum(math.log((1 - (1 / 8) * -d) / 2) for d in (-0.10, -0.12, -0.08, -0.11, -0.09)) / 5
assert abs(float(primary[2][2]) - want) < 6e-4 and primary[2][6] == "fox-pro", (primary, want)
assert rows(page, "lead_octaves")[2:] == [["1", "3.000", "-0.1000 ± 0.0071"]], rows(page, "lead_octaves")  # no bin ends at 2
assert "beside a Transformer cut to the last 1,024 tokens +0.560 ± 0.147" in page.partition("<!-- table primary")[2]
chosen = [row[2] for row in rows(page, "rates")[2:4]]
assert chosen == ["2e-3", "after 1e-3, 2e-3, 5e-3"], chosen
assert rows(page, "noise")[2][1:5] == ["5", "0.0003", "0.0003", "0.0000"], rows(page, "noise")  # 0.0004 / sqrt(2)
variants = {row[0]: row[1:] for row in rows(page, "variants")[2:]}
assert variants["fox-pro-fp8 minus fox-pro"] == ["3", "+0.0040 ± 0.0012", "+0.0040 ± 0.0012", "+0.2000 ± 0.2000", "1.25 (3)"], variants
assert variants["transformer-pro-4heads minus transformer-pro"] == ["1", "-0.2500", "-0.2500", "+0.0000", "0.50 (1)"], variants
crossed = {row[0]: row[1:] for row in rows(page, "pairs")[2:]}
assert crossed["fox-pro minus transformer-pro-4heads"] == ["1", "+0.1500", "+0.1500", "+0.3000", "4.00 (1)"], crossed
assert crossed["8 more"][1] == "no run yet" and len(crossed) == 3, crossed
assert rows(page, "window")[2:] == [  # the seeds of a row have all that it has
    ["transformer-pro, seed 11 again", "1", "2.5000", "2.0833", "", "+0.3000, +0.7167", ""],
    ["transformer-pro, seed 12 again", "1", "2.5000", "2.0833", "0.7500", "+0.3000, +0.7167, +2.0500", "-0.2500"],
    ["transformer-pro-4heads", "1", "2.5000", "2.0833", "0.7500", "", "+0.0000"]], rows(page, "window")
assert "to 65,536 tokens: fox-pro minus transformer-pro +2.050 nats in 1 pair, too few to say more (+0.300 without" in page
assert ["fox-pro_11", "1.9000", "1.9100", "+0.0100", "0.0012"] in rows(page, "noise"), rows(page, "noise")
assert variants["13 more"] == ["", "no run yet", "", "", ""] and len(variants) == 3, variants
first = rows(page, "documents")[2]
assert first[1].startswith("-0.1000 (-0.1000 to -0.1000), 256 of 256") and first[2].endswith("0 of 256"), first

# nothing is claimed before all five pairs, or where one diverged; hours are those of repeats, on GPUs of one kind, each alone
def changed(name, **members):
    found = json.loads((RESULTS / f"{name}.json").read_text())
    write({**found, **members})
    return found


pair = json.loads((RESULTS / "transformer-pro_15.json").read_text())
(RESULTS / "transformer-pro_15.json").unlink()
assert run().returncode == 0
found = rows(PAGE.read_text(), "primary")[2:]
assert [row[5:] for row in found] == [["", "after 1 more run"]] * 2 + [["4.7e-11", "fox-pro"]], found
write({"name": "transformer-pro_15", "options": options("transformer-pro_15"), "diverged": "step 9: the loss is nan"})
assert run().returncode == 0
found = PAGE.read_text()
assert [row[1] for row in rows(found, "primary")[2:]] == ["4", "4", "5"]
assert [row[6] for row in rows(found, "primary")[2:4]] == ["no claim: pairs are missing"] * 2
assert rows(found, "documents")[6][1] == "transformer-pro diverged"
assert " Diverged: transformer-pro_15 (step 9: the loss is nan)." in found
write(pair)
elsewhere = [changed(f"fox-pro_{seed}{repeat}", device="two, of another kind") for seed in (13, 14, 15)
             for repeat in ("", "_repeat")]
fp8 = changed("fox-pro-fp8_11", device="two, of another kind", missing=["needle"])
alone = changed("fox-pro-fp8_12", shared_gpu=True)
assert run().returncode == 0
found = PAGE.read_text()
other = rows(found, "primary")[2:]
assert other[0][4:] == ["0.00015", "0.00044", "fox-pro"], other  # of three comparisons, though the third has two pairs
assert other[2][1] == "2" and other[2][5:] == ["", "no claim: pairs are missing"], other
speeds = {row[0]: row[5] for row in rows(found, "variants")[2:]}
assert speeds["fox-pro-fp8 minus fox-pro"] == "", speeds  # 11 and 13 elsewhere, 12 not alone
assert " Measures that failed: fox-pro-fp8_11 (needle)." in found and " 1 run shared a GPU, and their times do not count." in found
assert " GPU-hours of training steps of runs alone on their GPU." in found
for r in (*elsewhere, fp8, alone):
    write(r)
shared = changed("transformer-pro_12_repeat", shared_gpu=True)
assert run().returncode == 0
assert rows(PAGE.read_text(), "primary")[4][1] == "4"
write(shared)

# the same results give the same bytes; another corpus, and a run that is not in the list, are errors
assert run().returncode == 0 and PAGE.read_text() == page
write({**result("fox-pro_12", 12, 1.9, 2.8, 1), "corpus": "another"})
assert "trained on corpus another" in run().stderr
write(result("fox-pro_12", 12, 1.88, 2.2, 1))
write(result("nothing_1", 1, 2, 2, 1))
assert "results of nothing_1, which is no run of runs.txt" in run().stderr

# --add takes a folder's results into one file, in the order of runs.txt and in place of older ones, and the page is the same
FILE = FOLDER / "results.jsonl"
assert "nothing_1: a result of no run" in run("--results", FILE, "--add", RESULTS).stderr and not FILE.exists()
(RESULTS / "nothing_1.json").unlink()
whole = run() and PAGE.read_text()
assert run("--results", FILE, "--add", RESULTS).returncode == 0 and PAGE.read_text() == whole
kept = [json.loads(line) for line in FILE.read_text().splitlines()]
names = [r["name"] for r in kept]
# what no table reads is not kept: losses by document of runs of which not all is measured, octaves of validations
assert [r["name"] for r in kept if "documents" in r["eval"]] == [name for name in names if plan.all_of(LINES[name])], names
assert not any("by_octave" in r["validations"]["names"] for r in kept)
assert set(names) == {path.stem for path in RESULTS.glob("*.json")} and names == [name for name in LINES if name in names], names
again = FOLDER / "again"
again.mkdir()
(again / "fox-pro_12.json").write_text(json.dumps(result("fox-pro_12", 12, 1.7, 2.2, 1)))
lines = FILE.read_text().splitlines()
assert run("--results", FILE, "--add", again).returncode == 0 and PAGE.read_text() != whole
differ = [n for n, (one, other) in enumerate(zip(lines, FILE.read_text().splitlines(), strict=True)) if one != other]
assert [names[n] for n in differ] == ["fox-pro_12"], differ
FILE.write_text(lines[0] + "\n" + lines[1][:40] + "\n")
assert "results.jsonl: line 2: not the result of a run" in run("--results", FILE).stderr

# a task: the first validation that reaches a share, percent, and data that are those of runs.txt
data_of = plan.read_sets("dev/study/runs.txt", "data")
task = {"name": "lr_mqar-fox-pro_2e-3", "options": options("lr_mqar-fox-pro_2e-3"), "seed": 1, "lr": 2e-3,
        "corpus": " ".join(data_of["mqar"]), "device": "one",
        "validations": [{"step": 100 * i, "hours": i, "loss": 1, "accuracy": 0.2 * i} for i in range(1, 5)],
        "val_loss": 2, "tests": {"mqar_T512_n4": {"accuracy": 0.875}, "mqar_T512_n64": {"accuracy": 0.5}}, "tasks": {}}
write(task)
write({**task, "name": "lr_mqar-fox-pro_5e-3", "options": options("lr_mqar-fox-pro_5e-3"), "lr": 5e-3, "val_loss": 3})
done = run(pictures=("--pictures", FOLDER))
assert done.returncode == 0, done.stderr
_, _, row, _, left = rows(PAGE.read_text(), "mqar")
assert row == ["lr_mqar-fox-pro_2e-3", "0.002", "300", "never", "80.0", "50.0"], row
assert left[:2] == ["46 runs", "no run yet"], left
if "no matplotlib" not in done.stdout:
    picture = (FOLDER / "study/mqar.svg").read_text()
    assert "fox-pro, lr 0.002" in picture and "0.005" not in picture  # the better one of the two

# gates: what the registered rules say. Plain gates: two of three seeds learn it; T = 2 never, 16 in all seeds; a bias moves
# by 2.0 where the sum of the rates is 1.0
assert "fox-pro: open, after 3 more runs (0 of 0 seeds)" in PAGE.read_text() and "hypothesis is open: no run yet." in PAGE.read_text()


def gates(name, right, bias, mean):
    write({**task, "name": name, "options": options(name), "lr": 5e-4, "steps": 4000, "corpus": " ".join(data_of["gate-mqar"]),
           "tests": {}, "validations": [{"step": 4000, "hours": 1, "loss": 1, "accuracy": right}],
           "gates": {"bias": [[bias]], "mean": [[mean]], "sd": [[0]]}})


for seed, right in ((11, 0.9), (12, 0.95), (13, 0.5)):
    gates(f"gate-mqar-fox-pro-plain_{seed}", right, 0.5, 3.0)
    gates(f"gate-mqar-fox-pro-T2_{seed}", right, 0.5, 0)
    gates(f"gate-mqar-fox-pro-T16_{seed}", 1, 3.0, 0)
    gates(f"gate-mqar-fox-llama-plain_{seed}", 0.5, 0.5, 0)
gates("gate-mqar-fox-pro-T128_11", 1, 5.0, 0)
assert run().returncode == 0
for sentence in ("**Is plain gates' failure only a delay?** fox-pro: yes (2 of 3 seeds); fox-llama: no (0 of 3 seeds).",
                 "MQAR, fox-pro: 16 tokens; MQAR, fox-llama: open; overwritten keys, fox-pro: open.",
                 "The hypothesis is not refuted: no bias ends further from its start than the sum of the rates. The longest gate of plain runs that "
                 "have learned MQAR, by bias plus mean of `w_f a`, owes its length to: fox-pro `w_f a` (bias +0.50, mean of `w_f a` +3.00). It does not explain the failure."):
    assert sentence in PAGE.read_text(), sentence
gates("gate-mqar-fox-llama-plain_11", 0.5, -2.0, 0)
assert run().returncode == 0 and "refuted: a bias has moved by 2.00, further than the sum of the rates." in PAGE.read_text()
write({**task, "corpus": "mqar --seed 7"})
assert "trained on corpus mqar --seed 7" in run().stderr

# packed documents: gains 0.01, 0.02, 0.03 of fox-pro, 0.06, 0.05, 0.07 of transformer-pro: the difference has the mean
# -0.04 and the error 0.00577, t = 6.93 with 2 degrees of freedom
write(task)
short = json.loads(Path("dev/study/corpus/short_corpus.json").read_text())
DOCUMENTS = len(short["held"]["documents"])


def packed(name, seed, loss):
    return {"name": name, "measures": "short", "options": options(name), "seed": seed, "lr": 2e-3, "corpus": short["name"],
            "device": "one", "val_loss": 3, "tasks": {}, "validations": [{"step": 2048, "hours": 0.05, "loss": 3}],
            "intact": {"loss_mean": loss, "documents": [loss + 1] * DOCUMENTS, "octaves": [1, 2, 4],
                       "by_octave": [9, loss, loss], "octave_targets": [DOCUMENTS, 5000, 0]}}


for seed, fox, transformer in zip((11, 12, 13), (0.01, 0.02, 0.03), (0.06, 0.05, 0.07)):
    write(packed(f"short-fox-pro_{seed}", seed, 2.5))
    write(packed(f"short-fox-pro-walls_{seed}", seed, 2.5 - fox))
    write(packed(f"short-transformer-pro_{seed}", seed, 2.6))
    write(packed(f"short-transformer-pro-walls_{seed}", seed, 2.6 - transformer))
done = run()
assert done.returncode == 0, done.stderr
found = rows(PAGE.read_text(), "packed")[2:]
assert found[0][1:] == ["3", "-0.0400", "-0.0648 to -0.0152", "0.02: claimed"], found
assert [row[2] for row in found[1:]] == ["+0.0200", "+0.0600", "-0.1000", "-0.0600", "-0.0400"], found
assert rows(PAGE.read_text(), "packed_documents")[2][1:] == \
    ["+0.0100 (+0.0100 to +0.0100)", "+0.0600 (+0.0600 to +0.0600)", "-0.0500 (-0.0500 to -0.0500)"]
(RESULTS / "short-fox-pro_12.json").unlink()
assert run().returncode == 0 and rows(PAGE.read_text(), "packed")[2][1:] == ["2", "-0.0450", "", ""]
write({**packed("short-fox-pro_12", 12, 2.5), "corpus": corpus["name"]})
assert f"short-fox-pro_12: trained on corpus {corpus['name']}, not {short['name']}" in run().stderr

# what was found: numbers of the results, once all runs that it speaks of are there
assert "**Loss,** fox-pro minus transformer-pro: -0.100 nats within" in PAGE.read_text()
assert "Not run yet, or not with all seeds and rates: lr_transformer-pro, lr_fox-llama, " in PAGE.read_text()
write(packed("short-fox-pro_12", 12, 2.5))
for seed in range(11, 16):
    for k, (name, loss) in enumerate((("fox-pro", 1.9), ("transformer-pro", 2.0))):
        tasks = {"copy": plan.packed([{"segment": 64, "gap": gap, "samples": 1, "fall": 2 - k} for gap in (256, 4096, 16384)]),
                 "conflict": plan.packed([{"stale": stale, "gap": gap, "samples": 1, "margin": -3 - k}
                                          for stale, gap in ((1, 4096), (4, 4096), (4, 65536))]),
                 "corrupted": plan.packed([{"length": 16128, "percent": 1, "samples": 1, "rise": 0.1}])}
        for needle in measures.NEEDLES:
            tasks[needle] = plan.packed([{"distractors": 63, "gap": gap, "samples": 1, "right": 50 + k} for gap in (4096, 16384, 63488)])
        write({**result(f"{name}_{seed}", seed, loss, 2.5, 1 + k), "tasks": tasks, "maps": {},
               "pruned_shares": {"512": [0.5], "4096": [0.75]},
               "unpruned": {"loss_mean": (16384 * loss + 49152 * 2.5) / 65536 + 0.001, "tokens_per_second": 50}})
for k, rate in enumerate(("1e-3", "2e-3", "5e-3")):
    write(result(f"lr_fox-pro_{rate}", 1, 2 + abs(k - 1), 3, 1, float(rate)))
    write(result(f"lr_transformer-pro_{rate}", 1, 2.25 + abs(k - 1), 3, 1, float(rate)))
for rate, loss in (("5e-4", 1.5), ("1e-3", 1.25)):
    write(result(f"confirm_fox-pro_{rate}", 2, loss, 3, 1))
write(result("again_fox-pro_1e-3", 2, 1.5, 3, 1))
write(result("confirm_transformer-pro_1e-3", 2, 1.5, 3, 1))
write(result("fox-pro-bias256_11", 11, 2.0, 2.5, 1))
for seed in (11, 12):
    write(result(f"fox-llama_{seed}", seed, 1.75, 2.25, 1))
    write(result(f"transformer-llama_{seed}", seed, 2, 2.5, 4))
for name, loss in (("mamba2", 2.25), ("hgrn2", 2.5), ("deltanet", 2.125)):
    for k, rate in enumerate(("1e-3", "2e-3")):
        write(result(f"lr_{name}_{rate}", 1, loss + k / 4, 3, 1, float(rate)))
over = "over-fox-pro-long_2e-3"
write({"name": "over-fox-pro_2e-3", "options": options("over-fox-pro_2e-3"), "diverged": "step 3: the loss is nan"})
write({**task, "name": over, "options": options(over), "corpus": " ".join(data_of["over"]),
       "tests": {"over_T1024": {"accuracy": 0.75}, "over_T8192": {"accuracy": 0.5}}})
keys = lambda right: {"over_1K": plan.packed([{"keys": 16, "rewrites": k, "right": k * right, "stale": 25} for k in range(2)])}
for rate, right in (("2e-3", 0), ("5e-4", 0.5)):
    name_of = f"over-fox-llama_{rate}"
    write({**task, "name": name_of, "options": options(name_of), "lr": float(rate), "corpus": " ".join(data_of["over"]),
           "tests": {"over_T1024": {"accuracy": right}, "over_T8192": {"accuracy": right / 2}}, "tasks": keys(100 * right)})
for name, right in (("fox-pro", 0.25), ("transformer-pro", 0.75), ("fox-llama", 0.5), ("transformer-llama", None),
                    ("fox-pro-long", 1), ("fox-llama-long", 1)):
    for rate in ("5e-4", "2e-3", "5e-3"):
        name_of = f"lr_mqar-{name}_{rate}"
        write({**task, "name": name_of, "options": options(name_of), "lr": float(rate),
               "validations": [{"step": 100, "hours": 1, "loss": 1, "accuracy": right}]})
for seed in (11, 12, 13):  # in the tables, not in the pictures
    write(result(f"fox-pro-long_{seed}", seed, 1.9, 2.5, 1))
write(result("fox-pro-rope_11", 11, 1.8, 2.5, 1))
write(result("again_fox-pro-rope_11", 11, 1.81, 2.5, 1))
drawn = done = run(pictures=("--pictures", FOLDER))
assert done.returncode == 0, done.stderr
text = PAGE.read_text()
for sentence in ("fox-pro is best at 2e-3 and 1e-3, which differ by 1.0000 nats, two runs of one command by 0.0141",
                 "costs 0.000 and 0.000 nats", "On another seed: fox-pro is 0.2500 nats lower at 1e-3 than at 5e-4, as on the first; transformer-pro not run yet.",
                 "25% right, fox-llama with 50%; transformer-pro with 75%, transformer-llama with 0%",
                 "gain transformer-pro: -0.040 ± 0.006 nats, 3 pairs, p = 0.02.",
                 "with walls: -0.060 ± 0.006 nats, 3 pairs, p = 0.0091; without: -0.100 nats in each of 3 pairs",
                 "behind 1,024 tokens: -0.100 nats", "4,096 steps: -0.100, -0.100, -0.100, -0.100 (",
                 "after 256 tokens: +1.000 nats in each of 5 pairs; after 4,096", "behind it -3.0 and -4.0 nats (+1.0 nats in each",
                 "after 63,488 tokens 50% and 51% right, -1.0 points in each of 5 pairs", "-0.100 nats within",
                 "fox-pro takes 0.49 times the GPU-hours of transformer-pro", "0.99 times the steps, each 0.50 times as long (",
                 "means of 5 pairs of repeats on one, both", "changes by +0.600 nats of fox-pro, by +0.500", "skips 60% of attention's blocks",
                 "fox-llama minus transformer-llama -0.2500 nats in 2 pairs, too few to say more, beyond the training length -0.2500",
                 "**One thing changed,** validation loss: fox-pro-bias256 minus fox-pro +0.1000 nats in 1 pair, too",
                 "mamba2 (2) 2.250 and 3.000, hgrn2 (2) 2.500 and 3.000, deltanet (2) 2.125 and 3.000, fox-pro (3) 2.000 and 3.000, tr",
                 "the best of them. Below 1% right: fox-pro (diverged). Right at", "at 8 times this length: fox-pro-long 75.0 and 50.0%, fox-llama 50.0 and 25.0% (", "by at most 0.001000 nats and takes 2.0 times as long (mean of 5 runs)",
                 "The median of all heads is 20.0 tokens; 0% are below 16, 50% above 1,000"):
    assert sentence in text, sentence
again = {row[0]: row[1:] for row in rows(text, "noise")}
assert again["confirm_fox-pro_1e-3"] == ["1.2500", "1.5000", "+0.2500", "0.0424"], again  # repeats differ by 0.0141
assert again["fox-pro-rope_11"][:3] == ["1.8000", "1.8100", "+0.0100"], again
pairs = {row[0]: row[1:] for row in rows(text, "pairs")[2:]}
assert pairs["fox-llama minus transformer-llama"] == ["2", "-0.2500", "-0.2500", "-0.2500", "4.00 (2)"], pairs
assert pairs["6 more"][:2] == ["", "no run yet"], pairs
families = {row[0]: row[1:] for row in rows(text, "families")[2:]}
assert families["deltanet"] == ["0.001", "2.1250", "2.1250", "3.0000", "60.0", "3,264"], families
assert families["2 more"][:2] == ["no run yet", ""], families
assert rows(text, "overwritten_keys")[2:] == [["over-fox-llama_5e-4", "1K", *row] for row in (
    ["0", "0.0", "25.0"], ["1", "50.0", "25.0"])], rows(text, "overwritten_keys")
assert rows(text, "overwritten")[2][:3] == ["over-fox-pro_2e-3", "2e-3", "diverged"], rows(text, "overwritten")
assert "learning rates were chosen: -0.1000, of the others: -0.1000." in text
# copies of the second study's models, of three seeds and more
falls = {"fox-pro-4heads": 1.5, "transformer-pro-4heads": 1.75, "fox-pro-rope": 0.5, "fox-pro-long": 2.5, "fox-pro-long64": 3,
         "fox-pro-T2981": 1}
for name, fall in falls.items():
    for seed in (11, 12, 13):
        copies = [{"segment": 64, "gap": gap, "samples": 1, "fall": fall} for gap in (256, 4096, 16384)]
        write({**result(f"{name}_{seed}", seed, 2, 2.5, 1), "tasks": {"copy": plan.packed(copies)}})
assert run().returncode == 0
text = PAGE.read_text()
assert rows(text, "copies")[0] == ["", "256", "4,096", "16,384"], rows(text, "copies")
copies = {row[0]: row[1:] for row in rows(text, "copies")[2:]}
assert len(copies) == 9 and copies["fox-pro-T2981 minus fox-pro"] == ["-1.000 ± 0.000"] * 3, copies
assert "Recall of other models" not in text  # nothing after 65,536 tokens
for name in (*falls, "fox-pro"):
    for seed in (11, 12, 13):
        was = json.loads((RESULTS / f"{name}_{seed}.json").read_text())
        copies = [{**row, "gap": 65536 if row["gap"] == 256 else row["gap"]} for row in plan.unpacked(was["tasks"]["copy"])]
        write({**was, "tasks": {**was["tasks"], "copy": plan.packed(copies)}})
assert run().returncode == 0
assert "after 4,096 tokens -0.250 nats in each of 3 pairs; after 16,384: -0.250 nats in each of 3 pairs. fox-pro-rope minus " \
    "transformer-pro after 16,384: -0.500 nats in each" in PAGE.read_text()
assert "plain ones after 65,536: fox-pro-long +0.500 nats in each of 3 pairs; fox-pro-long64 +1.000" in PAGE.read_text()
# a result of other options, or of a learning rate that is not the best one any more, is an error
wrong = changed("confirm_fox-pro_5e-4", options=options("confirm_fox-pro_1e-3"))
assert "confirm_fox-pro_5e-4: was not trained with the options of runs.txt: 1e-3 in place of 5e-4" in run().stderr
write(wrong)
write(result("lr_fox-pro_5e-4", 1, 3, 3, 1, 5e-4))
better = changed("lr_fox-pro_1e-3", val_loss=1)
assert "was trained at 2e-3, and the best of fox-pro is" in run().stderr, run().stderr
write(better)
(RESULTS / "lr_fox-pro_5e-4.json").unlink()
# a sentence is left out with what it needs, and the page is still written
several = {member: None for member in ("unpruned", "maps", "half_lives", "pruned_shares")}
before = [changed(f"fox-pro_{seed}", tasks={}, shared_gpu=True, **several) for seed in range(11, 16)]
file = RESULTS / "lr_fox-pro_2e-3.json"
rate = file.read_text()
file.unlink()
done = run()
assert done.returncode == 0, done.stderr
left = PAGE.read_text().partition("<!-- table findings -->")[2].partition("<!-- end -->")[0]
for sentence in ("Learning rates", "Recall", "Conflict", "Pruning", "Half-lives"):
    assert f"**{sentence}" in text and f"**{sentence}" not in left, sentence
assert "**Loss,**" in left and "**MQAR" in left, left
file.write_text(rate)
for r in before:
    write(r)
assert rows(text, "needles")[3] == ["16,384", *["50 and 51"] * 2, "-1 ± 0"], rows(text, "needles")
assert rows(text, "context")[4][1:4] == ["5", "-0.1000 ± 0.0000", "+0.0000 ± 0.0000"], rows(text, "context")
assert rows(text, "context")[5] == ["the same, transformer-pro behind 1,024", "5", "", "+0.5000 ± 0.0000"], rows(text, "context")
assert ["1e-3", "2", "-0.2500", "-0.2500", "+0.0000"] in rows(text, "lead_rates")[5:], rows(text, "lead_rates")
if "no matplotlib" not in drawn.stdout:
    assert all((FOLDER / f"study/{name}.svg").exists() for name in ("loss", "position", "tasks", "needles", "gates"))
    assert "fox-pro, 5 seeds" in (picture := (FOLDER / "study/position.svg").read_text()) and "fox-pro-long" not in picture

assert measures.holm([0.01, 0.04, 0.03]) == [0.03, 0.06, 0.06]
low, high = measures.by_package([1, 1, 3, 3], ["a", "a", "b", "b"])
assert (low, high) == (1, 3), (low, high)


# the second study's rules: nothing without three seeds, and each answer from differences that have it
class Runs:
    def __init__(self, **losses):
        self.losses = {"fox_pro": (-0.04, -0.05, -0.06), "transformer_pro": (0, 0, 0), **losses}

    def both(self, *names):
        found = (self.losses.get(name.replace("-", "_"), ()) for name in names)
        return [tuple(result("fox-pro_11", 11 + k, loss, loss, 1) for loss in both) for k, both in enumerate(zip(*found))]


def answers(**losses):
    found = registered.answers(Runs(**losses))
    return [a and a[0] for _, _, (a, *_) in found]


gate = {"fox_pro_rope": (-0.03, -0.031, -0.032), "transformer_pro_norope": (0.1, 0.09, 0.11)}
assert answers() == [None] * 7
assert answers(fox_pro_rope=(-0.03, -0.03), transformer_pro_norope=(0, 0)) == [None] * 7
assert answers(**gate)[0] == "the gate's"
assert answers(**{**gate, "fox_pro_rope": (-0.02, -0.021, -0.022)})[0] == "both, or neither alone"  # less than half of it
assert answers(**{**gate, "fox_pro_rope": (-0.1, 0.01, -0.03)})[0] == "both, or neither alone"  # half of it, not shown
assert answers(fox_pro_rope=(0, 0.001, 0), transformer_pro_norope=(-0.03, -0.031, -0.029))[0] == "the missing RoPE's"
assert answers(fox_pro_bias16384=(-0.02, -0.031, -0.042))[1] == "yes"
assert answers(fox_pro_bias16384=(-0.06, -0.071, -0.082))[1] == "not shown"  # lower than fox-pro
assert "37% of the lead" in registered.data(Runs(fox_pro_bias16384=(-0.02, -0.031, -0.044)), measures.loss_within)[1]
assert "lead" not in registered.data(Runs(fox_pro_bias16384=(-0.06, -0.071, -0.082)), measures.loss_within)[1]
assert answers(transformer_pro_4heads=(-0.02, -0.021, -0.022))[2] == "yes"
assert answers(transformer_pro_4heads=(0.02, 0.021, 0.022))[2] == "not shown"
four = {"transformer_pro_4heads": (-0.02, -0.021, -0.022)}
assert answers(**four, fox_pro_4heads=(-0.05, -0.051, -0.052))[3] == "yes"
assert answers(**four, fox_pro_4heads=(-0.05, -0.021, 0.01))[3] == "not shown"
assert answers(transformer_pro_base1e4=(-0.02,))[4] == "seeds 12 and 13 follow"
assert answers(transformer_pro_base1e4=(-0.009,))[4] == "not by more than 0.01 on one seed"
assert answers(transformer_pro_base1e4=(0.12,))[4] == "higher on one seed"
assert answers(transformer_pro_base1e4=(-0.02, -0.021, -0.022))[4] == "yes"
five = {"fox_pro": (-0.04, -0.05, -0.06, -0.05, -0.05), "transformer_pro": (0,) * 5}
assert answers(**five, fox_pro_1e_3=(-0.05, -0.06, -0.07))[5] is None
for change, answer in ((-0.01, "1e-3"), (0.01, "5e-4"), (0, "either")):
    near = [loss + change + 0.001 * (-1) ** k for k, loss in enumerate(five["fox_pro"])]
    assert answers(**five, fox_pro_1e_3=near)[5] == answer, change
starts = {"fox_pro_long": (-0.03, -0.04, -0.05), "fox_pro_long64": (-0.035, -0.05, -0.065), "fox_pro_T2981": (-0.02, -0.05, -0.07)}
assert answers(**starts)[6] == "fox-pro-long64"  # the first is shown to be higher, the last 0.003 and not the lowest
assert answers(**{**starts, "fox_pro_long64": (0, -0.05, -0.06), "fox_pro_T2981": (0, 0, 0)})[6] == "none"
assert registered.sentence(Runs()) == ""
assert registered.lines(Runs(fox_pro_long=(0, 0, 0)))[-1].endswith("| runs are missing |  |")
assert registered.sentence(Runs(**gate)) == "Is the lead the gate's, or the missing RoPE's? The gate's within the training length, the gate's beyond it."

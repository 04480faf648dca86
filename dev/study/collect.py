#!/usr/bin/env python3
"""
Writes what a run of the study leaves, one JSON file of at most 30 KB:

    dev/study/collect.py FOLDER CORPUS OUT.json

FOLDER is run.py's of the run: line.json, run/log.jsonl, eval.json, and what else was measured. CORPUS is the prefix of
the shards. Members, where they were measured:

    name, measures, options          of the line of runs.txt, its learning rate chosen; missing: measures that failed
    seed, lr, corpus                 corpus: the name that CORPUS.json gives it
    device, driver, version          of the machine and the program; resumed: how often the run was interrupted
    shared_gpu                       true: another program was seen on the GPU: losses count, times do not
    config, parameters
    val_loss                         the last validation's
    curve                            of every SPAN steps: the last step, the mean training loss, hours of all steps so
                                     far, share of attention that was pruned
    validations                      step, hours, loss, loss by octave of the position (1, 2, 4 and so on)
    pruned_by_layer                  of the last step
    half_lives                       {step: [layer: [head: tokens]]}
    pruned_shares                    {step: [layer: mean over its heads]}, of --maps
    gates                            of the last of these steps: bias [layer: [head]], and mean and sd [layer: [head]] over
                                     the tokens of w_f a, the part of log f / (1 - f) that depends on the data
    maps                             the other tables of --maps, of the last step; pruned_share_acp: by ACP's own rule
    eval, unpruned, window, yarn     mean, error, P(l), L(i) in bins, and by document the losses in SPANS of positions
                                     and of the last targets behind each context; the last three: the means alone
    tasks                            {task: its means, as plan.packed() has them}

A run of `short` has, instead of eval:

    intact                           of documents that stand alone in their rows: loss_mean, targets; documents: the mean
                                     loss of each; octaves, by_octave, octave_targets: of spans of the position

In a run of a task, corpus is the options of its data, validations have the accuracy, and instead of eval there is

    tests                            {data set: targets, accuracy, loss}
"""
import datetime
import json
import math
import statistics
import struct
import subprocess
from pathlib import Path

import plan
from plan import Error, read_json
from common import Parser, counted, log_line, run, write_file

SPAN = 64  # steps
BINS = 6  # bins of L(i) an octave
SPANS = 1024, 4096, 16384, 32768, 65536  # ends of the positions by which a document's losses are kept


def rounded(value, digits=4):
    """With the numbers in lists and objects rounded; not finite: null."""
    if isinstance(value, float):
        return round(value, digits) if math.isfinite(value) else None
    if isinstance(value, list):
        return [rounded(v, digits) for v in value]
    if isinstance(value, dict):
        return {k: rounded(v, digits) for k, v in value.items()}
    return value


def significant(x):
    """With three digits, without a decimal point from 100 on."""
    if not math.isfinite(x):
        return None
    return int(float(f"{x:.3g}")) if abs(x) >= 100 else float(f"{x:.3g}")


def read_log(path):
    """(first run event, number of run events, {step: event}, [validation])."""
    starts, steps, validations = [], {}, {}
    with open(path, "rb") as f:
        for number, text in enumerate(f, 1):
            line = log_line(path, number, text)
            kind = line and line["event"]
            if kind == "run":
                starts.append(line)
            elif kind == "step":
                steps[line["step"]] = line  # of a step that was repeated after an interruption, the last
            elif kind == "validation":
                validations[line["step"]] = line
    if not starts or not validations:
        raise Error(f"{path}: no run that has measured its loss")
    for start in starts:
        if (start["version"], start["device"]) != (starts[0]["version"], starts[0]["device"]):
            raise Error(f"{path}: went on with another program or on another GPU: its times are not those of one run")
    return starts[0], len(starts), steps, [validations[step] for step in sorted(validations)]


def curve_of(steps):
    """Rows (step, loss, hours, pruned), and {step: hours}."""
    hours, total, rows, span = {}, 0, [], []
    for step in sorted(steps):
        event = steps[step]
        total += event["ms"] / 3.6e6
        hours[step] = total
        span.append(event["loss"] if event["loss"] is not None else math.nan)
        if step % SPAN == 0:
            rows.append([step, rounded(sum(span) / len(span)), rounded(total, 6), rounded(event.get("pruned"), 3)])
            span = []
    return rows, hours


def binned(losses):
    """[[last position of the bin, mean loss]]: BINS an octave."""
    ends = sorted({min(len(losses), round(2**(k / BINS))) for k in range(32 * BINS)})
    return [[end, rounded(sum(losses[begin:end]) / (end - begin))] for begin, end in zip([0, *ends], ends)]


def spanned(documents):
    """(ends of the spans, [a document: [mean loss in each]]) of --eval's losses by octave."""
    octaves, table = documents["octaves"], []
    ends = [end for end in SPANS if end in octaves] or [octaves[-1]]
    for row in documents["loss"]:
        sums = [(end, loss * (end - begin)) for begin, end, loss in zip(octaves, octaves[1:], row)]
        table.append([sum(s for at, s in sums if begin < at <= end) / (end - begin)
                      for begin, end in zip([0, *ends], ends)])
    return ends, table


def evaluation(path, positions):
    e = read_json(path)
    out = {name: rounded(e.get(name), 6) for name in
           ("seq_len", "sequences", "loss_mean", "standard_error", "perplexity", "tokens_per_second")}
    documents = e.get("documents")
    if positions:
        out.update(loss=binned(e["loss"]), pruned=rounded(e.get("pruned")))
    if positions and documents:
        ends, table = spanned(documents)
        out["documents"] = {"ends": ends, "loss": rounded(table, 3), "contexts": documents["contexts"],
                            "last_targets": documents["last_targets"], "last_loss": rounded(documents["last_loss"], 3)}
    return out


def intact(path):
    """The study's numbers from a file of --eval on documents with a mask."""
    e = read_json(path)
    d = e["documents"]
    total = lambda losses, targets: sum(loss * n for loss, n in zip(losses, targets) if n) / (sum(targets) or math.nan)
    columns = list(zip(zip(*d["loss"]), zip(*d["targets"])))
    return {"loss_mean": rounded(e["loss_mean"], 6), "targets": e["targets"], "pruned": rounded(e.get("pruned")),
            "documents": [rounded(total(*row)) for row in zip(d["loss"], d["targets"])], "octaves": d["octaves"][1:],
            "by_octave": [rounded(total(*column), 5) for column in columns],
            "octave_targets": [sum(targets) for _, targets in columns]}


def tested(path):
    e = read_json(path)
    return {"targets": e["targets"], "accuracy": rounded(e["accuracy"]), "loss": rounded(e["loss_mean"])}


def tensors_of(path):
    """A function of a tensor's name in a safetensors file: its numbers, row by row, and its shape."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])

    def tensor(name):
        entry = header[name]
        begin, end = entry["data_offsets"]
        kind = {"F32": "f", "F64": "d", "I32": "i"}[entry["dtype"]]
        return struct.unpack(f"<{math.prod(entry['shape'])}{kind}", data[8 + size + begin : 8 + size + end]), entry["shape"]
    return tensor


def read_maps(path):
    """{name: [layer: [head]]} of the tables of a file of --maps."""
    tensor, tables = tensors_of(path), {}
    for name in ("half_life", "pruned_share", "effective_window"):
        flat, (layers, heads) = tensor(name)
        tables[name] = [[significant(x) for x in flat[i * heads : (i + 1) * heads]] for i in range(layers)]
    return tables


def gates_of(maps, checkpoint):
    """The bias of each gate, and mean and sd of w_f a = log(f / (1 - f)) - bias over the text of --maps; None: the gates
    do not depend on the data. maps, checkpoint: files of the same step."""
    weights, tensor = tensors_of(checkpoint), tensors_of(maps)
    layers, (_, heads) = tensor("layers")[0], tensor("half_life")[1]
    gates = {"bias": [], "mean": [], "sd": []}
    for layer in layers:
        try:
            bias, _ = weights(f"model.layers.{layer}.attn.fgate_proj.bias")
        except KeyError:
            return None
        parts = []
        for head in range(heads):
            sums, _ = tensor(f"{layer}.{head}.cum_logf")
            steps = [after - before for before, after in zip(sums, sums[1:])]
            parts.append([x - math.log(-math.expm1(x)) - bias[head] for x in steps if x < 0])
        gates["bias"].append([rounded(b) for b in bias])
        gates["mean"].append([rounded(statistics.fmean(part)) if part else None for part in parts])
        gates["sd"].append([rounded(statistics.pstdev(part)) if part else None for part in parts])
    return gates


def driver():
    try:
        return subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], check=True,
                              capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def collect(folder, corpus):
    line = read_json(folder / "line.json")
    data = line.pop("data", None)
    first, starts, steps, validations = read_log(folder / "run/log.jsonl")
    curve, hours = curve_of(steps)
    last = steps[max(steps)]
    maps = {p.stem.removeprefix("maps_step_").lstrip("0"): read_maps(p)
            for p in sorted(folder.glob("maps_*.safetensors"))}
    result = {
        **line, "seed": first["options"]["seed"], "lr": first["options"]["lr"],
        "corpus": data or read_json(f"{corpus}.json")["name"], "device": first["device"], "driver": driver(),
        "started": first["started"], "collected": datetime.datetime.now(datetime.timezone.utc).strftime("%FT%TZ"),
        "version": first["version"], "resumed": starts - 1, "config": first["config"],
        "parameters": first["parameters"], "non_embedding": first["non_embedding"], "steps": first["num_steps"],
        "val_loss": validations[-1]["val_loss"], "curve": curve,
        "validations": [{"step": v["step"], "hours": rounded(hours[v["step"]], 6), "loss": rounded(v["val_loss"], 5),
                         **({"accuracy": rounded(v["accuracy"])} if data else
                            {"by_octave": [rounded(p["loss"]) for p in v["by_position"]]})}
                        for v in validations if v["step"] in hours],
        "pruned_by_layer": rounded(last.get("pruned_by_layer"), 3),
        "half_lives": {step: m["half_life"] for step, m in maps.items()},
        "pruned_shares": {step: [rounded(statistics.fmean(heads), 3) for heads in m["pruned_share"]]
                          for step, m in maps.items()},
        "maps": maps and {name: maps[max(maps, key=int)][name] for name in ("pruned_share", "effective_window")}}
    if maps:
        step = max(maps, key=int)
        name = f"step_{int(step):08}"
        result["gates"] = gates_of(folder / f"maps_{name}.safetensors", folder / "run" / name / "model.safetensors")
    if maps and (folder / "acp.safetensors").exists():
        result["maps"]["pruned_share_acp"] = read_maps(folder / "acp.safetensors")["pruned_share"]
    if data:
        result["tests"] = {p.stem.removeprefix("eval_"): tested(p) for p in sorted(folder.glob("eval_*.json"))}
    elif line["measures"] == "short":
        result["intact"] = intact(folder / "eval.json")
    else:
        result["eval"] = evaluation(folder / "eval.json", True)
    for name in "unpruned", "window", "yarn":
        if (folder / f"{name}.json").exists():
            result[name] = evaluation(folder / f"{name}.json", False)
    result["tasks"] = {p.stem: plan.packed(rounded(read_json(p)["means"], 3))
                       for p in sorted((folder / "tasks").glob("*.json"))}
    return result


def text_of(result):
    """A member a line, lists of numbers without spaces."""
    dump = lambda value: json.dumps(value, separators=(",", ":"))
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {dump(value)}" for name, value in result.items()) + "\n}\n"


def main():
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("corpus", metavar="CORPUS")
    parser.add_argument("out", metavar="OUT.json")
    options = parser.parse_args()
    text = text_of(collect(options.folder, options.corpus))
    write_file(options.out, text)
    print(f"{options.out}: {counted(len(text), 'byte')}")


if __name__ == "__main__":
    run(main)

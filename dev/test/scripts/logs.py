"""Makes the logs of test_compare.sh and test_follow.sh, and reads what follow.py made of them.

    logs.py runs FOLDER         two families x three seeds, and a run at another learning rate, whose numbers
                                test_compare.sh knows; one was killed and resumed. Results of --eval: beside
                                the logs of the first family, in FOLDER.eval of the second
    logs.py gates FOLDER        runs with gates, their checkpoints, maps.safetensors of one; checks what
                                half-lives compare.py reads (scripts/eval/runs.py)
    logs.py still FOLDER        runs whose gates are as they started, zero and long, and one whose gates moved
    logs.py many FOLDER         three seeds of nine learning rates, with many steps
    logs.py cut LOG BYTES       the first BYTES of LOG
    logs.py events FOLDER LOG   checks TensorBoard's events in FOLDER: each step of LOG once, the later of two
"""
import json
import math
import os
import struct
import sys


def run_line(model, seed, lr, step, **more):
    options = {"model": model, "set": [], "lr": lr, "seed": seed, "data": "d", "save-every": seed,
               "max-tokens": 10000}
    config = {"hidden_size": 64, "use_rope": model != "fox"}
    return {"event": "run", "step": step, "started": "2026-01-02T03:04:05Z", "host": "h", "device": "A GPU",
            "ranks": 2, "version": "1a", "compiler": "c", "built_with": "b", "seed": seed, "num_steps": 100,
            "micro_batch": 1, "parameters": 9, "non_embedding": 9, "flops_per_token": 1e6,
            "attention_flops_per_token": 2e5, "peak_flops_per_s": 0, "options": options,
            **{"config": config, **more}}


def step_line(step, loss, model):
    line = {"event": "step", "step": step, "tokens": 100 * step, "loss": loss, "grad_norm": None, "lr": 1e-3,
            "ms": 36000, "tokens_per_s": 100 / 36, "eta_s": 1}
    return {**line, "pruned": 0.5, "pruned_by_layer": [0.25, 0.75]} if model == "fox" else line


def validation_line(step, loss):
    rows = [{"from": i, "to": i + 1, "tokens": 1, "loss": loss + 1 - 2 * i} for i in range(2)]
    return {"event": "validation", "step": step, "val_tokens": 2, "val_loss": loss, "ms": 72000,
            "by_position": rows}


def make(folder, name, model, seed, loss, lr=1e-3, killed=False):
    lines = [run_line(model, seed, lr, 0)]
    if killed:  # at step 60, with a checkpoint of step 50
        lines += [step_line(i, 99, model) for i in range(1, 61)]
        lines += [run_line(model, seed, lr, 50), {"event": "resume", "step": 50, "text": "at"}]
        lines[1:51] = [step_line(i, loss + 10 / i, model) for i in range(1, 51)]
    lines += [step_line(i, loss + 10 / i, model) for i in range(51 if killed else 1, 101)]
    lines += [validation_line(100, loss), {"event": "checkpoint", "step": 100, "text": "c", "waited_ms": 1}]
    os.makedirs(f"{folder}/{name}")
    with open(f"{folder}/{name}/log.jsonl", "w") as f:
        for line in lines:
            f.write(json.dumps(line) + "\n")
            if line["event"] == "resume":
                f.write('{"event": "st\n')


def make_eval(path, checkpoint, loss, length):
    result = {"loss": [loss] * length, "perplexity": {"128": loss + 5, str(length): loss + 4},
              "trained_seq_len": 128, "checkpoint": checkpoint, "loss_error_window": 101,
              "loss_error": [0.1] * length}
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as f:
        json.dump(result, f)


def make_runs(folder):
    for seed, loss in (1, 2.0), (2, 2.1), (3, 2.2):
        make(folder, f"fox{seed}", "fox", seed, loss, killed=seed == 2)
        make(folder, f"transformer{seed}", "transformer", seed, loss + 0.5)
        make_eval(f"{folder}/fox{seed}/eval.json", None, loss, 256)
        path = f"{folder}.eval/transformer{seed}.json"
        make_eval(path, f"{folder}/transformer{seed}/step_100", loss + 0.5, 256)
    make(folder, "other", "fox", 1, 1.5, lr=2e-3)


def write_tensors(path, tensors, metadata=None):
    """Rows of floats, of "layers" integers, as a safetensors file: {name: [row]}"""
    header, data = {"__metadata__": metadata or {}}, b""
    for name, rows in tensors.items():
        values = [x for row in rows for x in row]
        code, dtype = ("i", "I32") if name == "layers" else ("f", "F32")
        new = data + struct.pack(f"<{len(values)}{code}", *values)
        shape = [len(rows), len(rows[0])] if len(rows) > 1 else [len(rows[0])]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(new)]}
        data = new
    text = json.dumps(header).encode()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def check_gates(folder):
    sys.path.insert(0, "scripts/eval")
    import runs as read
    gate = {"full": "fgate_proj.bias", "fixed": "fgate_bias"}
    for name, kind in ("full", "full"), ("fixed", "fixed"), ("mapped", "full"):
        config = {"fgate_type": kind, "num_hidden_layers": 2}
        os.makedirs(f"{folder}/{name}")
        with open(f"{folder}/{name}/log.jsonl", "w") as f:
            f.write(json.dumps(run_line("fox", 1, 1e-3, 0, config=config)) + "\n")
            f.write(json.dumps(step_line(1, 2, "fox")) + "\n")
        for step, shift in (1, 9), (2, 0):  # the newest counts
            biases = {f"model.layers.{i}.attn.{gate[kind]}": [[shift, shift + i + 1]] for i in range(2)}
            write_tensors(f"{folder}/{name}/step_{step:08d}/model.safetensors", biases)
    maps, checkpoint = f"{folder}/maps.safetensors", f"{folder}/mapped/step_00000002"
    write_tensors(maps, {"half_life": [[1, 2], [3, math.inf]], "layers": [[1, 3]]}, {"checkpoint": checkpoint})
    full, fixed, mapped = runs = [read.Log(f"{folder}/{name}") for name in ("full", "fixed", "mapped")]
    read.read_half_lives(runs, [maps])
    assert mapped.half_lives == [[], [1, 2], [], [3, math.inf]], mapped.half_lives
    for run in full, fixed:  # sigmoid(bias)^half_life = 1/2
        halves = [[(1 + math.exp(-b))**-life for b, life in zip((0, i + 1), layer)]
                  for i, layer in enumerate(run.half_lives)]
        assert [len(layer) for layer in halves] == [2, 2], halves
        assert all(abs(h - 0.5) < 1e-6 for layer in halves for h in layer), halves

    # a stack is named by its pattern, and its layers without gates are left out
    kinds = ["deltanet", "deltanet", "attention:window=64", "deltanet", "deltanet", "attention:window=64"]
    os.makedirs(f"{folder}/stack")
    with open(f"{folder}/stack/log.jsonl", "w") as f:
        config = {"fgate_type": "full", "num_hidden_layers": 6, "layer_types": kinds}
        f.write(json.dumps(run_line("fox", 1, 1e-3, 0, config=config)) + "\n" + json.dumps(step_line(1, 2, "fox")) + "\n")
    write_tensors(f"{folder}/stack/step_00000001/model.safetensors",
                  {f"model.layers.{i}.attn.fgate_proj.bias": [[0, i]] for i in (2, 5)})
    stack = read.Log(f"{folder}/stack")
    assert stack.read_gates() and [life[:1] for life in stack.half_lives] == [[], [], [1]] * 2, stack.half_lives
    assert stack.settings()[1]["config.layer_types"] == "deltanet*2,attention:window=64", stack.settings()
    assert [read.pattern(list(kinds)) for kinds in ("aba", "aab", "abaab", "aaa")] == [
        "a,b", "a*2,b", "a,b,a", "a"]


def make_still(folder):
    gate = {"fgate_type": "full", "num_hidden_layers": 1, "num_heads": 3, "fgate_bias_init": False}
    long = {**gate, "fgate_bias_init": True, "decay_time_min": 2, "decay_time_max": 512}
    start = [-math.log(math.expm1(1 / t)) for t in (2, 32, 512)]
    for name, config, biases in (("zero", gate, [0, 0.05, -0.05]), ("long", long, [b + 0.05 for b in start]),
                                 ("moved", {**long, "rope_base": 1}, [*start[:2], start[2] + 0.2])):
        os.makedirs(f"{folder}/{name}")
        with open(f"{folder}/{name}/log.jsonl", "w") as f:
            f.write(json.dumps(run_line("fox", 1, 1e-3, 0, config=config)) + "\n")
            f.write("".join(json.dumps(step_line(i, 3 - i, "transformer")) + "\n" for i in range(1, 3)))
        write_tensors(f"{folder}/{name}/step_2/model.safetensors",
                      {"model.layers.0.attn.fgate_proj.bias": [biases]})


def make_many(folder):
    for k in range(27):
        lr, seed = (k // 3 + 1) / 1000, k % 3
        os.makedirs(f"{folder}/{k:02}")
        with open(f"{folder}/{k:02}/log.jsonl", "w") as f:
            f.write(json.dumps(run_line("fox", seed, lr, 0, flops_per_token=1e9 * (1 + lr * 100))) + "\n")
            for i in range(1, 1001):
                loss = 2 + 1 / i + lr * 100 + (seed + 1) * math.sin(i * i)
                line = {**step_line(i, loss, "transformer"), "ms": 36e6 * lr}
                f.write(json.dumps(line) + "\n")
                if i % 100 == 0:
                    f.write(json.dumps(validation_line(i, loss)) + "\n")


def cut(path, count):
    with open(path, "rb") as f:
        sys.stdout.buffer.write(f.read(int(count)))


def check_events(folder, log):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(folder, size_guidance={"scalars": 0})
    events.Reload()
    steps, validations = {}, {}
    for text in open(log):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line["event"] == "step":
            steps[line["step"]] = line["loss"]
        if line["event"] == "validation":
            validations[line["step"]] = line["val_loss"]

    def near(got, want):
        return [e.step for e in got] == sorted(want) and all(abs(e.value - want[e.step]) < 1e-5 for e in got)

    assert near(events.Scalars("train/loss"), steps), [e.step for e in events.Scalars("train/loss")]
    assert near(events.Scalars("validation/val_loss"), validations)
    assert [e.value for e in events.Scalars("pruned/layer_01")] == [0.75] * len(steps)
    assert "train/grad_norm" not in events.Tags()["scalars"] and "train/ms" not in events.Tags()["scalars"]
    times = [e.wall_time for e in events.Scalars("train/loss")]
    assert abs(times[49] - times[0] - 49 * 36) < 1e-3, times[:50]


if __name__ == "__main__":
    commands = {"runs": make_runs, "gates": check_gates, "still": make_still, "many": make_many, "cut": cut,
                "events": check_events}
    commands[sys.argv[1]](*sys.argv[2:])

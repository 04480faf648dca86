"""Makes the logs of test_compare.sh, and reads what follow.py made of them.

    logs.py runs FOLDER            two families x three seeds and a run at another learning rate, with numbers that
                                   test_compare.sh knows; one of them was killed and resumed
    logs.py cut LOG BYTES          the first BYTES of LOG
    logs.py events FOLDER LOG      checks TensorBoard's events in FOLDER: every step of LOG once, the later line of two
"""
import json
import os
import sys


def run_line(model, seed, lr, step, **more):
    options = {"model": model, "set": [], "lr": lr, "seed": seed, "data": "d", "save-every": seed, "max-tokens": 10000}
    config = {"hidden_size": 64, "use_rope": model != "fox"}
    return {"event": "run", "step": step, "started": "2026-01-02T03:04:05Z", "host": "h", "device": "A GPU", "ranks": 2,
            "version": "1a", "compiler": "c", "built_with": "b", "seed": seed, "num_steps": 100, "micro_batch": 1,
            "parameters": 9, "non_embedding": 9, "flops_per_token": 1e6, "attention_flops_per_token": 2e5,
            "peak_flops_per_s": 0, "config": config, "options": options, **more}


def step_line(step, loss, model):
    line = {"event": "step", "step": step, "tokens": 100 * step, "loss": loss, "grad_norm": None, "lr": 1e-3, "ms": 36000,
            "tokens_per_s": 100 / 36, "eta_s": 1}
    return {**line, "pruned": 0.5, "pruned_by_layer": [0.25, 0.75]} if model == "fox" else line


def validation_line(step, loss):
    rows = [{"from": 0, "to": 1, "tokens": 1, "loss": loss + 1}, {"from": 1, "to": 2, "tokens": 1, "loss": loss - 1}]
    return {"event": "validation", "step": step, "val_tokens": 2, "val_loss": loss, "ms": 72000, "by_position": rows}


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


def make_runs(folder):
    for seed, loss in (1, 2.0), (2, 2.1), (3, 2.2):
        make(folder, f"fox{seed}", "fox", seed, loss, killed=seed == 2)
        make(folder, f"transformer{seed}", "transformer", seed, loss + 0.5)
    make(folder, "other", "fox", 1, 1.5, lr=2e-3)


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
    near = lambda got, want: [e.step for e in got] == sorted(want) and all(abs(e.value - want[e.step]) < 1e-5 for e in got)
    assert near(events.Scalars("train/loss"), steps), [e.step for e in events.Scalars("train/loss")]
    assert near(events.Scalars("validation/val_loss"), validations)
    assert [e.value for e in events.Scalars("pruned/layer_01")] == [0.75] * len(steps)
    assert "train/grad_norm" not in events.Tags()["scalars"] and "train/ms" not in events.Tags()["scalars"]
    times = [e.wall_time for e in events.Scalars("train/loss")]
    assert abs(times[49] - times[0] - 49 * 36) < 1e-3, times[:50]


if __name__ == "__main__":
    {"runs": make_runs, "cut": cut, "events": check_events}[sys.argv[1]](*sys.argv[2:])

"""What faults.py and torture.py share: a small run of a trainer, and what is true of its folder whenever it ends."""

import json, os, re, sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
import cli_files

SEQUENCES = 4  # of 16 tokens, in a step
MODEL = (
    "--model fox-pro-nano --set hidden_size=16 --set num_hidden_layers={layers} --set num_heads=2 "
    "--set intermediate_size=16 --seq-len 16 --batch-tokens 64 --warmup-tokens 640"
)
FILES = ("config.json", "model.safetensors", "optimizer.safetensors", "configuration_fox.py", "modeling_fox.py",
         "generation_config.json", "README.md", "tokenizer.json", "tokenizer_config.json")  # fmt: skip


def options(steps, layers=1):
    return MODEL.format(layers=layers).split() + ["--max-tokens", str(steps * SEQUENCES * 16)]


def make_data(folder):
    """Two shards to train on, and one to validate."""
    os.makedirs(folder)
    ids = cli_files.tokens(1200, 257)
    for name, part in (("train_0", ids[:600]), ("train_1", ids[600:]), ("val", cli_files.tokens(80, 257))):
        cli_files.shard(os.path.join(folder, name + ".bin"), part, vocab=257)


def data_options(folder):
    return ["--shuffle", "--data", folder + "/train_*.bin", "--val-data", folder + "/val.bin"]


def step_folder(out, step):
    return os.path.join(out, f"step_{step:08d}")


def steps(out):
    """The steps of the checkpoints with a final name."""
    names = os.listdir(out) if os.path.isdir(out) else []
    return sorted(int(name[5:]) for name in names if name.startswith("step_"))


def read(path):
    with open(path, "rb") as f:
        return f.read()


def checkpoint(folder):
    """All that a checkpoint holds, but for the options, which differ between the commands of a run, and for the checksum of
    trainer.json, where they are."""
    record = json.loads(read(os.path.join(folder, "trainer.json")))
    del record["options"]
    record["checksums"].pop("trainer.json", None)
    return [read(os.path.join(folder, name)) for name in FILES] + [record, sorted(os.listdir(folder))]


def check_checkpoints(out, reference):
    """A folder with a final name is, byte for byte, the undisturbed run's checkpoint of that step."""
    for step in steps(out):
        same = checkpoint(step_folder(out, step)) == checkpoint(step_folder(reference, step))
        assert same, f"step {step} differs from the undisturbed run"


def log_losses(out):
    """Returns {step: loss} of log.jsonl, and the number of lines that are cut."""
    losses, cut = {}, 0
    for line in read(os.path.join(out, "log.jsonl")).split(b"\n")[:-1]:
        try:
            event = json.loads(line)
        except ValueError:
            cut += 1
            continue
        if event["event"] == "step":
            losses[event["step"]] = event["loss"]
    return losses, cut


def check_end(out, reference, last, most_cut):
    """The run in `out` has ended as the undisturbed one. It leaves no temporary folder but a superfluous checkpoint that
    it could not remove. At most most_cut lines of its log are cut, and its losses are the undisturbed run's."""
    assert steps(out)[-1:] == [last], f"ends with checkpoints {steps(out)}"
    check_checkpoints(out, reference)
    known = r"lock|log\.jsonl|step_\d+|\.tmp-step_\d+\.old"
    left = [name for name in os.listdir(out) if not re.fullmatch(known, name)]
    assert not left, f"leaves {left}"
    losses, cut = log_losses(out)
    expected, _ = log_losses(reference)
    assert cut <= most_cut, f"{cut} lines of log.jsonl are cut"
    assert all(expected[step] == loss for step, loss in losses.items()), "log.jsonl has other losses"

"""
Tests fine-tuning in transformers and the way back: a checkpoint of the CPU trainer takes twenty AdamW steps
there, is saved in fp32, bf16 and fp16 and in several files, and is taken up here with --init, where the loss
of the same batch must agree. Set-up as for test_hf.py:

    build/hf/bin/python dev/test/hf/test_finetune.py [WORD]      # WORD: only the models whose name has it

Also by transformers.Trainer, where accelerate is installed, and as a merged LoRA, where peft is. One line a
model; exit code 1 if any fails.
"""
import importlib.util
import json
import math
import struct
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import transformers

from test_hf import folder_of, open_model
from test_hf_trained import BATCH, dump, run, train

STEPS = 20


def loss_of(model, tokens, targets):
    """Mean cross entropy of all targets, as the trainer's."""
    logits = model(tokens, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measure(model, tokens, targets):
    with torch.no_grad():
        return loss_of(model.eval(), tokens, targets).item()


# ----------------------------------------------------------------------------
# three ways to fine-tune

def by_loop(model, tokens, targets, work):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, tokens, targets).backward()
        optimizer.step()
    model.gradient_checkpointing_disable()
    return model


def by_trainer(model, tokens, targets, work):
    rows = [dict(input_ids=row, labels=row) for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(work / "trainer"), max_steps=STEPS, per_device_train_batch_size=len(rows),
        learning_rate=1e-3, gradient_checkpointing=True, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no")
    transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
    return model


def by_lora(model, tokens, targets, work):
    import peft
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(adapted, tokens, targets).backward()
        optimizer.step()
    return adapted.merge_and_unload()


def ways():
    """Those whose packages are installed, by name."""
    found = {"loop": by_loop}
    for name, way, package in ("Trainer", by_trainer, "accelerate"), ("LoRA", by_lora, "peft"):
        if importlib.util.find_spec(package):
            found[name] = way
        else:
            print(f"skipped: {name}: not installed: {package}")
    return found


# ----------------------------------------------------------------------------
# and back

def check_init(folder, work, tokens, targets):
    """
    The trainer's loss of the batch from a folder is that of the model opened in fp32. Returns it and the
    difference.
    """
    dumped, same, _ = dump(folder, work)
    assert torch.equal(same, tokens)
    here = dumped["loss"].mean().item()
    there = measure(open_model(folder, torch.float32), tokens, targets)
    assert abs(here - there) < 1e-4, f"{folder.name}: loss {here} by the trainer, {there} in fp32"
    return here, abs(here - there)


def check_trains_on(folder, work, loss, name):
    """Two steps from the folder: the first has the loss of its batch, and the second changes it."""
    out = work / ("on-" + name)
    run("--init", folder, "--data", work / "text.bin", "--out", out, *BATCH, "--max-tokens", 1024,
        "--warmup-tokens", 512, "--shuffle", "false")
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "grad_norm" in line]
    assert len(losses) == 2 and math.isfinite(losses[1]), f"{losses}"
    assert abs(losses[0] - loss) < 1e-4, f"{losses[0]}, not {loss}"
    assert (out / "step_00000002/model.safetensors").exists()


def stored_types(folder):
    """The types of all tensors of a folder's files."""
    types = set()
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as f:
            header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        types |= {tensor["dtype"] for name, tensor in header.items() if name != "__metadata__"}
    return types


def check_way(way, name, checkpoint, work):
    folder = folder_of(checkpoint, work / f"opened-{name}")
    dumped, tokens, targets = dump(checkpoint, work)
    model = open_model(folder, torch.float32)
    before = measure(model, tokens, targets)
    assert abs(before - dumped["loss"].mean()) < 1e-4
    model = way(model, tokens, targets, work)
    after = measure(model, tokens, targets)
    assert after < before - 0.05, f"fine-tuning: the loss goes from {before} to {after}"

    saved = {kind: work / f"{name}-{kind}" for kind in ("fp32", "files", "bf16", "fp16")}
    model.save_pretrained(saved["fp32"])
    model.save_pretrained(saved["files"], max_shard_size="200KB")
    assert len(list(saved["files"].glob("model-*.safetensors"))) > 2
    model.to(torch.bfloat16).save_pretrained(saved["bf16"], max_shard_size="200KB")
    half = measure(model, tokens, targets)
    open_model(saved["fp32"], torch.float32).to(torch.float16).save_pretrained(saved["fp16"])
    for kind, dtype in dict(fp32="F32", files="F32", bf16="BF16", fp16="F16").items():
        assert stored_types(saved[kind]) == {dtype}, f"{kind}: {stored_types(saved[kind])}"

    losses, differences = zip(*(check_init(path, work, tokens, targets) for path in saved.values()))
    assert abs(losses[0] - after) < 1e-4 and losses[0] == losses[1], f"{losses}, not {after}"
    # bf16 computes with 8 bits there, while the trainer widens the weights and computes in fp32
    assert abs(losses[2] - half) < 0.002, f"bf16: loss {losses[2]} by the trainer, {half} there"
    assert abs(losses[2] - after) < 0.005 and abs(losses[3] - after) < 0.0005, f"{losses} and {after}"
    check_trains_on(saved["files"], work, losses[1], name + "-files")
    check_trains_on(saved["bf16"], work, losses[2], name + "-bf16")
    return (f"loss {before:.4f} to {after:.4f}, differences {max(differences):.1e}, "
            f"bf16 {abs(losses[2] - half):.1e}, bf16 and fp16 weights {abs(losses[2] - after):.1e} "
            f"{abs(losses[3] - after):.1e}")


def main():
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    passed = failed = 0
    print(f"transformers {transformers.__version__}, PyTorch {torch.__version__}")
    with tempfile.TemporaryDirectory() as work:
        for preset in "fox-pro-nano", "transformer-llama-nano", "deltanet-nano":
            if word not in preset:
                continue
            checkpoint = train(Path(work), preset, "--model", preset, "--set", "num_hidden_layers=2")
            for name, way in ways().items():
                try:
                    result = check_way(way, f"{preset}-{name}", checkpoint, Path(work))
                    print(f"{preset}, {name}: {result}", flush=True)
                    passed += 1
                except Exception as problem:
                    failed += 1
                    traceback.print_exc()
                    print(f"{preset}, {name}: FAILED: {problem}", flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

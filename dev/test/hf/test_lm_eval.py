"""
Tests that lm-evaluation-harness runs on a checkpoint's folder as it is, offline, with local task files, one of
each kind (multiple_choice, loglikelihood_rolling, generate_until). Its numbers must be the trainer's or the
model's. Set-up as for test_hf.py, and

    build/hf/bin/pip install -c scripts/requirements.txt lm_eval
    build/hf/bin/python dev/test/hf/test_lm_eval.py
"""
import json
import math
import os
import struct
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(ROOT / "build/test/lm_eval"))

import lm_eval  # noqa: E402
import torch  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from test_hf import load_file, open_model  # noqa: E402
from test_hf_trained import run, write_shard  # noqa: E402

END_OF_TEXT = 256
PROMPTS = ["def check_", "import to", "    return"]  # lm-eval moves white space from their ends


def write_tasks(work, tasks):
    """tasks: {name: (settings, documents)}. Writes a task file and a data file each."""
    for name, (settings, documents) in tasks.items():
        data = work / (name + ".jsonl")
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        task = dict(task=name, dataset_path="json", dataset_kwargs=dict(data_files=dict(test=str(data))),
                    test_split="test", target_delimiter="", metadata=dict(version=1), **settings)
        (work / (name + ".yaml")).write_text(json.dumps(task))  # JSON is YAML


def metric(name):
    return [dict(metric=name, aggregation="mean", higher_is_better=True)]


def evaluate(folder, work, names):
    """Runs the harness. Returns its results and its samples, by task."""
    found = lm_eval.simple_evaluate(
        "hf", dict(pretrained=str(folder), trust_remote_code=True, dtype="float32"), tasks=names, batch_size=2, device="cpu",
        task_manager=TaskManager(include_path=str(work), include_defaults=False), bootstrap_iters=0)
    return found["results"], {name: sorted(found["samples"][name], key=lambda s: s["doc_id"]) for name in names}


# ----------------------------------------------------------------------------
# what is expected

def loss_of_text(folder, text, work):
    """The trainer's loss of the bytes of a text after end of text, their sum in nats."""
    tokens = [END_OF_TEXT, *text]
    header = struct.pack("<256i", 20240520, 1, len(tokens), 0, 257, *[0] * 251)
    (work / "one.bin").write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))
    run("--init", folder, "--data", work / "one.bin", "--seq-len", len(text), "--batch-tokens", len(text),
        "--dump", work / "one")
    return load_file(work / "one")["loss"].sum().item()


def greedy(folder, prompt, tokens):
    """The trainer's text after a prompt."""
    text = run("--init", folder, "--prompt", prompt, "--generate", tokens, "--temperature", 0).decode()
    assert text.startswith(prompt) and len(text) >= len(prompt) + tokens, text
    return text[len(prompt):len(prompt) + tokens]


@torch.no_grad()
def log_likelihood(model, context, text):
    """Log-likelihood of the bytes of a text after end of text and a context."""
    ids = torch.tensor([[END_OF_TEXT, *context.encode(), *text.encode()]])
    log_p = model(ids[:, :-1], use_cache=False).logits[0].log_softmax(dim=-1)
    return log_p.gather(1, ids[0, 1:, None])[-len(text):].sum().item()


def main():
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        write_shard(work / "text.bin")
        run("--model", "fox-pro-nano", "--set", "hidden_size=64", "--set", "num_hidden_layers=2", "--data", work / "text.bin", "--out", work / "run", "--seq-len", 128,
            "--batch-tokens", 512, "--max-tokens", 20480, "--warmup-tokens", 2048)
        folder = work / "run/step_00000040"
        model = open_model(folder, torch.float32).eval()
        text = Path(__file__).read_bytes()[:128].decode()
        choices = ["model", "folder.", "zq~Zq", "  "]
        expected = [[log_likelihood(model, prompt, choice) for choice in choices] for prompt in PROMPTS]
        labels = [row.index(max(row)) for row in expected]
        labels[2] = (labels[2] + 1) % len(choices)  # the best choice is right for two of three
        bos = "<|endoftext|>"
        tasks = dict(
            choose=(dict(output_type="multiple_choice", doc_to_text="{{text}}", doc_to_choice="{{choices}}",
                         doc_to_target="{{label}}", metric_list=metric("acc")),
                    [dict(text=bos + prompt, choices=choices, label=label)
                     for prompt, label in zip(PROMPTS, labels)]),
            roll=(dict(output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
                       metric_list=[dict(metric="bits_per_byte")]), [dict(text=text)]),
            write=(dict(output_type="generate_until", doc_to_text="{{text}}", doc_to_target="{{target}}",
                        generation_kwargs=dict(until=["\0"], max_gen_toks=24, do_sample=False),
                        metric_list=metric("exact_match")),
                   [dict(text=bos + prompt, target=greedy(folder, prompt, 24)) for prompt in PROMPTS]))
        write_tasks(work, tasks)
        results, samples = evaluate(folder, work, list(tasks))

        for sample, row in zip(samples["choose"], expected):
            found = [float(response[0]) for response in sample["filtered_resps"]]
            assert max(abs(a - b) for a, b in zip(found, row)) < 1e-3, f"multiple_choice: {found}, not {row}"
        assert abs(results["choose"]["acc,none"] - 2 / 3) < 1e-9, "multiple_choice"
        bits = loss_of_text(folder, text.encode(), work) / len(text) / math.log(2)
        assert abs(results["roll"]["bits_per_byte,none"] - bits) < 1e-4, f"loglikelihood_rolling: not {bits}"
        assert results["write"]["exact_match,none"] == 1, f"generate_until: {samples['write']}"
    print("3 passed, 0 failed")


if __name__ == "__main__":
    main()

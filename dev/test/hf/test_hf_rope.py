"""
Tests rope_scaling and windows beyond the training length against transformers, in the environment of test_hf.py:

    build/hf/bin/python dev/test/hf/test_hf_rope.py

The tables of modeling_fox.py are transformers' own, those of ntk its plain ones with the larger base. Models that the
trainer trains with scaled rotations have its logits in modeling_fox.py, and in LlamaForCausalLM behind to_llama.py. And
--eval with another rope_scaling or window than the model was trained with has the loss of transformers. One line each;
exit code 1 if any fails.
"""
import copy
import itertools
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from test_hf import ROOT, check_below, error, open_model
from test_hf_trained import dump, run, train

sys.path.insert(0, str(ROOT / "llmc/checkpoint"))  # modeling_fox.py imports from its package
from hf.modeling_fox import TransformerConfig, rope_frequencies  # noqa: E402

LENGTH = 128  # of the trained sequences: test_hf_trained.BATCH
SCALED = ("linear:4", "ntk:4", "yarn:4")
YARN = transformers.__version__ >= "5"  # 4.44 takes the longer length for that of the training before


def scaling_of(words, length):
    """transformers' object of a word of --set, of heads of 16 channels; ntk is no type of transformers."""
    kind, factor = words.split(":")
    return dict(rope_type=kind, factor=float(factor), original_max_position_embeddings=length)


def check_tables():
    errors = {}
    for dh, base, factor, length in itertools.product((16, 64, 128), (1e4, 500000.0), (1, 1.5, 4, 32), (128, 2048, 16384)):
        for kind in ("linear", "yarn")[:1 + YARN]:
            scaling = scaling_of(f"{kind}:{factor}", length)
            config = LlamaConfig(hidden_size=2 * dh, num_attention_heads=2, head_dim=dh, rope_theta=base,
                                 max_position_embeddings=round(length * factor),
                                 rope_scaling=dict(scaling, rope_theta=base))
            expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
            ours, our_factor = rope_frequencies(SimpleNamespace(
                hidden_size=2 * dh, num_heads=2, rope_base=base, rope_parameters=scaling), "cpu")
            assert abs(our_factor - expected_factor) < 1e-12, f"{kind} {factor}: factor {our_factor}"
            errors[f"{kind}:{factor}:{length} dh {dh}"] = (ours.float() / expected - 1).abs().max().item()
    return f"frequencies within {check_below(1e-6, 'tables', errors):.1e} of float32"


def table_of(config_class, **keys):
    """The frequencies that config.json gives, of modeling_fox.py or of Llama."""
    config = config_class(hidden_size=256, num_hidden_layers=1, **keys)
    if config_class is TransformerConfig:
        return rope_frequencies(config, "cpu")[0].float()
    return transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq


def check_objects():
    """What config.json says in the forms that transformers 5 takes: the tables of its Llama."""
    yarn = dict(rope_type="yarn", factor=4.0)
    cases = {"yarn without a length": dict(rope_parameters=yarn, max_position_embeddings=512),
             "both keys": dict(rope_parameters=yarn, rope_scaling=dict(rope_type="linear", factor=2.0)),
             "an empty one": dict(rope_parameters=dict(rope_type="linear", factor=2.0), rope_scaling={}),
             "no type": dict(rope_parameters=dict(rope_theta=500000.0)),
             "another theta": dict(rope_parameters=dict(rope_theta=20000.0)),
             "a scaled one": dict(rope_scaling=dict(rope_type="linear", factor=2.0, rope_theta=20000.0)),
             "an old type": dict(rope_scaling=dict(type="linear", factor=2.0))}
    errors = {}
    for name, keys in cases.items():
        expected = table_of(LlamaConfig, num_attention_heads=4, rope_theta=500000.0, **copy.deepcopy(keys))
        errors[name] = (table_of(TransformerConfig, num_heads=4, **keys) / expected - 1).abs().max().item()
    return f"frequencies within {check_below(1e-6, 'objects', errors):.1e} of float32"


def check_refused():
    """What modeling_fox.py does not compute is refused where the config is made."""
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=LENGTH)
    cases = {"only linear and yarn": dict(rope_scaling=dict(yarn, rope_type="llama3")),
             "only linear": dict(rope_scaling=dict(factor=2.0)),
             "with a factor": dict(rope_scaling=dict(rope_type="linear")),
             **{f"{key}={value} is not supported": dict(rope_scaling=dict(yarn, **{key: value})) for key, value in dict(
                 beta_fast=16, mscale=1.0, truncate=False, attention_factor=1.0).items()},
             "which length": dict(rope_parameters=dict(rope_type="yarn", factor=4.0)),
             "rope_base above 1": dict(rope_parameters=yarn, rope_base=1.0)}
    for says, keys in cases.items():
        try:
            TransformerConfig(**keys)
        except ValueError as problem:
            assert says in str(problem), problem
        else:
            raise AssertionError(f"{keys} are accepted")
    config = TransformerConfig()
    plain, _ = rope_frequencies(config, "cpu")
    config.rope_parameters = dict(type="linear", factor=2.0)  # from_pretrained sets what it is given on the config
    assert torch.equal(2 * rope_frequencies(config, "cpu")[0], plain), "the older name of rope_type"
    config.rope_parameters = dict(yarn, rope_type="llama3")
    try:
        rope_frequencies(config, "cpu")
    except ValueError as problem:
        assert "only linear and yarn" in str(problem), problem
    else:
        raise AssertionError("llama3 is taken for yarn")
    return f"{len(cases) + 1} refused"


def llama_of(checkpoint, out):
    subprocess.run([sys.executable, ROOT / "scripts/hf/to_llama.py", checkpoint, out], check=True)
    return AutoModelForCausalLM.from_pretrained(out, torch_dtype=torch.float32)


@torch.no_grad()
def check_trained(scaling, work):
    """Logits of the trainer in modeling_fox.py and in Llama, and those that save_pretrained's folder has."""
    name = scaling.replace(":", "-")
    checkpoint = train(work, name, "--model", "transformer-llama-nano", "--set", f"rope_scaling={scaling}", "--set",
                       "hidden_size=64", "--set", "num_heads=4", "--set", "num_hidden_layers=2", "--set", "initializer_range=0.2")
    dumped, tokens, _ = dump(checkpoint, work)
    model = open_model(checkpoint, torch.float32)
    written = json.loads((checkpoint / "config.json").read_text())
    if scaling.startswith("ntk"):
        assert "rope_parameters" not in written and abs(written["rope_base"] / (500000 * 4**(16 / 14)) - 1) < 1e-12
    else:
        assert written["rope_parameters"].get("original_max_position_embeddings", LENGTH) == LENGTH, written
    model.save_pretrained(work / f"saved-{name}")
    again, *_ = dump(work / f"saved-{name}", work)
    errors = {"modeling_fox": error(model(tokens).logits, dumped["logits"]),
              "saved by transformers": error(again["logits"], dumped["logits"])}
    if YARN or "yarn" not in scaling:
        errors["Llama"] = error(llama_of(checkpoint, work / f"llama-{name}")(tokens).logits, dumped["logits"])
    return check_below(1e-5, scaling, errors)


def losses(checkpoint, work, *settings):
    """[4, 512] losses of --eval by position, of sequences four times as long as those of the training."""
    out = work / "eval.json"
    run("--init", checkpoint, "--val-data", work / "text.bin", "--seq-len", 4 * LENGTH, "--micro-batch", 1, "--val-tokens",
        16 * LENGTH, "--eval", out, *settings)
    result = json.loads(out.read_text())
    out.unlink()
    return result["loss_mean"]


@torch.no_grad()
def check_evaluation(work):
    """The mean loss beyond the training length, in float64 and over the whole matrix of scores."""
    checkpoint = train(work, "plain", "--model", "transformer-llama-nano", "--set", "hidden_size=64", "--set", "num_heads=4",
                       "--set", "num_hidden_layers=2", "--set", "initializer_range=0.2")
    stream = torch.frombuffer(bytearray((work / "text.bin").read_bytes()[1024:]), dtype=torch.int16).long()
    stream = stream[:16 * LENGTH + 1]
    tokens, targets = stream[:-1].view(4, -1), stream[1:].view(4, -1)
    llama = llama_of(checkpoint, work / "llama-plain")
    errors = {}

    def loss_of(model, **options):
        logits = model(tokens, **options).logits
        return F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten()).item()

    for scaling in SCALED[:2 + YARN]:
        theta, config = 500000.0, llama.config.to_dict()
        if scaling.startswith("ntk"):
            theta, scale = theta * 4**(16 / 14), dict(rope_type="default", rope_theta=theta * 4**(16 / 14))
        else:
            scale = dict(scaling_of(scaling, LENGTH), rope_theta=theta)
        config.update(rope_parameters=scale, rope_scaling=None if "ntk" in scaling else scale, rope_theta=theta,
                      max_position_embeddings=4 * LENGTH)
        other = transformers.LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config.items() if v is not None}))
        other.load_state_dict(llama.state_dict())
        errors[scaling] = abs(losses(checkpoint, work, "--set", f"rope_scaling={scaling}") - loss_of(other.eval()))
    plain = losses(checkpoint, work)
    errors["plain"] = abs(plain - loss_of(llama))
    rows = torch.arange(4 * LENGTH)
    for window in 1, LENGTH, 4 * LENGTH:
        hidden = (rows[None] > rows[:, None]) | (rows[None] <= rows[:, None] - window)
        mask = torch.zeros(1, 1, 4 * LENGTH, 4 * LENGTH).masked_fill(hidden, torch.finfo(torch.float32).min)
        cut = losses(checkpoint, work, "--set", f"window_size={window}")
        assert (cut == plain) == (window == 4 * LENGTH), f"window {window}: {cut}, without {plain}"
        errors[f"window {window}"] = abs(cut - loss_of(llama, attention_mask=mask.expand(4, -1, -1, -1)))
    return f"mean losses within {check_below(1e-5, '--eval', errors):.1e} nats of transformers'"


def main():
    failed = 0
    print(f"transformers {transformers.__version__}, PyTorch {torch.__version__}")
    with tempfile.TemporaryDirectory() as work:
        checks = {"tables": check_tables, **({"objects": check_objects} if YARN else {}), "refused": check_refused,
                  "evaluation": lambda: check_evaluation(Path(work)),
                  **{scaling: lambda s=scaling: f"logits within {check_trained(s, Path(work)):.1e}" for scaling in SCALED}}
        for name, check in checks.items():
            try:
                print(f"{name}: {check()}", flush=True)
            except Exception as problem:
                failed += 1
                traceback.print_exc()
                print(f"{name}: FAILED: {problem}", flush=True)
    print(f"{len(checks) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

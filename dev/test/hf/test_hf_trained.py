"""
Tests the folders that the CPU trainer saves in transformers, set up as for test_hf.py, and folders of others in the trainer:

    make train_fox data/text_to_shards
    build/hf/bin/python dev/test/hf/test_hf_trained.py [WORD]        # WORD: only the models whose name has it

Every model of the fixtures is trained for two steps, and its folder opened as it is: logits, gradients, text. So are stacks
of layers, and Llama's folders both ways. The tokenizers byte and gpt2 are those of checkpoints trained on shards of
text_to_shards. One line each; exit code 1 if any fails.
"""
import json
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2TokenizerFast
from transformers.dynamic_module_utils import get_relative_imports

from test_hf import (
    FIXTURES, FIXTURE_NAMES, ROOT, check_below, check_config, check_documents, check_generate, check_padding, compare, error,
    is_recurrent, open_model, run_checks)

SWITCHES = ("use_rope", "use_output_gate", "use_output_norm", "qk_norm", "qk_norm_share_param_across_head",
            "use_k_shift", "use_v_shift", "window_size", "num_kv_heads", "fgate_type", "fgate_bias_init", "decay_time_min",
            "decay_time_max", "use_lower_bound", "tie_word_embeddings")
STACKS = {  # not fixtures: models whose oracle is the trainer alone
    "stack": ["layer_types=deltanet,attention:window=20,mamba2,hgrn2,attention:rope", "num_hidden_layers=5",
              "deltanet_num_heads=4", "hgrn2_num_heads=2", "mamba2_num_heads=8", "mamba2_state_size=16"],
    "stack-bounds": ["layer_types=hgrn2,attention,hgrn2,hgrn2", "num_hidden_layers=4", "hgrn2_num_heads=2",
                     "hgrn2_use_lower_bound=true"],
    "stack-local": ["layer_types=attention*2,attention:window=0", "num_hidden_layers=3", "window_size=20"],
    "stack-packed": ["layer_types=mamba2,attention,gated_deltanet", "num_hidden_layers=3", "mamba2_num_heads=4",
                     "gated_deltanet_head_dim=16", "gated_deltanet_num_heads=3", "document_reset=true",
                     "tie_word_embeddings=true"]}


# ----------------------------------------------------------------------------
# against the trainer

def run(*arguments, program="train_fox"):
    command = [str(ROOT / program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.decode()}"
    return done.stdout


def write_shard(path):
    """64 KiB of this file's text as a data shard of bytes: 256 int32 of header, then uint16."""
    text = (Path(__file__).read_bytes() * 16)[:1 << 16]
    header = struct.pack("<256i", 20240520, 1, len(text), 0, 257, *[0] * 251)
    path.write_bytes(header + struct.pack(f"<{len(text)}H", *text))


BATCH = ("--seq-len", 128, "--batch-tokens", 512)


def train(work, name, *arguments):
    """Trains a model for two steps, on a shard that is made where it is missing. Returns the checkpoint."""
    shard, out = work / "text.bin", work / ("trained-" + name)
    if not shard.exists():
        write_shard(shard)
    run(*arguments, "--data", shard, "--out", out, *BATCH, "--max-tokens", 1024, "--warmup-tokens", 512,
        "--lr", 0.02)
    return out / "step_00000002"


def dump(folder, work):
    """The trainer's results of the first batch from a folder, and the batch: tokens and targets [B, 128]"""
    run("--init", folder, "--data", work / "text.bin", *BATCH, "--dump", work / "dump")
    dumped = load_file(work / "dump")
    stream = torch.frombuffer(bytearray((work / "text.bin").read_bytes()[1024:]), dtype=torch.int16).long()
    windows = stream[:dumped["loss"].numel() + 1]
    return dumped, windows[:-1].view(-1, 128), windows[1:].view(-1, 128)


def check_python_files(checkpoint, work):
    """
    The model's file imports all others by itself. A folder where it was edited runs its own, also behind a folder of the
    same name.
    """
    auto_map = json.loads((checkpoint / "config.json").read_text())["auto_map"]
    [model] = {name.split(".")[0] for name in auto_map.values()}
    files = {path.stem for path in checkpoint.glob("*.py")}
    assert files == {model, *get_relative_imports(checkpoint / f"{model}.py")}, f"{files} beside {model}"
    edited = work / f"edited-{checkpoint.parent.name}" / checkpoint.name
    shutil.copytree(checkpoint, edited)
    with open(edited / f"{model}.py", "a") as f:
        f.write("\nEDITED = True\n")
    opened = [type(open_model(folder, torch.float32)) for folder in (checkpoint, edited)]
    assert [hasattr(sys.modules[kind.__module__], "EDITED") for kind in opened] == [False, True], "an edited model does not run"


@torch.no_grad()
def check_llama(checkpoint, work, tokens, expected):
    """What to_llama.py writes is a LlamaForCausalLM with the trainer's logits."""
    out = work / f"llama-{checkpoint.parent.name}"
    export = [sys.executable, ROOT / "scripts/hf/to_llama.py", checkpoint, out]
    subprocess.run(export, check=True)
    model, info = AutoModelForCausalLM.from_pretrained(
        out, torch_dtype=torch.float32, output_loading_info=True)
    assert type(model) is transformers.LlamaForCausalLM and model.config.max_position_embeddings == 128
    assert not info["missing_keys"] and not info["unexpected_keys"], f"to_llama.py: {info}"
    worst = check_below(1e-4, "to_llama.py", {"logits": error(model(tokens).logits, expected)})
    again = subprocess.run(export, capture_output=True, text=True)
    assert again.returncode == 1 and "exists already" in again.stderr, f"to_llama.py: {again.stderr}"
    back = dump(out, work)[0]["logits"]
    assert torch.equal(back, expected), "--init of to_llama.py's folder: other logits"
    return worst


@torch.no_grad()
def check_foreign_llama(work, tied):
    """
    A LlamaForCausalLM with grouped heads, in several files: by --init, in training, and out again. The tied one also has
    scaled rotations.
    """
    folder = work / f"foreign-{tied}"
    scaled = dict(rope_type="linear", factor=2.0) if tied else None
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rope_theta=20000.0, rms_norm_eps=1e-5, initializer_range=0.2,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=256, tie_word_embeddings=tied,
        rope_scaling=scaled))
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").exists()
    write_shard(work / "text.bin")
    dumped, tokens, _ = dump(folder, work)
    before = check_below(4e-6, "--init", {"logits": error(dumped["logits"], model(tokens).logits)})
    checkpoint = train(work, folder.name, "--init", folder)
    after = check_llama(checkpoint, work, tokens, dump(checkpoint, work)[0]["logits"])
    assert after <= 4e-6, f"trained and out again: {after:.1e}"
    return f"in {before:.1e}, out {after:.1e}"


def check_not_llama(checkpoint, work):
    """to_llama.py refuses a model that Llama does not compute in one line, and writes nothing."""
    out = work / "no llama"
    done = subprocess.run([sys.executable, ROOT / "scripts/hf/to_llama.py", checkpoint, out],
                          capture_output=True, text=True)
    assert done.returncode == 1 and "can be a Llama" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and not out.exists(), done.stderr


@torch.no_grad()
def check_mamba2(checkpoint, tokens, expected):
    """
    transformers' own Mamba2ForCausalLM opens the folder with the trainer's logits. With rescale_prenorm_residual
    version 5.23 divides the out_proj that it has loaded; 4.44 has other bugs: it clamps the time steps.
    """
    model, info = transformers.Mamba2ForCausalLM.from_pretrained(
        checkpoint, torch_dtype=torch.float32, output_loading_info=True, rescale_prenorm_residual=False)
    assert not info["missing_keys"] and not info["unexpected_keys"], f"Mamba2ForCausalLM: {info}"
    return check_below(1e-4, "Mamba2ForCausalLM", {"logits": error(model(tokens).logits, expected)})


def check_refused_layers(config, checkpoint):
    """Bad layer_types are a ValueError, as they are an error of the trainer."""
    folder = checkpoint / "refused"
    folder.mkdir()
    for name in ("mamba2:rope", "mamba2:window=4", "attention:rope:norope", "attention:window=4:window=4", "attention:windows=4",
                 "attention:window=-3", "attention:window=", f"attention:window={(1 << 24) + 1}", "attention:", "fox",
                 "attention*1", "attention:window=1Ki", "attention:window=04", "attention:rope:window=4"):
        changed = dict(config.to_dict(), layer_types=["mamba2", name, "gated_deltanet"])
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            type(config)(**changed)
        except ValueError as problem:
            assert "layer_types" in str(problem), problem
        else:
            raise AssertionError(f"{name} is not refused")
        done = subprocess.run([ROOT / "train_fox", "--init", folder, "--dry-run", "config"], capture_output=True, text=True)
        assert done.returncode == 1 and "layer_types" in done.stderr, f"{name}: the trainer: {done.stderr}"
    lists = [("layer_types", value) for value in (3, None, [], {}, "mamba2", ["mamba2", None, "attention"], [1, 2, 3])]
    for key, value in lists + [("mamba2_num_heads", None), ("mamba2_state_size", "16"), ("gated_deltanet_head_dim", 0)]:
        try:
            type(config)(**dict(config.to_dict(), **{key: value}))
        except ValueError as problem:
            assert key in str(problem), problem
        else:
            raise AssertionError(f"{key}={value} is not refused")


def check_stack(model, checkpoint, tokens):
    """Cache, padding and documents of a stack against the whole at once, and what save_pretrained writes."""
    check_config(checkpoint, model.config.to_dict())
    packed, model.config.document_reset = model.config.document_reset, False
    with torch.no_grad():
        expected = {"logits": model(tokens).logits}
    for pieces in [7] + [1] * (tokens.shape[1] - 7), [1, 5, tokens.shape[1] - 6]:
        cache, logits = None, []
        for piece in tokens.split(pieces, dim=1):
            with torch.no_grad():
                output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits)
        assert cache.get_seq_length() == tokens.shape[1] == cache[0][0].shape[2] == cache[1][0].shape[2]
        assert error(torch.cat(logits, dim=1), expected["logits"]) < 1e-11, f"cache, pieces {pieces}"
    check_padding(model, tokens, expected)
    check_documents(model, tokens)
    check_generate(model, tokens)
    model.config.document_reset = packed
    if checkpoint.parent.name == "trained-stack-packed":
        check_refused_layers(model.config, checkpoint)
    model.save_pretrained(checkpoint / "saved")
    assert (checkpoint / "saved/modeling_stack.py").exists() and (checkpoint / "saved/modeling_fox.py").exists()
    with torch.no_grad():
        again = open_model(checkpoint / "saved", torch.float64)(tokens).logits
        assert error(again, model(tokens).logits) < 1e-11, "saved and opened again"
    fresh = AutoModelForCausalLM.from_config(model.config, trust_remote_code=True)
    for name, x in fresh.state_dict().items():
        if name.endswith("fgate_proj.bias"):
            assert (x == 0).all(), name
        elif name.endswith((".D", "norm.weight")):
            assert (x == 1).all(), name
        elif name.endswith("mixer.A_log"):
            assert error(x.exp(), torch.arange(1, x.numel() + 1)) < 1e-6, name
        elif "q_proj" in name or name.endswith("in_proj.weight"):
            kind = model.config.layer_types[int(name.split(".")[2])].split(":")[0]
            spread = (model.config.initializer_range if kind in ("attention", "gated_deltanet") else
                      (3 * x.shape[1])**-0.5 if kind == "mamba2" else 2**-2.5 * (2 / sum(x.shape))**0.5)
            assert abs(x.std() / spread - 1) < 0.1, f"{name}: {x.std()}, not {spread}"


def check_trained(name, work):
    """A small model with the switches of a fixture, trained for two steps: logits, gradients, greedy text."""
    config = {"model_type": "transformer"} if name in STACKS else json.loads(
        (FIXTURES / name / "config.json").read_text())
    chosen = {key: config[key] for key in SWITCHES if config.get(key) is not None}
    switches = [f"{key}={json.dumps(value)}".replace('"', "") for key, value in chosen.items()]
    sizes = ["hidden_size=64", "num_hidden_layers=2", "num_heads=4", "initializer_range=0.2"]
    if is_recurrent(config):
        sizes = ["num_hidden_layers=2", "initializer_range=0.2"]
    settings = [word for pair in switches + sizes + STACKS.get(name, []) for word in ("--set", pair)]
    preset = name.removesuffix("-lower-bound") if is_recurrent(config) else "fox-pro" if name in STACKS else "fox-llama"
    checkpoint = train(work, name, "--model", preset + "-nano", *settings)
    check_python_files(checkpoint, work)
    dumped, tokens, targets = dump(checkpoint, work)
    model = open_model(checkpoint, torch.float32)
    # transformers 5 refuses layer_types of its own accord, without the class of this folder
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=name in STACKS)
    expected = {key if key in ("loss", "logits") else "grad." + key: x for key, x in dumped.items()}
    worst = check_below(1e-4, "trainer", compare(model, tokens, targets, expected))

    prompt = "def main(argument):"
    text = run("--init", checkpoint, "--prompt", prompt, "--generate", 100, "--temperature", 0)
    ids = tokenizer(tokenizer.bos_token + prompt, return_tensors="pt").input_ids
    assert ids.tolist() == [[256, *prompt.encode()]], "tokenizer"
    with torch.no_grad():
        for use_cache in True, False:
            generated = model.generate(ids, max_new_tokens=100, do_sample=False, use_cache=use_cache,
                                       pad_token_id=256)[0, 1:].tolist()
            text_here = bytes(t for t in generated if t != 256)
            assert text.startswith(text_here), f"greedy text: {text_here} here, {text} by the trainer"
    if name in ("transformer-llama", "transformer-llama-grouped", "transformer-llama-tied"):
        return f"trainer {worst:.1e}, as Llama {check_llama(checkpoint, work, tokens, dumped['logits']):.1e}"
    check_not_llama(checkpoint, work)
    if name in STACKS:
        check_stack(open_model(checkpoint, torch.float64), checkpoint, tokens[:2, :40])
    if name == "mamba2" and transformers.__version__ >= "5":
        return f"trainer {worst:.1e}, as Mamba2 {check_mamba2(checkpoint, tokens, dumped['logits']):.1e}"
    return f"trainer {worst:.1e}"


# ----------------------------------------------------------------------------
# tokenizers

VOCAB = ROOT / "dev/test/fixtures/gpt2/vocab.bpe"
TOKENIZERS = dict(byte=257, gpt2=50257)  # vocabulary sizes


def odd_text():
    """Contractions, runs of white space, numbers, control characters, and characters of all planes."""
    words = "don't I'll we've 'tis 'S 's''s it's\u2019s 12a3\u00b2\u0664 _x__ \u00e9t\u00e9 \U0001f600\U0001f468\u200d\U0001f469"
    spaces = "".join(f"a{space * n}b" for n in (1, 2, 3) for space in (" ", "\n", "\t", "\u00a0", "\u3000", " \n"))
    planes = "".join(map(chr, [*range(1, 0xd800, 7), *range(0xe000, 0x110000, 61)]))
    return words + spaces + planes + "  trailing \n \n"


def gpt2_of_hugging_face():
    """Hugging Face's own class, from the same vocab.bpe."""
    symbols = sorted([*range(33, 127), *range(161, 173), *range(174, 256)])
    symbols += range(256, 256 + 68)
    merges = VOCAB.read_text(encoding="utf-8").split("\n")[1:-1]
    names = [chr(c) for c in symbols] + [merge.replace(" ", "") for merge in merges] + ["<|endoftext|>"]
    vocab = {name: i for i, name in enumerate(names)}
    if transformers.__version__ >= "5":
        return GPT2TokenizerFast(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("vocab.json", "merges.txt")]
        files[0].write_text(json.dumps(vocab))
        files[1].write_text(VOCAB.read_text(encoding="utf-8"), encoding="utf-8")
        return GPT2TokenizerFast(*map(str, files), clean_up_tokenization_spaces=False)


def check_tokenizer(name, work):
    """Text that text_to_shards encodes has the same tokens in the tokenizer of a checkpoint trained on it."""
    text, prefix = odd_text(), work / name
    source = work / (name + ".txt")
    source.write_text(text, encoding="utf-8", newline="")
    options = [["--vocab", VOCAB], []][name == "byte"]
    run("--tokenizer", name, *options, "--out", prefix, source, program="data/text_to_shards")
    V = TOKENIZERS[name]
    settings = [word for pair in (f"vocab_size={V}", "hidden_size=16", "num_hidden_layers=1")
                for word in ("--set", pair)]
    run("--model", "fox-llama-nano", *settings, "--data", f"{prefix}_train_*.bin", "--out", work / (name + "-run"),
        "--seq-len", 32, "--batch-tokens", 32, "--max-tokens", 32, "--json-escape")
    # False: it is no custom code
    tokenizer = AutoTokenizer.from_pretrained(work / (name + "-run/step_00000001"), trust_remote_code=False)
    ids = tokenizer(text, return_attention_mask=False)
    assert list(ids) == ["input_ids"], f"returns {list(ids)}"
    ids = ids["input_ids"]
    shard = Path(f"{prefix}_train_000000.bin").read_bytes()[1024:]
    assert [V - 1] + ids == list(struct.unpack(f"<{len(shard) // 2}H", shard)), "other tokens than the shard's"
    assert tokenizer.decode(ids) == text, "text does not round-trip"
    assert tokenizer.decode([*ids, V - 1], skip_special_tokens=True) == text, "end of text is no special token"
    assert len(tokenizer) == tokenizer.vocab_size == V
    assert tokenizer.model_max_length > 1e20, "transformers warns of texts longer than those of training"
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == V - 1
    if name == "gpt2":
        everything = "".join(map(chr, [*range(1, 0xd800), *range(0xe000, 0x110000)]))
        theirs = gpt2_of_hugging_face()
        for part in text, everything, "<|endoftext|>a <|endoftext|>":
            assert tokenizer(part)["input_ids"] == theirs(part)["input_ids"], "not GPT-2's tokens"
    return f"{len(ids)} tokens"


def check_model(name, work):
    if name in TOKENIZERS:
        return check_tokenizer(name, work)
    if name == "foreign-llama":
        return ", ".join(f"tied {tied}: {check_foreign_llama(work, tied)}" for tied in (False, True))
    return check_trained(name, work)


if __name__ == "__main__":
    # -dh, -head: the switches of another fixture, in other sizes; stacks are those above
    models = [name for name in FIXTURE_NAMES if not any(part in name for part in ("-dh", "-head", "stack"))]
    run_checks([*models, *STACKS, "foreign-llama", *TOKENIZERS], check_model)

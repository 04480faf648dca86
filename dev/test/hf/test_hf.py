"""
Tests modeling_fox.py and modeling_recurrent.py against results in fp64 (dev/test/fixtures/model) and against the
CPU trainer:

    python3 -m venv build/hf
    build/hf/bin/pip install -c scripts/requirements.txt torch transformers safetensors numpy
    make train_fox data/text_to_shards
    build/hf/bin/python dev/test/hf/test_hf.py [WORD]        # WORD: only the models whose name has it

Every model of the fixtures (each family, and each switch flipped) is opened by AutoModelForCausalLM, and then
again as the trainer saves it after two steps, in its folder as it is. The tokenizers byte and gpt2 are those
of checkpoints trained on shards of text_to_shards. One line each; exit code 1 if any fails.
"""
import json
import math
import shutil
import struct
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2TokenizerFast

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "dev/test/fixtures/model"
SWITCHES = ("use_rope", "use_output_gate", "use_output_norm", "qk_norm", "qk_norm_share_param_across_head",
            "use_k_shift", "use_v_shift", "window_size", "num_kv_heads", "fgate_type", "fgate_bias_init", "decay_time_min",
            "decay_time_max", "use_lower_bound", "tie_word_embeddings")
STACKS = {  # not fixtures: models whose oracle is the trainer alone
    "stack": ["layer_types=deltanet,attention:window=20,mamba2,hgrn2,attention:rope", "num_hidden_layers=5",
              "deltanet_num_heads=4", "hgrn2_num_heads=2", "mamba2_num_heads=8", "mamba2_state_size=16"],
    "stack-bounds": ["layer_types=hgrn2,attention,hgrn2,hgrn2", "num_hidden_layers=4", "hgrn2_num_heads=2",
                     "hgrn2_use_lower_bound=true"],
    "stack-packed": ["layer_types=mamba2,attention,gated_deltanet", "num_hidden_layers=3", "mamba2_num_heads=4",
                     "gated_deltanet_head_dim=16", "gated_deltanet_num_heads=3", "document_reset=true",
                     "tie_word_embeddings=true"]}
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


# ----------------------------------------------------------------------------
# helpers

def error(x, expected):
    """||x - expected|| / ||expected||"""
    return ((x.double() - expected.double()).norm() / expected.double().norm()).item()


def check_below(limit, what, errors):
    """errors: {name: relative error}. Returns the largest."""
    worst = max(errors, key=errors.get)
    assert errors[worst] <= limit, f"{what}: error {errors[worst]:.1e} of {worst} is above {limit:.0e}"
    return errors[worst]


def is_recurrent(config):
    return "transformer" not in config["model_type"]


def folder_of(checkpoint, out):
    """A copy of a checkpoint folder with the Python files and the auto_map that names them."""
    out.mkdir()
    shutil.copy(checkpoint / "model.safetensors", out)
    config = json.loads((checkpoint / "config.json").read_text())
    files = ["modeling_fox", "modeling_recurrent"][:1 + is_recurrent(config)]
    for file in files:
        shutil.copy(ROOT / f"llmc/checkpoint/hf/{file}.py", out)
    name = config["architectures"][0].replace("ForCausalLM", "")
    config["auto_map"] = {auto: f"{files[-1]}.{name}{suffix}" for auto, suffix in dict(
        AutoConfig="Config", AutoModel="Model", AutoModelForCausalLM="ForCausalLM").items()}
    (out / "config.json").write_text(json.dumps(config))
    return out


def open_model(folder, dtype):
    """The model, of which every tensor is in the checkpoint, and no other."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, torch_dtype=dtype, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info.get(kind), f"{kind}: {info[kind]}"
    assert all(p.dtype == dtype for p in model.parameters())
    return model


def check_config(checkpoint, config):
    """Every key of the trainer's config.json is in config, a dict, with the same value."""
    stored = json.loads((checkpoint / "config.json").read_text())
    changed = {key: config.get(key) for key in stored if config.get(key) != stored[key]}
    assert not changed, f"config.json: changed to {changed}"


def set_blocks(model, tokens):
    """About how many tokens attention and the recurrences take at a time: few make many blocks of two sequences."""
    module = sys.modules[type(model).__module__]
    module.MAX_BIAS_ELEMENTS = 2 * 3 * tokens
    module.CHUNK = module.CHANNEL_CHUNK = tokens // 4


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


# ----------------------------------------------------------------------------
# against fp64

def compare(model, tokens, targets, expected):
    """Relative errors of logits and gradients of the mean loss: {name: error}"""
    model.zero_grad()
    logits = model(tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    errors = {"logits": error(logits.detach(), expected["logits"])}
    grads = gradients(model)
    assert {"grad." + name for name in grads} == {key for key in expected if key.startswith("grad.")}
    return {**errors, **{name: error(g, expected["grad." + name]) for name, g in grads.items()}}


def check_loss(model, tokens, expected):
    """labels=tokens gives the mean over all but the last token, whose target is not among them."""
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss
    assert abs(loss - expected["loss"][:, :-1].mean()) < 1e-10, "loss with labels"


def check_recomputation(model, tokens, targets, expected):
    for reentrant in False, True:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))
        assert model.base_model.gradient_checkpointing
        check_below(1e-11, "gradient checkpointing", compare(model, tokens, targets, expected))
        model.gradient_checkpointing_disable()
        model.eval()


@torch.no_grad()
def check_cache(model, tokens, expected):
    """Prompt and then one token at a time, and pieces of several tokens: the logits of the whole at once."""
    for pieces in [7] + [1] * (tokens.shape[1] - 7), [1, 5, tokens.shape[1] - 6]:
        cache, logits = None, []
        for piece in tokens.split(pieces, dim=1):
            output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits)
        assert cache.get_seq_length() == tokens.shape[1] == cache[0][0].shape[2]
        if is_recurrent(model.config.to_dict()):
            assert cache.layers[0].state.shape[1] == model.config.num_heads
            assert all(x.shape[1] <= 3 for x in [cache.layers[0].history] if x is not None), "constant size"
        else:
            window = model.config.window_size or tokens.shape[1] + 1
            assert cache.layers[0].k.shape[2] == min(tokens.shape[1], window - 1), "keys of the cache"
        assert error(torch.cat(logits, dim=1), expected["logits"]) < 1e-11, f"cache, pieces {pieces}"


@torch.no_grad()
def check_padding(model, tokens, expected):
    """Padding on the left of the second sequence, with and without a cache, changes no logit after it."""
    pad, T = 5, tokens.shape[1]
    padded = torch.cat((torch.full((2, pad), 3), tokens), dim=1)
    padded[0, :] = torch.cat((tokens[0], tokens[0, :pad]))  # the first sequence has no padding
    mask = torch.ones_like(padded)
    mask[1, :pad] = 0
    whole = model(padded, attention_mask=mask).logits
    first = model(padded[:, :pad + 3], attention_mask=mask[:, :pad + 3], use_cache=True)
    rest = model(padded[:, pad + 3:], attention_mask=mask, past_key_values=first.past_key_values)
    for logits in whole, torch.cat((first.logits, rest.logits), dim=1):
        assert error(logits[1, pad:], expected["logits"][1]) < 1e-11, "padding"
        assert error(logits[0, :T], expected["logits"][0]) < 1e-11, "the sequence beside the padding"
        assert logits.isfinite().all()


def check_documents(model, tokens):
    """With document_reset: the logits and gradients of the documents one by one, also from a cache, behind padding."""
    end, walls = model.config.eos_token_id, [4, 5, 9, tokens.shape[1] - 1]
    end = model.config.vocab_size - 1 if end is None else end
    packed = torch.where(tokens == end, end - 1, tokens)
    packed[0, walls] = packed[1, 7] = end

    def pieces(row):
        starts = [0, *(row == end).nonzero().flatten().tolist(), len(row)]
        return torch.cat([model(row[None, i:j]).logits for i, j in zip(starts, starts[1:]) if i < j], dim=1)

    model.zero_grad()
    expected = torch.cat([pieces(row) for row in packed])
    expected.square().mean().backward()
    wanted = gradients(model)
    model.zero_grad()
    model.config.document_reset = True
    logits = model(packed).logits
    logits.square().mean().backward()
    check_below(1e-10, "documents", {name: error(x, wanted[name]) for name, x in gradients(model).items()})
    model.zero_grad()
    with torch.no_grad():
        assert error(logits, expected) < 1e-11, "documents"
        first = model(packed[:, :6], use_cache=True)
        cached = [first.logits, *(model(packed[:, t:t + 1], past_key_values=first.past_key_values).logits
                                  for t in range(6, packed.shape[1]))]
        assert error(torch.cat(cached, dim=1), expected) < 1e-11, "documents from a cache"
        padded = torch.cat((torch.full((2, 3), end), packed), dim=1)
        mask = torch.ones_like(padded)
        mask[:, :3] = 0
        assert error(model(padded, attention_mask=mask).logits[:, 3:], expected) < 1e-11, "documents behind padding"
        try:
            model(inputs_embeds=model.get_input_embeddings()(packed))
        except ValueError as e:
            assert "inputs_embeds" in str(e), e
        else:
            raise AssertionError("inputs_embeds with document_reset")
    model.config.document_reset = False


@torch.no_grad()
def check_generate(model, tokens):
    """Greedy with and without cache, with padding, and beam search: the same tokens."""
    def generate(ids, **options):  # without a mask, generate takes tokens that equal pad_token_id for padding
        options = dict(dict(attention_mask=torch.ones_like(ids)), **options)
        return model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0,
                              **options)

    prompt = tokens[:1, :7]
    cached = generate(prompt)
    assert cached.shape[1] == 19 and torch.equal(cached, generate(prompt, use_cache=False)), "cache"
    padded, mask = torch.zeros(2, 10, dtype=torch.long), torch.ones(2, 10, dtype=torch.long)
    padded[0, 3:], padded[1], mask[0, :3] = prompt, tokens[1, :10], 0
    assert torch.equal(generate(padded, attention_mask=mask)[0, 3:], cached[0]), "padding"
    embeds = model.get_input_embeddings()(prompt)
    for use_cache in True, False:
        continued = generate(prompt[:, :0], inputs_embeds=embeds, attention_mask=torch.ones_like(prompt),
                             use_cache=use_cache)
        assert torch.equal(continued[0, -12:], cached[0, 7:]), "inputs_embeds"
    beams = [generate(prompt, num_beams=3, use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*beams), "beam search"
    result = generate(prompt, return_dict_in_generate=True)
    more = [generate(result.sequences, past_key_values=cache) for cache in (result.past_key_values, None)]
    assert torch.equal(*more), "continued from a cache"


def check_saved(model, name, folder, tokens, expected):
    """What save_pretrained writes opens again, and has the config of the trainer."""
    check_config(FIXTURES / name, model.config.to_dict())
    model.save_pretrained(folder / "saved")
    assert {path.name for path in folder.glob("*.py")} == {path.name for path in (folder / "saved").glob("*.py")}
    check_config(FIXTURES / name, json.loads((folder / "saved/config.json").read_text()))
    again = open_model(folder / "saved", model.dtype)
    with torch.no_grad():
        assert error(again(tokens).logits, expected["logits"]) < 1e-11, "saved and opened again"


@torch.no_grad()
def check_precision(model):
    """Attention in fp32 where sums of log gates reach -1e5, against fp64."""
    module = sys.modules[type(model).__module__]
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 4096, 16, generator=generator, dtype=torch.float64)
    log_gates = -torch.tensor([24.0, 0.2], dtype=torch.float64)[:, None]  # a head each
    cum_logf = (log_gates * torch.rand(1, 2, 4096, generator=generator, dtype=torch.float64) * 2).cumsum(2)
    assert cum_logf.min() < -9e4
    exact = module.attention(q, k, v, cum_logf, None)[0, :, -256:]
    single = module.attention(q.float(), k.float(), v.float(), cum_logf, None)[0, :, -256:]
    for head in 0, 1:
        assert error(single[head], exact[head]) < 1e-6, "attention in fp32 with small gates"


@torch.no_grad()
def check_recurrence_precision(model):
    """Recurrences in fp32 where the sums of log decays in a chunk reach -1e4, against fp64 token by token."""
    module = sys.modules[type(model).__module__]
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, 200, 2, 16, generator=generator, dtype=torch.float64)
    for channels in 1, 16:
        log_decay = -torch.rand(1, 200, 2, channels, generator=generator, dtype=torch.float64)
        log_decay[:, ::3] *= 500
        log_decay[:, 1::3] *= 1e-3
        exact, single = (module.recurrence(module.decay_chunk, module.RecurrentLayerCache(), chunk, None, *(
            x.to(dtype) for x in (q, k, v, log_decay))) for dtype, chunk in ((torch.float64, 1), (torch.float32, 64)))
        assert single.dtype == torch.float32 and error(single, exact) < 1e-6, "decays in fp32"
    k = torch.nn.functional.normalize(k + 3, dim=-1)  # keys that are nearly the same one
    beta = torch.rand(1, 200, 2, 1, generator=generator, dtype=torch.float64)
    exact, single = (module.recurrence(module.delta_chunk, module.RecurrentLayerCache(), chunk, None, *(
        x.to(dtype) for x in (q, k, v, beta))) for dtype, chunk in ((torch.float64, 1), (torch.float32, 64)))
    assert error(single, exact) < 1e-5, "delta rule in fp32"


def check_recurrent_initialization(model):
    """A model made from the config begins as the trainer's: llmc/model/params.h, llmc/baselines/*/params.h."""
    config = model.config
    fresh = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    L, mamba, gated = config.num_hidden_layers, "mamba2" in config.model_type, "gated" in config.model_type
    for name, x in fresh.state_dict().items():
        spread = config.initializer_range
        if gated:
            pass  # all matrices and convolutions alike
        elif "conv1d" in name:
            spread = 0.5 / 3**0.5
        elif mamba and name.endswith("proj.weight") or mamba and "lm_head" in name:
            spread = (3 * x.shape[1] * (L if "out_proj" in name else 1)) ** -0.5
        elif "attn." in name and x.dim() == 2:
            spread = 2**-2.5 * (2 / sum(x.shape)) ** 0.5
        elif "down_proj" in name:
            spread *= (2 * L) ** -0.5
        if x.dim() >= 2 and "lower_bounds" not in name and x.numel() > 60:
            assert abs(x.std() / spread - 1) < 0.3, f"{name}: {x.std()}, not {spread}"
        elif "norm" in name or name.endswith(".D"):
            assert (x == 1).all(), name
        elif "A_log" in name and gated:
            assert (x < math.log(16.001)).all() and x.unique().numel() == config.num_heads, name
        elif "A_log" in name:
            assert error(x.exp(), torch.arange(1, config.num_heads + 1)) < 1e-6, name
        elif "dt_bias" in name:
            step = torch.nn.functional.softplus(x)
            assert (step >= 0.999e-3).all() and (step <= 0.1001).all(), name
        elif "lower_bounds" in name:
            assert (x == 0).all(), name


def check_initialization(model):
    """A model made from the config: matrices as initializer_range says, gates as the trainer starts them."""
    config = model.config
    fresh = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    for name, x in fresh.state_dict().items():
        if x.dim() == 2 and x.numel() > 200:
            assert abs(x.std() / config.initializer_range - 1) < 0.2, name
        elif "norm" in name:
            assert (x == 1).all(), name
        elif "fgate" in name and x.dim() == 1:
            long = config.fgate_bias_init or config.fgate_type == "fixed"
            ends = [math.log(T) for T in (config.decay_time_min or 2, config.decay_time_max or 256)]
            times = torch.linspace(*ends, config.num_heads).exp()
            expected = -1 / times if long else torch.full_like(times, 0.5).log()
            assert error(torch.nn.functional.logsigmoid(x), expected) < 1e-5, name


def check_fixture(name, work):
    expected = load_file(FIXTURES / name / "expected.safetensors")
    tokens, targets = expected["tokens"].long(), expected["targets"].long()
    # the loss of labels is that of the shifted tokens, which the fixtures' targets are
    assert torch.equal(targets[:, :-1], tokens[:, 1:])
    folder = folder_of(FIXTURES / name, work / name)
    # the trainer writes this metadata, without which older versions of transformers open no file
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {"format": "pt"})
    model = open_model(folder, torch.float64)
    recurrent = is_recurrent(model.config.to_dict())
    for block in 1 << 22, tokens.shape[1]:
        set_blocks(model, block)
        check_below(1e-11, "fp64", compare(model, tokens, targets, expected))
        check_cache(model, tokens, expected)
        check_padding(model, tokens, expected)
        check_documents(model, tokens)
    check_loss(model, tokens, expected)
    check_recomputation(model, tokens, targets, expected)
    check_generate(model, tokens)
    check_saved(model, name, folder, tokens, expected)
    (check_recurrence_precision if recurrent else check_precision)(model)
    if recurrent:
        check_recurrent_initialization(model)
    elif "-dh" not in name:  # two heads
        check_initialization(model)
    single = compare(open_model(folder, torch.float32), tokens, targets, expected)
    for key, value in single.items():
        limit = 4 * expected["float32_error." + ("" if key == "logits" else "grad.") + key].item()
        assert value <= limit, f"fp32: error {value:.1e} of {key} is above {limit:.1e}"
    with torch.no_grad():
        half = error(open_model(folder, torch.bfloat16)(tokens).logits, expected["logits"])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = error(open_model(folder, torch.float32)(tokens).logits, expected["logits"])
    assert half < 0.05 and mixed < 0.05, f"bf16: errors {half:.1e}, under autocast {mixed:.1e}"
    return f"errors fp32 {max(single.values()):.1e}, bf16 {half:.1e}"


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


def main():
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    models = sorted(path.name for path in FIXTURES.iterdir())
    names = [name for name in [*models, *STACKS, "foreign-llama", *TOKENIZERS] if word in name]
    assert names, f"no fixture's name has {word}"
    failed = 0
    print(f"transformers {transformers.__version__}, PyTorch {torch.__version__}")
    with tempfile.TemporaryDirectory() as work:
        for name in names:
            try:
                check = check_tokenizer if name in TOKENIZERS else check_fixture
                if name == "foreign-llama":
                    for tied in False, True:
                        print(f"{name}, tied {tied}: {check_foreign_llama(Path(work), tied)}", flush=True)
                    continue
                if name in STACKS:
                    print(f"{name}: {check_trained(name, Path(work))}", flush=True)
                    continue
                checks = [check(name, Path(work))]
                # -dh, -head: the switches of another fixture, in other sizes
                if check == check_fixture and "-dh" not in name and "-head" not in name:
                    checks.append(check_trained(name, Path(work)))
                print(f"{name}: {', '.join(checks)}", flush=True)
            except Exception as problem:
                failed += 1
                traceback.print_exc()
                print(f"{name}: FAILED: {problem}", flush=True)
    print(f"{len(names) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

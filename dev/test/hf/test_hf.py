"""
Tests the Python files of llmc/checkpoint/hf against results in fp64 (dev/test/fixtures/model):

    python3 -m venv build/hf
    build/hf/bin/pip install -c scripts/requirements.txt torch transformers safetensors numpy
    build/hf/bin/python dev/test/hf/test_hf.py [WORD]        # WORD: only the models whose name has it

Every model of the fixtures (each family, each switch flipped, and a stack) is opened by AutoModelForCausalLM.
test_hf_trained.py does so with what the trainer saves. One line each; exit code 1 if any fails.
"""
import json
import math
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "dev/test/fixtures/model"
FIXTURE_NAMES = sorted(path.name for path in FIXTURES.iterdir())
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


def is_stack(config):
    return "layer_types" in config


def folder_of(checkpoint, out):
    """A copy of a checkpoint folder with the Python files and the auto_map that names them."""
    out.mkdir()
    shutil.copy(checkpoint / "model.safetensors", out)
    config = json.loads((checkpoint / "config.json").read_text())
    files = ["modeling_fox", "modeling_recurrent", "modeling_stack"][:1 + is_recurrent(config) + is_stack(config)]
    for file in ["configuration_fox", *files]:
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
    package = type(model).__module__.rpartition(".")[0]
    for file in "modeling_fox", "modeling_recurrent":
        module = sys.modules.get(f"{package}.{file}")  # None: the model does without
        if module:
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
        if is_stack(model.config.to_dict()):
            assert len(cache.layers) == model.config.num_hidden_layers
        elif is_recurrent(model.config.to_dict()):
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
    recurrent, stack = is_recurrent(model.config.to_dict()), is_stack(model.config.to_dict())
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
    if "gated" in model.config.model_type:  # as flash-linear-attention may write it
        config = type(model.config)(**dict(model.config.to_dict(), num_v_heads=model.config.num_heads, expand_v=2.0))
        assert config.num_v_heads is None, "num_v_heads"
        assert type(model)(config).num_parameters() == model.num_parameters(), "expand_v"
    if stack:
        pass  # its parts are those of the others
    elif recurrent:
        check_recurrence_precision(model)
        check_recurrent_initialization(model)
    else:
        check_precision(model)
        if "-dh" not in name:  # two heads
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


def run_checks(names, check):
    """Prints check(name, folder) of each name that has the word of the command line, and exits."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    names = [name for name in names if word in name]
    assert names, f"no model's name has {word}"
    failed = 0
    print(f"transformers {transformers.__version__}, PyTorch {torch.__version__}")
    with tempfile.TemporaryDirectory() as work:
        for name in names:
            try:
                print(f"{name}: {check(name, Path(work))}", flush=True)
            except Exception as problem:
                failed += 1
                traceback.print_exc()
                print(f"{name}: FAILED: {problem}", flush=True)
    print(f"{len(names) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    run_checks(FIXTURE_NAMES, check_fixture)

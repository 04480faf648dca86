#!/usr/bin/env python3
"""
Writes a transformer-llama checkpoint as a plain LlamaForCausalLM folder, for programs that do not run a
model's own code, such as vLLM and llama.cpp:

    scripts/hf/to_llama.py DIR OUT [--length T]

DIR is a checkpoint of the trainer, a run, whose newest one it is, or a folder that transformers saved from
one. The two models are the same function: Llama too rotates the pairs of channels (i, i + dh/2), and it has
the rows of gate_proj [2I, d] as two matrices. So only names change: the data stays as it is, byte for byte.
Needs nothing but Python 3.9.
"""
import json
import math
import shutil
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import Error, Parser, checkpoint, counted, new_folder, run  # noqa: E402

INDEX = "model.safetensors.index.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")

# What Llama computes. A key that config.json leaves out has this value.
LLAMA = dict(model_type="transformer-project_fox", use_rope=True, fgate_type="none", qk_norm=False,
             use_output_norm=False, use_output_gate=False, use_k_shift=False, use_v_shift=False,
             hidden_act="swish", window_size=None, document_reset=False)


def read_json(path):
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path.name}: {problem}") from None


def read_config(folder):
    """config.json. Anything that Llama does not compute is a ValueError."""
    config = read_json(folder / "config.json")
    for key, value in LLAMA.items():
        if config.get(key, value) != value:
            raise ValueError(f"config.json: {key} is {config[key]!r}, and only {value!r} can be a Llama")
    if not config.get("intermediate_size"):
        wanted = math.floor(config["hidden_size"] * config["hidden_ratio"] * 2 / 3)
        config["intermediate_size"] = 256 * math.ceil(wanted / 256)
    config["num_kv_heads"] = config.get("num_kv_heads") or config["num_heads"]
    return config


def trained_length(folder, config):
    if config.get("max_position_embeddings"):
        return config["max_position_embeddings"]
    if not (folder / "trainer.json").exists():
        raise ValueError("trainer.json is missing: give the length of its sequences with --length")
    return read_json(folder / "trainer.json")["options"]["seq-len"]


def rotations(folder, config, length):
    """Keys of config.json: YaRN's length is, unless given, that of the training before, times the factor."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if scaling:
        scaling = {k: v for k, v in scaling.items() if k != "rope_theta"}
        if scaling.setdefault("rope_type", scaling.get("type", "default")) == "yarn":
            if "original_max_position_embeddings" not in scaling:
                scaling["original_max_position_embeddings"] = config["max_position_embeddings"]
            length = length or round(scaling["original_max_position_embeddings"] * scaling["factor"])
    return dict(max_position_embeddings=length or trained_length(folder, config), rope_scaling=scaling or None)


def llama_config(config, rotated, dtype):
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "initializer_range")
    return dict(
        architectures=["LlamaForCausalLM"], model_type="llama", **{key: config[key] for key in same},
        num_attention_heads=config["num_heads"], num_key_value_heads=config["num_kv_heads"],
        head_dim=config["hidden_size"] // config["num_heads"], hidden_act="silu",
        **rotated, rms_norm_eps=config["norm_eps"], rope_theta=config["rope_base"],
        attention_bias=False, mlp_bias=False,
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        bos_token_id=config.get("bos_token_id"), eos_token_id=config.get("eos_token_id"), torch_dtype=dtype)


def layout(config):
    """{name in DIR: (shape, names in OUT that share its rows)}"""
    V, d, I = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    kd = d // config["num_heads"] * config["num_kv_heads"]
    names = {"model.embeddings.weight": ([V, d], ["model.embed_tokens.weight"]),
             "model.norm.weight": ([d], ["model.norm.weight"])}
    if not config.get("tie_word_embeddings"):
        names["lm_head.weight"] = [V, d], ["lm_head.weight"]
    layer = {"attn_norm": ([d], ["input_layernorm"]), "mlp_norm": ([d], ["post_attention_layernorm"]),
             "mlp.gate_proj": ([2 * I, d], ["mlp.gate_proj", "mlp.up_proj"]),
             "mlp.down_proj": ([d, I], ["mlp.down_proj"]),
             **{f"attn.{x}_proj": ([kd if x in "kv" else d, d], [f"self_attn.{x}_proj"]) for x in "qkvo"}}
    for i in range(config["num_hidden_layers"]):
        for name, (shape, new) in layer.items():
            names[f"model.layers.{i}.{name}.weight"] = shape, [f"model.layers.{i}.{x}.weight" for x in new]
    return names


def read_header(path):
    """The header of a safetensors file, and its length in bytes."""
    with open(path, "rb") as f:
        (length,) = struct.unpack("<Q", f.read(8).ljust(8, b"\xff"))
        if length > path.stat().st_size - 8:
            raise ValueError(f"{path.name}: is cut short or not a safetensors file")
        return json.loads(f.read(length)), length


def rename(path, header, length, names):
    """The header with Llama's names. The data must be all there."""
    new, size = {"__metadata__": {"format": "pt"}}, path.stat().st_size - 8 - length
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        shape, parts = names.get(name, (None, None))
        if tensor["shape"] != shape:
            raise ValueError(f"{path.name}: {name} has shape {tensor['shape']}; config.json gives {shape}")
        begin, end = tensor["data_offsets"]
        bytes_of_part, rows = (end - begin) // len(parts), shape[0] // len(parts)
        for i, part in enumerate(parts):
            new[part] = dict(dtype=tensor["dtype"], shape=[rows, *shape[1:]],
                             data_offsets=[begin + i * bytes_of_part, begin + (i + 1) * bytes_of_part])
    if size != max(tensor["data_offsets"][1] for tensor in header.values()):
        raise ValueError(f"{path.name}: has {counted(size, 'byte')} of data: it is cut short")
    return new


def copy(path, to, new, length):
    """Copies a file with another header."""
    text = json.dumps(new).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "rb") as source, open(to, "xb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        source.seek(8 + length)
        shutil.copyfileobj(source, f, 16 << 20)


def convert(folder, out, length):
    config = read_config(folder)
    names = layout(config)
    rotated = rotations(folder, config, length)
    sharded = not (folder / "model.safetensors").exists()
    weight_map = read_json(folder / INDEX)["weight_map"] if sharded else {"": "model.safetensors"}
    files = sorted(set(weight_map.values()))
    headers = {file: read_header(folder / file) for file in files}
    found = [name for header, _ in headers.values() for name in header if name != "__metadata__"]
    for name in names:
        if found.count(name) != 1:
            raise ValueError(f"tensor {name} is in {counted(found.count(name), 'file')}")
    dtype = dict(F32="float32", BF16="bfloat16", F16="float16", F64="float64")[
        headers[files[0]][0][found[0]]["dtype"]]
    new = {file: rename(folder / file, *headers[file], names) for file in files}
    with new_folder(out) as part:  # checked before: everything but the disk
        for file in files:
            copy(folder / file, part / file, new[file], headers[file][1])
        if sharded:
            where = {name: file for file in files for name in new[file] if name != "__metadata__"}
            (part / INDEX).write_text(json.dumps(dict(metadata={}, weight_map=where), indent=2) + "\n")
        for name in TOKENIZER:
            if (folder / name).exists():
                shutil.copy(folder / name, part)
        (part / "config.json").write_text(json.dumps(llama_config(config, rotated, dtype), indent=2) + "\n")


def main():
    parser = Parser(__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="a checkpoint, or a run, whose newest one it is")
    parser.add_argument("out", metavar="OUT", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--length", metavar="T", type=int, help="of its sequences [that in trainer.json]")
    args = parser.parse_args()
    try:
        args.folder = Path(checkpoint(args.folder))
        convert(args.folder, args.out, args.length)
    except ValueError as problem:
        raise Error(f"{args.folder}: {problem}")
    except (KeyError, TypeError, AttributeError) as problem:
        raise Error(f"{args.folder}: a key is missing or has a value of another type: {problem}")


if __name__ == "__main__":
    run(main)

"""Makes and checks the files of the tests in cli/ and resume/ and of test_gpu.sh. A second implementation of the file formats,
independent of the C code; needs only Python's standard library.

    cli_files.py make FOLDER              valid and invalid shards; model folders with one defect each
    cli_files.py nan FILE TENSOR          writes a NaN into a float32 tensor of a safetensors file, and drops a
                                          checkpoint's checksums
    cli_files.py fill FILE TENSOR VALUE   the same, with the value in all of the tensor
    cli_files.py drop FILE TENSOR         takes a tensor out of a safetensors file
    cli_files.py join FILE                joins each MLP's gate_proj and up_proj in one gate_proj
    cli_files.py flip FILE POSITION       flips a bit; POSITION from 0 to 1 says where in the file
    cli_files.py unseal FILE              drops the checksums of a trainer.json
    cli_files.py names FOLDER FAMILY      checks tensor names, shapes and config.json of a checkpoint of the family
    cli_files.py dump FILE SHARD B T V [FOLDER]   checks a --dump: losses follow from logits and the shard's tokens; every
                                          gradient is finite and not all zero; with FOLDER, names and shapes are the
                                          checkpoint's
    cli_files.py log FILE LR WARMUP MAX BATCH    checks a JSON log: steps, learning rates of the schedule, other events
    cli_files.py same_steps LOG LOG       checks that two logs have the same steps and losses; of a step that is logged
                                          twice, the last line counts
    cli_files.py spikes LOG K LEAST       checks which steps --skip-spikes K left out, at least LEAST
    cli_files.py strike SIGNAL STEP SPIN PROGRAM OPTION...   runs the program until it has printed STEP, sends it the
                                          signal, and prints its exit code. SPIN loop iterations delay the signal
    cli_files.py strike_pipe SIGNAL STEP PROGRAM OPTION...   the same, but closes the pipe from the program's stdout before
                                          the signal
    cli_files.py interrupt TEXT N PROGRAM OPTION...   sends Ctrl-C, up to N times, to a program whose terminal shows TEXT;
                                          prints its exit code and what it is stopping after
"""

import array, copy, fcntl, json, math, os, shutil, signal, socket, struct, subprocess, sys, threading

# ----------------------------------------------------------------------------
# safetensors


def read(path):
    """Returns the header without metadata, and the data."""
    with open(path, "rb") as f:
        file = f.read()
    size = struct.unpack("<Q", file[:8])[0]
    header = json.loads(file[8 : 8 + size])
    header.pop("__metadata__", None)
    return header, file[8 + size :]


def write(path, header, data, claimed=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text) if claimed is None else claimed) + text + data)


def values(header, data, name):
    assert header[name]["dtype"] == "F32", name
    begin, end = header[name]["data_offsets"]
    result = array.array("f", data[begin:end])
    assert len(result) == math.prod(header[name]["shape"]), name
    return result


def put(path, name, value, everywhere):
    header, data = read(path)
    data = bytearray(data)
    begin, end = header[name]["data_offsets"]
    for at in range(begin, end, 4) if everywhere else [begin + 4]:
        struct.pack_into("<f", data, at, value)
    write(path, header, data)
    drop_checksums(path)


def drop(path, name):
    header, data = read(path)
    first, last = header.pop(name)["data_offsets"]
    for tensor in header.values():
        tensor["data_offsets"] = [at - (last - first if at >= last else 0) for at in tensor["data_offsets"]]
    write(path, header, data[:first] + data[last:])
    drop_checksums(path)


def join(path):
    header, data = read(path)
    for up in [name for name in header if ".up_proj." in name]:
        gate, (first, last) = header[up.replace("up_proj", "gate_proj")], header.pop(up)["data_offsets"]
        begin, end = gate["data_offsets"]
        gate.update(shape=[2 * gate["shape"][0], gate["shape"][1]],
                    data_offsets=[len(data), len(data) + end - begin + last - first])
        data += data[begin:end] + data[first:last]
    packed = b""  # without what nothing names any more
    for tensor in header.values():
        begin, end = tensor["data_offsets"]
        tensor["data_offsets"] = [len(packed), len(packed) + end - begin]
        packed += data[begin:end]
    write(path, header, packed)
    drop_checksums(path)


def drop_checksums(path):
    record = os.path.join(os.path.dirname(path), "trainer.json")
    if os.path.exists(record):  # the checksums would tell
        unseal(record)


def unseal(path):
    state = json.load(open(path))
    state.pop("checksums", None)
    json.dump(state, open(path, "w"))


def flip(path, position):
    with open(path, "r+b") as f:
        data = f.read()
        at = min(int(position * len(data)), len(data) - 1)
        f.seek(at)
        f.write(bytes([data[at] ^ 1 << at % 8]))


# ----------------------------------------------------------------------------
# shards


def tokens(count, below):
    """Random ids whose frequency falls with the id, as in text: the sample is below * u^2 for uniform u."""
    state, ids = 1, array.array("H")
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        u = (state >> 33) / 2**31
        ids.append(int(below * u * u))
    return ids


def shard(path, ids, doc_len=0, vocab=0, magic=20240520, version=1, count=None):
    head = [magic, version, len(ids) if count is None else count, doc_len, vocab]
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", *head, *[0] * 251) + ids.tobytes())


def make_shards(folder):
    os.makedirs(folder)
    at = lambda name: os.path.join(folder, name + ".bin")
    ids = tokens(4000, 257)
    shard(at("text"), ids, vocab=257)
    shard(at("plain"), ids)  # llm.c's header: magic, version, count; the other fields are 0
    shard(at("part_0"), ids[:1500], vocab=257)
    shard(at("part_1"), ids[1500:2900], vocab=257)
    shard(at("part_2"), ids[2900:], vocab=257)
    shard(at("val"), tokens(35, 257), vocab=257)  # two sequences of 16, less than a micro-batch
    shard(at("documents"), ids[:3200], doc_len=32, vocab=257)
    plain, noise = tokens(170 * 64 + 1, 12), tokens(63, 257)
    shard(at("no_spike"), plain, vocab=257)  # and with 64 tokens more, of which a step 151 of 64 has all targets of noise
    shard(at("spike"), plain[: 150 * 64 + 1] + noise + plain[150 * 64 :], vocab=257)
    shard(at("wide"), array.array("I", ids), vocab=257, version=2)
    shard(at("forty"), tokens(1000, 40))
    shard(at("gpt2"), tokens(1000, 50257))
    # invalid
    shard(at("magic"), ids, magic=20240521)
    shard(at("llama3"), ids, magic=20240801)
    shard(at("version"), ids, version=4)
    shard(at("truncated"), ids[:-7], count=4000)
    shard(at("longer"), ids, count=3999)
    shard(at("negative"), ids, count=-4000)
    shard(at("no_tokens"), ids[:0])
    shard(at("short"), ids[:16])  # one token short: the last input has no target
    shard(at("half_document"), ids, doc_len=48)
    shard(at("vocabulary"), ids, vocab=50257)
    high = copy.copy(ids)
    high[1000] = 257
    shard(at("high_id"), high)
    huge = array.array("I", ids)
    huge[1000] = 2**31 + 5
    shard(at("huge_id"), huge, version=2)
    open(at("empty"), "wb").close()
    with open(at("stub"), "wb") as f:
        f.write(struct.pack("<3i", 20240520, 1, 4000))


# ----------------------------------------------------------------------------
# model folders with one defect each, from a valid one in dev/test/fixtures

GOOD = "dev/test/fixtures/model/fox-pro"


def make_configs(folder):
    with open(GOOD + "/config.json") as f:
        good = json.load(f)
    changes = {
        "width_0": {"hidden_size": 0},
        "heads_3": {"num_heads": 3},
        "heads_0": {"num_heads": 0},
        "layers_negative": {"num_hidden_layers": -2},
        "layers_huge": {"num_hidden_layers": 10**9},
        "width_fraction": {"hidden_size": 16.5},
        "width_text": {"hidden_size": "16"},
        "width_word": {"hidden_size": "wide"},
        "width_list": {"hidden_size": [16]},
        "width_null": {"hidden_size": None},
        "width_nan": {"hidden_size": math.nan},
        "width_1e400": {"hidden_size": 10**400},
        "flag_text": {"use_k_shift": "true"},
        "vocab_huge": {"vocab_size": 10**18},
        "eos_outside": {"eos_token_id": 40},
        "gate_unknown": {"fgate_type": "half"},
        "tied": {"tie_word_embeddings": True},
        "windowed": {"window_size": -1},
        "grouped": {"num_kv_heads": 3},
        "other_model": {"model_type": "gpt2"},
        "other_width": {"hidden_size": 32},
        "other_mlp": {"intermediate_size": 32},
        "other_switch": {"use_k_shift": False},
        "more_layers": {"num_hidden_layers": 3},
        "fewer_layers": {"num_hidden_layers": 1},
    }
    texts = {name: json.dumps({**good, **change}) for name, change in changes.items()}
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads"):
        texts["no_" + key] = json.dumps({k: v for k, v in good.items() if k != key})
    texts["not_json"] = "hidden_size = 16\n"
    texts["cut"] = json.dumps(good)[:-20]
    texts["list"] = "[1, 2]"
    texts["nothing"] = ""
    texts["deep"] = "[" * 100000
    for name, text in texts.items():
        os.makedirs(os.path.join(folder, name))
        shutil.copy(GOOD + "/model.safetensors", os.path.join(folder, name))
        with open(os.path.join(folder, name, "config.json"), "w") as f:
            f.write(text)


def make_weights(folder):
    header, data = read(GOOD + "/model.safetensors")
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    target = "model.layers.1.attn.q_proj.weight"

    def put(name, new_header, new_data=data, claimed=None):
        path = os.path.join(folder, name)
        os.makedirs(path)
        shutil.copy(GOOD + "/config.json", path)
        write(path + "/model.safetensors", new_header, new_data, claimed)

    def edited(**change):
        new = copy.deepcopy(header)
        new[target].update(change)
        return new

    text = json.dumps(header).encode()
    put("header_huge", header, claimed=2**62)
    put("header_longer", header, claimed=len(text) + 8)
    put("header_past_end", header, claimed=len(text) + len(data) + 1)
    put("header_shorter", header, claimed=len(text) - 8)
    put("header_0", header, claimed=0)
    put("header_not_json", b"x" * len(text))
    put("header_list", b"[]")
    put("header_deep", b"[" * 100000)
    begin, end = header[target]["data_offsets"]
    put("overlap", edited(data_offsets=[begin - 4, end - 4]))
    put("offsets_swapped", edited(data_offsets=[end, begin]))
    put("offsets_negative", edited(data_offsets=[-4, end - begin - 4]))
    put("offsets_huge", edited(data_offsets=[2**63 - 1024, 2**63 - 1]))
    put("offsets_three", edited(data_offsets=[begin, end, end]))
    put("shape_other", edited(shape=[8, 32]))
    put("shape_flat", edited(shape=[256]))
    put("shape_negative", edited(shape=[-16, -16]))
    put("shape_huge", edited(shape=[2**40, 2**40]))
    put("type_int", edited(dtype="I32"))
    put("type_unknown", edited(dtype="F4"))
    put("data_cut", header, data[:-1])
    put("data_longer", header, data + b"\0")
    put("data_none", header, b"")
    put("tensor_missing", {k: v for k, v in header.items() if k != last}, data[: header[last]["data_offsets"][0]])
    extra = {"model.extra": {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}}
    put("tensor_extra", {**header, **extra}, data + b"\0\0\0\0")
    renamed = {k.replace("attn.q_proj", "attn.\nq"): v for k, v in header.items()}
    put("tensor_renamed", renamed)
    nan = bytearray(data)
    struct.pack_into("<f", nan, begin + 40, math.nan)
    put("nan", header, nan)
    inf = bytearray(data)
    struct.pack_into("<f", inf, begin + 40, math.inf)
    put("inf", header, inf)
    for name, content in (("file_empty", b""), ("file_7", b"\0" * 7), ("file_8", b"\xff" * 8)):
        put(name, header)
        with open(os.path.join(folder, name, "model.safetensors"), "wb") as f:
            f.write(content)
    put("file_missing", header)
    os.remove(os.path.join(folder, "file_missing/model.safetensors"))
    put("config_missing", header)
    os.remove(os.path.join(folder, "config_missing/config.json"))


# ----------------------------------------------------------------------------
# checks


def check_names(folder, family):
    """Names and shapes of the tensors are those of the paper's code, for V 257, d 32, L 2, h 2, I 32."""
    V, d, L, h, I = 257, 32, 2, 2, 32
    pro, fox = family.endswith("-pro"), family.startswith("fox")
    want = {"model.embeddings.weight": [V, d], "model.norm.weight": [d], "lm_head.weight": [V, d]}
    layer = {
        "attn_norm.weight": [d],
        "mlp_norm.weight": [d],
        "attn.q_proj.weight": [d, d],
        "attn.o_proj.weight": [d, d],
        "mlp.gate_proj.weight": [2 * I, d],
        "mlp.down_proj.weight": [d, I],
    }
    for x in "kv":
        layer[f"attn.{x}_proj" + (".linear.weight" if pro else ".weight")] = [d, d]
        if pro:
            layer[f"attn.{x}_proj.shift_proj.weight"] = [h, d]
    if fox:
        layer.update({"attn.fgate_proj.weight": [h, d], "attn.fgate_proj.bias": [h]})
    if pro:
        layer.update({"attn.ogate_proj.weight": [d, d], "attn.output_norm.weight": [d]})
        layer.update({"attn.q_norm.weight": [d], "attn.k_norm.weight": [d]})
    for i in range(L):
        want.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})

    header, _ = read(folder + "/model.safetensors")
    assert {k: v["shape"] for k, v in header.items()} == want, f"{family}: {sorted(header)}"
    assert {v["dtype"] for v in header.values()} == {"F32"}
    moments, _ = read(folder + "/optimizer.safetensors")
    both = {f"{m}.{k}": shape for m in ("exp_avg", "exp_avg_sq") for k, shape in want.items()}
    assert {k: v["shape"] for k, v in moments.items()} == both, f"{family}: {sorted(moments)}"

    with open(folder + "/config.json") as f:
        config = json.load(f)
    plain = family == "transformer-llama"
    classes = "Transformer" if plain else "ForgettingTransformer"
    wanted = {
        "architectures": [classes + "ForCausalLM"],
        "auto_map": {"Auto" + kind: "modeling_fox." + classes + kind.replace("Model", "", kind != "Model")
                     for kind in ("Config", "Model", "ModelForCausalLM")},
        "model_type": ("transformer" if plain else "forgetting_transformer") + "-project_fox",
        "vocab_size": V, "hidden_size": d, "hidden_ratio": 3.5 if pro else 4, "intermediate_size": I,
        "num_hidden_layers": L, "num_heads": h, "num_kv_heads": None, "hidden_act": "swish", "window_size": None,
        "max_position_embeddings": None, "initializer_range": 0.02, "norm_eps": 1e-6, "rope_base": 500000,
        "use_rope": not fox, "use_output_gate": pro, "ogate_act": "sigmoid", "use_output_norm": pro, "qk_norm": pro,
        "qk_norm_share_param_across_head": False, "use_k_shift": pro, "use_v_shift": pro,
        "fgate_type": "full" if fox else "none", "fgate_bias_init": False, "decay_time_min": None,
        "decay_time_max": None, "log_pruning_tolerance": -10 if fox else None, "tie_word_embeddings": False,
        "bos_token_id": V - 1, "eos_token_id": V - 1,
    }  # fmt: skip
    assert config == wanted, [k for k in {**config, **wanted} if config.get(k, "no") != wanted.get(k, "no")]


def check_dump(path, shard_path, B, T, V, folder=None):
    header, data = read(path)
    assert header["loss"]["shape"] == [B, T] and header["logits"]["shape"] == [B, T, V]
    loss, logits = values(header, data, "loss"), values(header, data, "logits")
    with open(shard_path, "rb") as f:
        ids = array.array("H", f.read()[1024:])
    for b in range(B):
        for t in range(T):
            row = logits[(b * T + t) * V : (b * T + t + 1) * V]
            top = max(row)
            want = top + math.log(sum(math.exp(x - top) for x in row)) - row[ids[b * T + t + 1]]
            assert abs(loss[b * T + t] - want) < 1e-4, f"loss {b},{t} is {loss[b * T + t]}, expected {want}"
    for name in header:
        gradient = values(header, data, name)
        assert all(map(math.isfinite, gradient)), name
        assert any(gradient), f"{name}: all zero"
    if folder:
        weights, _ = read(folder + "/model.safetensors")
        want = {k: v["shape"] for k, v in weights.items()}
        assert {k: v["shape"] for k, v in header.items() if k not in ("loss", "logits")} == want


def check_runs(lines):
    """The log begins with the run, and a resume follows the run of the process that resumes."""
    runs = [i for i, line in enumerate(lines) if line["event"] == "run"]
    assert runs[0] == 0 and lines[0]["step"] == 0, lines[0]
    for i in runs:
        run = lines[i]
        assert run["config"]["vocab_size"] > 0 and run["options"]["seed"] == run["seed"] and run["ranks"] >= 1
        assert run["step"] == 0 or lines[i + 1]["event"] == "resume", lines[i + 1]
    for i, line in enumerate(lines):
        before = lines[i - 1]  # or another of its lines, on an option that has changed
        starts = i - 1 in runs or before["event"] == "resume"
        assert line["event"] != "resume" or (starts and before["step"] == line["step"]), line


def check_log(path, lr, warmup, max_tokens, batch):
    """The log has steps 1, 2, ... Each has the learning rate of the schedule at the middle of its tokens. Checkpoints are
    every 3 steps and at the end, validations at steps 8, 16 and 20."""
    with open(path) as f:
        lines = [json.loads(line) for line in f]
    steps = [line for line in lines if line["event"] == "step"]
    count = -(-max_tokens // batch)
    assert [line["step"] for line in steps] == list(range(1, count + 1)), [line["step"] for line in steps]
    for line in steps:
        before = (line["step"] - 1) * batch
        assert line["tokens"] == before + batch
        x = before + min(batch, max_tokens - before) / 2
        want = lr * x / warmup if x < warmup else lr * (1 + math.cos(math.pi * (x - warmup) / (max_tokens - warmup))) / 2
        assert math.isclose(line["lr"], want, rel_tol=1e-12), f"step {line['step']}: lr {line['lr']}, expected {want}"
        assert 0 < line["loss"] < 10 and line["grad_norm"] > 0 and line["tokens_per_s"] > 0
    check_runs(lines)
    events = {line["event"] for line in lines}
    assert events >= {"step", "validation", "sample", "checkpoint"}, events
    assert [line["step"] for line in lines if line["event"] == "checkpoint"] == [*range(3, count, 3), count]
    validation = [line for line in lines if line["event"] == "validation"]
    assert [line["step"] for line in validation] == [8, 16, 20], validation
    for line in validation:
        assert line["val_tokens"] == 32 == sum(b["tokens"] for b in line["by_position"])
        mean = sum(b["tokens"] * b["loss"] for b in line["by_position"]) / 32
        assert math.isclose(line["val_loss"], mean, rel_tol=1e-9)
        assert math.isclose(line["bits_per_byte"], mean / math.log(2), rel_tol=1e-9)


def check_same_steps(path_a, path_b):
    losses = []
    for path in (path_a, path_b):
        with open(path) as f:
            lines = [json.loads(line) for line in f]
        check_runs(lines)
        losses.append({line["step"]: line["loss"] for line in lines if line["event"] == "step"})
    assert losses[0] == losses[1], [k for k in losses[0] if losses[0][k] != losses[1].get(k)]


def check_spikes(path, deviations, least):
    """The log's skipped steps, at least `least`, are those whose norm is beyond the deviations of the 128 norms that end with
    the step before the last one."""
    import statistics  # which takes longer to load than other commands to run

    with open(path) as f:
        steps = {line["step"]: line for line in map(json.loads, f) if line["event"] == "step"}
    for number, line in steps.items():
        norms = [steps[i]["grad_norm"] for i in range(max(1, number - 129), number - 1)]
        far = len(norms) >= 64 and line["grad_norm"] > statistics.fmean(norms) + deviations * statistics.pstdev(norms)
        assert far == ("skipped" in line), line
    assert sum("skipped" in line for line in steps.values()) >= least


# ----------------------------------------------------------------------------
# signals


def strike(name, step, spin, command, reader_goes=False):
    """Sends a signal to a running program. Its stdout takes few lines that are not read, and then blocks the program, so
    that it cannot end before the signal: a socket some 6, a pipe, which holds a page at least, some 50. With reader_goes
    it is a pipe, whose reading end is closed before the signal, as when Ctrl-C also ends `tee`."""
    if reader_goes:
        reading, writing = os.pipe()
        fcntl.fcntl(writing, 1031, 4096)  # F_SETPIPE_SZ: fcntl has this name since Python 3.10
    else:
        ends = socket.socketpair()
        ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # which becomes the least that there is
        reading, writing = (end.detach() for end in ends)
    program = subprocess.Popen(command, stdout=writing)
    os.close(writing)
    stdout = os.fdopen(reading, "rb", buffering=0)
    for line in stdout:
        words = line.split()
        if words[0] == b"step" and int(words[1].split(b"/")[0]) >= step:
            break
    for _ in range(spin):
        pass
    if reader_goes:  # the pipe's end alone would let the program go on, to its own end
        program.send_signal(signal.SIGSTOP)
        os.waitpid(program.pid, os.WUNTRACED)
        stdout.close()
    program.send_signal(getattr(signal, "SIG" + name))
    if reader_goes:
        program.send_signal(signal.SIGCONT)
    rest = b"" if reader_goes else stdout.read()
    print(program.wait())
    assert b"nan" not in rest


def interrupt(text, times, command):
    """Interrupts a program that has a terminal for its stderr, once that shows the text; again, if times is 2, once it has
    answered. Prints its exit code. Nothing is timed: what never ends is ended by a limit."""
    terminal, stderr = os.openpty()
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    os.close(stderr)
    limit = threading.Timer(120, program.kill)
    limit.start()
    shown, awaited = b"", [text.encode(), b"stopping after this"][:times]
    try:
        while True:
            while awaited and awaited[0] in shown:
                program.send_signal(signal.SIGINT)
                awaited.pop(0)
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # the program has ended
                break
        print(program.wait(), *(word for word in ("micro-batch", "step") if f"stopping after this {word};" in shown.decode()))
    finally:
        program.kill()
        limit.cancel()


if __name__ == "__main__":
    command, *args = sys.argv[1:]
    if command == "make":
        make_shards(args[0] + "/shards")
        make_configs(args[0] + "/config")
        make_weights(args[0] + "/weights")
    elif command == "nan":
        put(*args, math.nan, False)
    elif command == "fill":
        put(*args[:2], float(args[2]), True)
    elif command == "drop":
        drop(*args)
    elif command == "join":
        join(*args)
    elif command == "flip":
        flip(args[0], float(args[1]))
    elif command == "unseal":
        unseal(*args)
    elif command == "names":
        check_names(*args)
    elif command == "dump":
        check_dump(*args[:2], *map(int, args[2:5]), *args[5:])
    elif command == "log":
        check_log(args[0], float(args[1]), *map(int, args[2:]))
    elif command == "same_steps":
        check_same_steps(*args)
    elif command == "spikes":
        check_spikes(args[0], float(args[1]), int(args[2]))
    elif command == "strike":
        strike(args[0], int(args[1]), int(args[2]), args[3:])
    elif command == "strike_pipe":
        strike(args[0], int(args[1]), 0, args[2:], reader_goes=True)
    elif command == "interrupt":
        interrupt(args[0], int(args[1]), args[2:])
    else:
        sys.exit(__doc__)

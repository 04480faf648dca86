"""Checks the answers of --requests against a second implementation: its windows and pairs of context and
continuation, with log-probabilities from --dump. Only Python's standard library.

    requests.py CASE FOLDER INIT PROGRAM OPTION...    CASE is a function below; FOLDER is for files, INIT a
                                                      checkpoint of a model of bytes, trained on 16 tokens at a time
    requests.py in_training FOLDER INIT LOG FILE TOLERANCE PROGRAM OPTION...    LOG of the run of INIT, FILE its
                                                      --eval-requests
"""

import array, json, math, os, re, subprocess, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import cli_files  # noqa: E402

EOT, V, T = 256, 257, 16
folder, init, program = None, None, None


def run(arguments, **kwargs):
    return subprocess.run([*program, "--init", init, *arguments], capture_output=True, timeout=300, **kwargs)


def answers(requests, *options):
    """The answers by id. Every line has one."""
    lines = "".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in requests)
    result = run(["--requests", "-", *options], input=lines.encode("utf-8", "surrogateescape"))
    assert result.returncode == 0, result.stderr.decode()
    got = [json.loads(line) for line in result.stdout.decode("utf-8").splitlines()]
    assert len(got) == len(requests), (len(got), result.stdout)
    return {json.dumps(a.get("id")): a for a in got}


def forward(tokens):
    """Log-probabilities of tokens 1 on given those before, and whether each is the likeliest."""
    shard, dump, n = os.path.join(folder, "pass.bin"), os.path.join(folder, "pass.safetensors"), len(tokens) - 1
    cli_files.shard(shard, array.array("H", tokens))
    result = run(f"--data {shard} --dump {dump} --seq-len {n} --batch-tokens {n} --micro-batch 1".split())
    assert result.returncode == 0, result.stderr.decode()
    header, data = cli_files.read(dump)
    losses, logits = (cli_files.values(header, data, name) for name in ("loss", "logits"))
    best = [max(range(V), key=lambda v: logits[t * V + v]) for t in range(n)]
    return [-x for x in losses], [b == t for b, t in zip(best, tokens[1:])]


def near(got, want, tokens):
    """A text's log-probability. In bf16 it is off the float64 one's by up to 6e-3 for the root of its tokens (one H100, four
    families), and by other amounts beside other texts, as GEMMs of other shapes sum in another order."""
    limit = 6e-3 if "train_foxcu" in program[0] else 3e-4
    assert abs(got - want) <= limit * max(1, tokens) ** 0.5, (got, want)


def text():
    """Makes FOLDER/text.bin, to train on."""
    with open("README.md", "rb") as f:
        cli_files.shard(os.path.join(folder, "text.bin"), array.array("H", list(f.read()[:20000])))


def score():
    pairs = [("One two", " three"), ("One two ", "three"), ("One two \n ", "three"), ("", "alone"), ("x", "y"), ("x", "z"),
             ("Größe", ": €"), ("the " * 30, "end"), ("same", "a"), ("same", "b"), ("same", "cd"), ("nothing", "")]  # fmt: skip
    requests = [{"id": i, "type": "score", "context": c, "continuation": d} for i, (c, d) in enumerate(pairs)]
    ids = [{"id": f"ids {r['id']}", "type": "score", "context": list(c.rstrip().encode()),
            "continuation": list((c[len(c.rstrip()):] + d).encode())} for r, (c, d) in zip(requests, pairs)]  # fmt: skip
    got = answers(requests + ids + [{"type": "score", "continuation": "no context"}])
    for i, (context, continuation) in enumerate(pairs):
        tokens = [EOT, *(context + continuation).encode()]
        n = len(tokens) - 1 - len(context.rstrip().encode())
        losses, likeliest = forward(tokens) if n else ([], [])
        answer = got[str(i)]
        assert answer["tokens"] == n and answer["greedy"] == all(likeliest[len(likeliest) - n:]), answer
        near(answer["logprob"], math.fsum(losses[len(losses) - n:]), n)
        assert {**got[f'"ids {i}"'], "id": i} == answer
    assert got["null"]["tokens"] == 10 and "id" not in got["null"]


def rolling():
    """Windows as lm-evaluation-harness cuts them: of T tokens, context 1, made disjoint."""
    def windows(tokens, length):
        yield [EOT, *tokens[:length]], min(length, len(tokens))
        predicted = length
        while predicted < len(tokens):
            n = min(len(tokens) - predicted, length)
            end = predicted + n
            yield tokens[end - length - 1 : end], n
            predicted += n

    texts = ["a", "x" * T, "y" * (T + 1), "The quick brown fox jumps over the lazy dog, again and again."]
    for options, length in ((), T), (("--seq-len", "24"), 24):
        got = answers([{"id": i, "type": "rolling", "text": t} for i, t in enumerate(texts)] +
                      [{"id": "ids", "type": "rolling", "text": list(texts[3].encode())},
                       {"id": "empty", "type": "rolling", "text": ""}], *options)  # fmt: skip
        for i, text in enumerate(texts):
            want = math.fsum(x for tokens, n in windows(list(text.encode()), length) for x in forward(tokens)[0][-n:])
            assert got[str(i)]["tokens"] == len(text), got[str(i)]
            near(got[str(i)]["logprob"], want, len(text))
        assert got['"ids"']["logprob"] == got["3"]["logprob"] and got['"empty"'] == {"id": "empty", "logprob": 0, "tokens": 0}


def generate():
    greedy = run("--generate 30 --temperature 0 --prompt On".split()).stdout
    long = {"id": "long", "type": "generate", "prompt": "On", "max_tokens": 30, "temperature": 0}
    full = answers([long])['"long"']
    assert greedy == b"On" + bytes(t for t in full["tokens"]) + b"\n" and full["finish"] == "length", (greedy, full)
    assert full["text"] == bytes(full["tokens"]).decode("utf-8", "replace")
    stop = full["text"][3:5]
    cut = full["text"].index(stop)
    printed = run(["--generate", "30", "--temperature", "0", "--prompt", "On", "--stop", "\u1234", "--stop", stop]).stdout
    assert printed.decode() == "On" + full["text"][:cut] + "\n", printed
    cases = [{"id": i, "type": "generate", "prompt": "Once " * (i % 5), "max_tokens": 3 + i, "temperature": 0.8, "seed": i % 4,
              "top_k": [0, 20][i % 2], "top_p": [1, 0.9][i // 2 % 2], "min_p": [0, 0.01][i // 3 % 2]} for i in range(20)]  # fmt: skip
    cases += [{**long, "id": "stop", "until": [stop, "never"]}, {**long, "id": "one", "until": stop},
              {**long, "id": "ids", "until": [[1, 2], full["tokens"][2:4]]}, {**long, "id": "none", "until": None},
              {**long, "id": "default", "temperature": None, "prompt": [EOT, 79]}]  # fmt: skip
    together, alone = answers(cases), {}
    for case in cases:
        alone |= answers([case])
    differ = [(together[i], alone[i]) for i in alone if together.get(i) != alone[i]]
    assert not differ and together.keys() == alone.keys(), differ
    assert len({together[str(i)]["text"] for i in range(20)}) > 10
    exact = answers([{**long, "id": seed, "temperature": 1, "seed": seed} for seed in (2**53, 2**53 + 1)])
    assert len({answer["text"] for answer in exact.values()}) == 2, "two seeds are one"
    for name in "stop", "one":
        answer = together[f'"{name}"']
        assert answer["text"] == full["text"][:cut] and answer["finish"] == "stop", (answer, full)
    ids = full["tokens"]
    end = next(k for k in range(2, 31) if ids[k - 2 : k] == ids[2:4])
    assert together['"ids"']["tokens"] == ids[:end] and together['"ids"']["finish"] == "stop"
    assert together['"none"']["text"] == full["text"]
    assert all(len(together[str(i)]["tokens"]) <= 3 + i for i in range(20))


def documents():
    """With document_reset: what is before the last end of text changes nothing, as in the trainer's own forward pass."""
    a, b, c = (list(t) for t in (b"One two", b"three four five", b"s"))
    pairs = [(a + [EOT] + b, c), (a, b + [EOT] + c), (a + [EOT], b), ([EOT, EOT] + a, [EOT, EOT] + b), (a, [EOT]),
             ([], [EOT] + a)]  # fmt: skip
    texts = [a + [EOT] + b + [EOT] + c, [EOT] * 40, (a + [EOT]) * 9, b * 4 + [EOT] + a]
    got = answers([{"id": i, "type": "score", "context": x, "continuation": y} for i, (x, y) in enumerate(pairs)] +
                  [{"id": f"text {i}", "type": "rolling", "text": t} for i, t in enumerate(texts)])  # fmt: skip
    for i, (context, continuation) in enumerate(pairs):
        losses, likeliest = (x[-len(continuation):] for x in forward([EOT, *context, *continuation]))
        assert got[str(i)]["tokens"] == len(continuation) and got[str(i)]["greedy"] == all(likeliest), got[str(i)]
        near(got[str(i)]["logprob"], math.fsum(losses), len(continuation))
    for i, text in enumerate(texts):
        want, n = 0, len(text)
        for first in range(0, n, T):
            end = min(first + T, n)
            want += math.fsum(forward([EOT, *text][max(end - T, 0) : end + 1])[0][first - end :])
        assert got[f'"text {i}"']["tokens"] == n, got
        near(got[f'"text {i}"']["logprob"], want, n)
    ask = {"type": "generate", "max_tokens": 20, "temperature": 1, "seed": 3}
    # the last one is too long, but for the cut
    prompts = {"whole": a + [EOT] + b, "last": b, "ends": a + [EOT], "none": [], "long": a * 10000 + [EOT] + b}
    got = answers([{**ask, "id": i, "prompt": p} for i, p in prompts.items()])
    text = {i: got[f'"{i}"']["tokens"] for i in prompts}
    assert text["whole"] == text["last"] == text["long"] and text["ends"] == text["none"], got


def errors():
    cases = [
        ("nonsense", "line 1: bad JSON"), ("[1]", "line 2: not a JSON object"), ('{"id":1}', '"type": not one of'),
        ('{"id":2,"type":"sum"}', '"type": not one of'), ('{"id":3,"type":"score","context":"x"}', '"continuation" is missing'),
        ('{"id":4,"type":"score","context":1,"continuation":"x"}', '"context": neither text nor'),
        ('{"id":5,"type":"rolling","text":[1,300]}', '"text": token 300, of a vocabulary of 257'),
        ('{"id":6,"type":"rolling","text":["a"]}', "a list of token ids has another value"),
        ('{"id":7,"type":"generate","prompt":"x","max_tokens":0}', '"max_tokens": not a whole number from 1 to 16777216'),
        ('{"id":8,"type":"generate","prompt":"x","max_tokens":1.5}', '"max_tokens": not a whole number'),
        ('{"id":8,"type":"generate","prompt":"x","max_tokens":1e20}', '"max_tokens": not a whole number'),  # above int64_t
        ('{"id":9,"type":"generate","prompt":"x","temperature":-1}', '"temperature": not a number from 0 to 100'),
        ('{"id":10,"type":"generate","prompt":"x","until":[1]}', '"until": neither a text nor a list'),
        ('{"id":10,"type":"generate","prompt":"x","expected":1}', '"expected": neither text nor a list'),
        ('{"id":10,"type":"generate","prompt":"x","expected":[257]}', '"expected": token 257, of a vocabulary of 257'),
        ('{"id":10,"type":"rolling","text":"x","expected":"y"}', '"expected": not a member of a request of type rolling'),
        ('{"id":11,"type":"generate","prompt":"x","max_token":1}', '"max_token": not a member of a request of type generate'),
        ('{"id":12,"type":"generate","prompt":"x","max_tokens":16000000}', "more than the 65536 that a sequence can have"),
        ('{"id":13,"type":"rolling","text":"\\u0000"}', "\\u0000 in a string is not supported"), ("[" * 100, "nested too deeply"),
        ('{"id":16,"type":"rolling","text":"x","id type":1}', '"id type": not a member'),
        ('{"id":17,"type":"rolling","text":"x","":1}', '"": not a member'),
        ('{"id":18,"type":"rolling","text":"x","text ":1}', '"text ": not'),
        ('{"id":19,"type":"generate","prompt":"x","top_k top_p":1}', '"top_k top_p": not a member'),
        ('{"id":20,"type":"generate","prompt":"x","prom":1}', '"prom": not a member of'),
        ('{"id":14,"type":"rolling","text":"cut', "closing quote"),
        ('{"id":15,"type":"rolling","text":"\udcff"}', "invalid UTF-8"),
    ]  # fmt: skip
    good = {"id": [None, {"a": 1}], "type": "rolling", "text": "good"}
    lines = "".join(line + "\n" for line, _ in cases) + "\n \n" + json.dumps(good)  # no line break at the end
    result = run(["--requests", "-"], input=lines.encode("utf-8", "surrogateescape"))
    got = [json.loads(line) for line in result.stdout.decode().splitlines()]
    assert result.returncode == 0 and len(got) == len(cases) + 1, (result.stderr, got)
    for (line, message), answer in zip(cases, got):
        assert answer["error"].startswith("line ") == ("id" not in answer), (line, answer)
        assert message in answer["error"] and "\n" not in answer["error"], (line, answer)
    assert [a.get("id") for a in got[2:5]] == [1, 2, 3] and got[-1]["id"] == good["id"] and got[-1]["tokens"] == 4
    number = "123456789012345678901234567890.10"
    result = run(["--requests", "-"], input=('{"id": %s ,"type":"rolling","text":"x"}' % number).encode())
    assert result.stdout.startswith(b'{"id":' + number.encode() + b',"logprob"'), result.stdout
    # the strings are escaped, \r and \t between values not
    spaced = {"id": [1, {"\r\x1f\x7f": "\t\n\r"}], "type": "rolling", "text": "x"}
    line = json.dumps(spaced, separators=(",\r\t", "\r:\t"))
    for request in line, line.replace("text", "texts"):
        result = run(["--requests", "-"], input=request.encode())
        assert not re.search(rb"[\0-\t\v-\x1f]", result.stdout) and json.loads(result.stdout)["id"] == spaced["id"], result.stdout


def stream():
    """A request of a pipe is answered while the pipe is open, and while a longer one is being answered."""
    process = subprocess.Popen([*program, "--init", init, "--requests", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)  # fmt: skip

    def send(request, line_break=b"\n"):
        process.stdin.write(json.dumps(request).encode() + line_break)
        process.stdin.flush()

    def receive():
        return json.loads(process.stdout.readline())["id"]

    for i in range(3):
        send({"id": i, "type": "score", "context": "a", "continuation": "b"})
        assert receive() == i
    length = 4000 if "sanitized" in program[0] else 20000  # seconds
    send({"id": "long", "type": "generate", "prompt": "", "max_tokens": length, "top_k": 1, "until": ["\u1234"]})
    send({"id": "short", "type": "score", "context": "a", "continuation": "b"})
    first = receive()
    send({"id": "last", "type": "score", "context": "a", "continuation": "b"}, b"")
    process.stdin.close()
    assert first == "short" and {receive(), receive()} == {"long", "last"}
    assert process.stdout.read() == b"" and process.wait() == 0


def expected():
    """Whether a generation contains what is expected: text, of what an "until" leaves of it, or ids."""
    ask = {"type": "generate", "prompt": "On", "max_tokens": 30, "temperature": 0}
    full = answers([ask])["null"]
    assert "match" not in full
    text, ids, end = full["text"], full["tokens"], full["text"][10:14]
    cut = text.index(end)
    cases = [(text, True), (text[3:6], True), (text + "x", False), ("", True), (ids, True), (ids[3:6], True),
             ([*ids[3:6], V - 1], False), (ids + ids[:1], False), ([], True)]  # fmt: skip
    until = [(text[: cut], True), (text[: cut + 1], False)]
    got = answers([{**ask, "id": i, "expected": what} for i, (what, _) in enumerate(cases)] +
                  [{**ask, "id": f"until {i}", "expected": what, "until": [end]} for i, (what, _) in enumerate(until)] +
                  [{**ask, "id": "none", "expected": None}])  # fmt: skip
    for i, (what, match) in enumerate(cases):
        assert got[str(i)] == {**full, "id": i, "match": match}, (what, got[str(i)])
    for i, (what, match) in enumerate(until):
        assert got[f'"until {i}"']["match"] == match, (what, got[f'"until {i}"'])
    assert "match" not in got['"none"']


def in_training(log, path, tolerance):
    """The last evaluation of a training sums what --requests answers with its last checkpoint."""
    with open(path) as f:
        asked = [json.loads(line) for line in f if line.strip()]
    with open(log) as f:
        got = [line for line in map(json.loads, f) if line["event"] == "evaluation"][-1]["requests"]
    answered = answers([{**request, "id": i} for i, request in enumerate(asked)])
    by_type = {}
    for i, request in enumerate(asked):
        by_type.setdefault(request["type"], []).append(answered[str(i)])
    mean = lambda answers, key: math.fsum(a[key] for a in answers) / len(answers)
    want = {"errors": 0}
    for kind in "score", "rolling":
        n = sum(a["tokens"] for a in by_type[kind])
        want[kind] = {"requests": len(by_type[kind]), "tokens": n, "logprob": mean(by_type[kind], "logprob"),
                      "logprob_per_token": mean(by_type[kind], "logprob") * len(by_type[kind]) / n}  # fmt: skip
    want["score"]["greedy"] = mean(by_type["score"], "greedy")
    matches = [a for a in by_type["generate"] if "match" in a]
    want["generate"] = {"requests": len(by_type["generate"]), "tokens": sum(len(a["tokens"]) for a in by_type["generate"]),
                        "expected": len(matches), "match": mean(matches, "match")}  # fmt: skip
    assert 0 < want["score"]["greedy"] < 1 and 0 < want["generate"]["match"] < 1, want
    assert got.keys() == want.keys() and got["errors"] == 0, got
    for kind in by_type:
        assert got[kind].keys() == want[kind].keys(), got
        for key, value in want[kind].items():
            assert abs(got[kind][key] - value) <= tolerance * abs(value), (kind, key, got, want)


def many():
    """More requests than a window holds, from a file: each has the answer that it has alone."""
    path = os.path.join(folder, "many.jsonl")
    requests = [{"id": i, "type": "score", "context": "Question " + str(i // 4) * 9, "continuation": f" answer {i % 4}"}
                for i in range(1300)]  # fmt: skip
    with open(path, "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in requests)
    result = run(["--requests", path])
    got = {a["id"]: a for a in map(json.loads, result.stdout.decode().splitlines())}
    assert result.returncode == 0 and len(got) == len(requests)
    for i in 0, 511, 512, 1299:
        assert got[i] == answers([requests[i]])[str(i)]


def mixed():
    """Greedy and sampled generations and scores of one prompt in a batch: each has the answer that it has alone, in a
    process of its own."""
    greedy, alone = {"type": "generate", "max_tokens": 12, "temperature": 0}, {}
    for seed in range(6):
        sampled = {"type": "generate", "max_tokens": 12, "temperature": 1, "seed": seed}
        kinds = [sampled, greedy, {**sampled, "temperature": 2}, {**sampled, "top_k": 5}, greedy,
                 {**greedy, "top_k": 3, "seed": seed}, {"type": "score", "continuation": [65, 66]}]  # fmt: skip
        for prompt in ("", "The quick ")[seed % 2 :]:
            batch = [{**kind, "context" if kind["type"] == "score" else "prompt": prompt} for kind in kinds]
            for order in batch, batch[::-1]:
                together = answers([{**request, "id": i} for i, request in enumerate(order)])
                for i, request in enumerate(order):
                    key = json.dumps(request, sort_keys=True)
                    alone[key] = alone.get(key) or answers([request])["null"]
                    want, got = {**alone[key], "id": i}, dict(together[str(i)])
                    if request["type"] == "score":
                        near(got["logprob"], want["logprob"], 2)
                        got["logprob"] = want["logprob"]
                    assert got == want, (request, got, want)
    assert len({a.get("text") for a in alone.values()}) > 12


def reused():
    """Slots in which sequences of another length have forgotten pages: what follows in them is answered as in a fresh process,
    in every way to decode: one token alone, a short prompt, several sequences, a long prompt, a fork."""
    with open("README.md", "rb") as f:
        words = list(f.read(9000))
    before = [{"id": i, "type": "generate", "prompt": words[:n], "max_tokens": more, "temperature": 0}
              for i, (n, more) in enumerate([(9000, 300), (2000, 100), (900, 200)])]  # fmt: skip

    def generation(i, prompt):
        return {"id": i, "type": "generate", "prompt": prompt, "max_tokens": 80, "temperature": 1, "seed": i}

    batches = [[generation(0, "")], [generation(1, "Once")],
               [generation(2, ""), generation(3, "One two"), generation(4, "x" * 300)],
               [generation(5, "x" * 300)], [generation(i, "The same beginning") for i in range(6, 9)],
               [{"id": 9, "type": "score", "context": "", "continuation": "x" * 100}]]  # fmt: skip
    with open(os.path.join(folder, "reused.stderr"), "w+") as stderr:
        process = subprocess.Popen([*program, "--init", init, "--requests", "-"], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=stderr)  # fmt: skip

        def ask(requests):
            process.stdin.write("".join(json.dumps(r) + "\n" for r in requests).encode())
            process.stdin.flush()
            got = [json.loads(process.stdout.readline()) for _ in requests]
            return {json.dumps(a["id"]): a for a in got}

        for batch in batches:
            lengths = [len(a["tokens"]) for a in ask(before).values()]
            assert max(lengths) == 300, lengths
            got, want = ask(batch), answers(batch)
            assert got == want, (got, want)
        process.stdin.close()
        assert process.wait() == 0
        stderr.seek(0)
        printed = stderr.read()
    with open(os.path.join(init, "config.json")) as f:
        config = json.load(f)
    forgets = config.get("fgate_type", "none") != "none" and config["qk_norm"]
    assert (float(re.search(r"([0-9.]+) MiB forgotten", printed)[1]) > 0) == forgets, printed


if __name__ == "__main__":
    case, folder, init, *program = sys.argv[1:]
    if case == "in_training":
        log, path, tolerance, *program = program
        in_training(log, path, float(tolerance))
    else:
        globals()[case]()

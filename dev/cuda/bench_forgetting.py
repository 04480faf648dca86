#!/usr/bin/env python3
"""
What a cache that forgets saves in decoding: bytes held and tokens/s of --requests, with and without forgetting.

    dev/cuda/bench_forgetting.py [--trainer ./train_foxcu] --init DIR --data GLOB [--lengths 16384,65536]
        [--tokens 1024] [--sequences 1]

For each length the first so many tokens of --sequences documents or windows of the shards are prompts of
`generate` requests to one process. Decoding is the time of --tokens tokens beyond that of one token, so that the
prompt does not count. MiB forgotten are those of all requests. Without forgetting: log_pruning_tolerance=null,
which prunes no prompt either. Prints one line a run. Only Python's standard library.
"""
import argparse
import glob
import json
import re
import subprocess
import sys
import tempfile
import time
from array import array

END = re.compile(r"at most ([\d.]+) MiB held, ([\d.]+) MiB forgotten")
HEADER = 256  # int32 at the beginning of a shard


def shard_tokens(path, count):
    """Up to `count` tokens of a shard from its first one on, and the length of its documents; 0: a stream."""
    with open(path, "rb") as f:
        header = array("i", f.read(4 * HEADER))
        if len(header) < HEADER or header[0] != 20240520 or header[1] not in (1, 2):
            sys.exit(f"error: {path}: not a shard of version 1 or 2")
        tokens = array("H" if header[1] == 1 else "I")
        tokens.frombytes(f.read(min(count, header[2]) * tokens.itemsize))
    return tokens, header[3]


def prompts(pattern, sequences, length):
    """Lists of `length` tokens: beginnings of documents that are as long, or windows of a stream."""
    found = []
    for path in sorted(glob.glob(pattern)):
        _, documents = shard_tokens(path, 0)
        stride = documents or length
        tokens, _ = shard_tokens(path, stride * sequences)
        found += [tokens[at:at + length].tolist() for at in range(0, len(tokens) - length + 1, stride)
                  if stride >= length]
    if len(found) < sequences:
        sys.exit(f"error: --data {pattern}: {len(found)} sequences of {length} tokens, not {sequences}")
    return found[:sequences]


def answers(process, texts, tokens):
    """Seconds until all requests of so many tokens are answered, and the number of generated tokens."""
    start = time.monotonic()
    for i, text in enumerate(texts):
        request = {"id": i, "type": "generate", "prompt": text, "max_tokens": tokens, "seed": i}
        print(json.dumps(request), file=process.stdin)
    process.stdin.flush()
    generated = 0
    for _ in texts:
        answer = json.loads(process.stdout.readline() or '{"error": "the trainer ended"}')
        if "error" in answer:
            sys.exit(f"error: {answer['error']}")
        generated += len(answer["tokens"])
    return time.monotonic() - start, generated


def run(command, texts, tokens):
    """Seconds of the prompts, tokens decoded and their seconds, MiB held and MiB forgotten. The first requests warm
    up."""
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen([*command, "--requests", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=stderr, text=True)
        answers(process, texts, 8)
        prompt, first = answers(process, texts, 1)
        seconds, generated = answers(process, texts, tokens)
        process.stdin.close()
        code = process.wait()
        stderr.seek(0)
        lines = stderr.read().splitlines()
    end = END.search(lines[-1]) if lines else None
    if code != 0 or not end:
        sys.exit(f"error: {' '.join(command)}: {lines[-1] if lines else 'failed'}")
    return prompt, generated - first, seconds - prompt, *map(float, end.groups())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", default="./train_foxcu")
    parser.add_argument("--init", required=True, metavar="DIR")
    parser.add_argument("--data", required=True, metavar="GLOB")
    parser.add_argument("--lengths", default="16384,65536")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=1)
    options = parser.parse_args()
    print("  context  sequences  forgets  MiB held  MiB forgotten  prompt s  tokens decoded  tokens/s")
    for length in map(int, options.lengths.split(",")):
        texts = prompts(options.data, options.sequences, length)
        for forgets in False, True:
            command = [options.trainer, "--init", options.init, "--seq-len", str(length + options.tokens + 1)]
            command += [] if forgets else ["--set", "log_pruning_tolerance=null"]
            prompt, decoded, seconds, held, forgotten = run(command, texts, options.tokens)
            rate = f"{decoded / seconds:10.0f}" if seconds > 0 else f"{'-':>10}"
            print(f"{length:9d} {options.sequences:10d} {'yes' if forgets else 'no':>8} {held:9.1f} {forgotten:14.1f} "
                  f"{prompt:9.2f} {decoded:15d} {rate}", flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""
Stands in for a trainer in tests of scripts/eval: `fake_requests.py --init DIR --requests - [...]` answers the
same requests with a model that copies. Its next token is the one that followed the last occurrence of the
longest suffix it finds again, of at most 16 tokens, among the last `window` tokens.

DIR/config.json: vocab_size 257: bytes; 513: also " x" as one token, so that text and its parts tokenize
differently. window: tokens that the model sees. fail_after: exits with code 3 after so many answers.
"""
import json
import math
import os
import sys

END_OF_TEXT = 256
COPIED = 0.9  # probability of the copied token; the others share the rest


def tokenize(text, vocab_size):
    """Bytes; with a vocabulary of 513, a space and the next byte are one token."""
    ids = []
    for byte in text.encode():
        if vocab_size > 257 and ids and ids[-1] == ord(" "):
            ids[-1] = 257 + byte
        else:
            ids.append(byte)
    return ids


def detokenize(ids):
    tokens = (bytes([i]) if i < 256 else bytes([ord(" "), i - 257]) for i in ids if i != END_OF_TEXT)
    return b"".join(tokens).decode()


class Model:
    def __init__(self, folder):
        with open(f"{folder}/config.json") as f:
            self.config = json.load(f)
        self.vocab_size = self.config["vocab_size"]
        self.window = self.config.get("window", 1 << 30)
        self.fail_after = self.config.get("fail_after", -1)

    def ids(self, text):
        return tokenize(text, self.vocab_size) if isinstance(text, str) else text

    def next(self, ids):
        """The likeliest next token."""
        seen = "".join(map(chr, ids[-self.window:]))
        for length in (16, 8, 4, 2, 1):
            if length < len(seen):
                at = seen.rfind(seen[-length:], 0, len(seen) - 1)
                if at >= 0:
                    return ord(seen[at + length])
        return ord("e")

    def score(self, context, continuation):
        """(sum of log p, whether every token was the likeliest) of ids after other ids."""
        ids, total, greedy = list(context), 0.0, True
        for token in continuation:
            hit = self.next(ids) == token
            total += math.log(COPIED if hit else (1 - COPIED) / (self.vocab_size - 1))
            greedy &= hit
            ids.append(token)
        return total, greedy

    def generate(self, prompt, max_tokens, until):
        """(ids, text without the stop string, whether one was met)"""
        ids = [END_OF_TEXT] + prompt
        for _ in range(max_tokens):
            ids.append(self.next(ids))
            text = detokenize(ids[len(prompt) + 1:])
            for stop in until:
                if stop in text:
                    return ids[len(prompt) + 1:], text[:text.index(stop)], True
        return ids[len(prompt) + 1:], detokenize(ids[len(prompt) + 1:]), False


def answer(model, request, seq_len):
    if request["type"] == "score":
        context, continuation = request["context"], request["continuation"]
        if isinstance(context, str):  # white space that ends it belongs to the continuation
            whole = model.ids(context + continuation)
            context = model.ids(context.rstrip())
            continuation = whole[len(context):]
        logprob, greedy = model.score([END_OF_TEXT] + context, continuation)
        return {"logprob": logprob, "greedy": greedy, "tokens": len(continuation)}
    if request["type"] == "rolling":
        ids = [END_OF_TEXT] + model.ids(request["text"])
        logprob = 0.0
        for at in range(1, len(ids), seq_len):  # windows of seq_len predictions; the last one reaches back
            end = min(at + seq_len, len(ids))
            logprob += model.score(ids[max(0, end - seq_len - 1):at], ids[at:end])[0]
        return {"logprob": logprob, "tokens": len(ids) - 1}
    if request["type"] == "generate":
        prompt = model.ids(request["prompt"])
        ids, text, stopped = model.generate(prompt, request["max_tokens"], request["until"])
        text = request.get("text", text)  # a test of answers without text asks for them
        return {"text": text, "tokens": ids, "finish": "stop" if stopped else "length"}
    raise ValueError(f"unknown type {request['type']}")


def main(kind=Model):
    options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    model = kind(options["--init"])
    answered, pending = 0, b""
    while chunk := os.read(0, 1 << 16):
        *lines, pending = (pending + chunk).split(b"\n")
        for line in reversed(lines):  # answers come in another order than requests
            if answered == model.fail_after:
                print("error: fake_requests: out of memory", file=sys.stderr)
                sys.exit(3)
            request = json.loads(line)
            try:
                reply = answer(model, request, int(options.get("--seq-len", 64)))
            except ValueError as e:
                reply = {"error": str(e)}
            print(json.dumps({"id": request["id"], **reply}), flush=True)
            answered += 1
    print(f"{answered} answers", file=sys.stderr)


if __name__ == "__main__":
    main()

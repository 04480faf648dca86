#!/usr/bin/env python3
"""
Writes samples of recall.py as data shards with a mask: only the values that are due count as targets.

    make data/ids_to_shards
    scripts/eval/recall_shards.py mqar --seq-len 512 --pairs 4:64 --tokens 64Mi --val-tokens 256Ki --out data/mqar
    scripts/eval/recall_shards.py overwritten --seq-len 1024 --keys 16:64 --rewrites 0:8 --tokens 128Mi --out data/over

A document is a sample of --seq-len tokens. The output follows from the options alone. Needs numpy.
"""
import collections
import concurrent.futures
import os

from fox import Error, Parser, package, run
from make_shards import Writer, count

import recall

BATCH = 1024  # samples that are drawn together, from a seed of their own


def span(text):
    """N, or LOW:HIGH."""
    low, _, high = text.partition(":")
    return count(low), count(high or low)


def parse_arguments():
    p = Parser(__doc__)
    add = p.add_argument
    add("task", choices=["mqar", "overwritten"])
    add("--seq-len", type=count, required=True, metavar="T", help="tokens of a sample, even")
    add("--pairs", type=span, metavar="N|LOW:HIGH", help="mqar: pairs of a sample, drawn log-uniform")
    add("--keys", type=span, metavar="N|LOW:HIGH", help="overwritten: keys of a sample")
    add("--rewrites", type=span, metavar="N|LOW:HIGH", help="overwritten: how often a key is written again")
    add("--vocab", type=count, default=recall.VOCAB, metavar="V", help="keys 1 .. V/2 - 1, values V/2 .. V - 1 [8192]")
    add("--tokens", type=count, required=True, metavar="N", help="of the training split")
    add("--val-tokens", type=count, default=0, metavar="N", help="of the validation split [0]")
    add("--seed", type=count, default=0, metavar="N")
    add("--out", required=True, metavar="PREFIX", help="PREFIX_train_000000.bin ..., PREFIX_val_000000.bin ...")
    return p.parse_args()


def sampler(o):
    """A function of a random generator and a number of samples."""
    needed = {"mqar": ["pairs"], "overwritten": ["keys", "rewrites"]}[o.task]
    for name in ("pairs", "keys", "rewrites"):
        if (getattr(o, name) is not None) != (name in needed):
            raise Error(f"{o.task} {'needs' if name in needed else 'has no'} --{name}")
        if name in needed and getattr(o, name)[0] > getattr(o, name)[1]:
            raise Error(f"--{name} {getattr(o, name)[0]}:{getattr(o, name)[1]}: the lower number stands first")
    values = [getattr(o, name) for name in needed]
    return lambda rng, n: getattr(recall, o.task)(rng, n, o.seq_len, *values, o.vocab)


def batch(o, split, first, samples):
    """The records of so many samples from `first` on, a multiple of BATCH."""
    ids, counts = sampler(o)(package("numpy").random.default_rng([o.seed, split, first // BATCH]), samples)
    return (ids.astype("<u4") | counts.astype("<u4") << 31).ravel()


def batches(o):
    """(split, records) in order, drawn by all cores, a few ahead of what is written."""
    jobs = [(split, first, min(BATCH, tokens // o.seq_len - first)) for split, tokens in enumerate((o.tokens, o.val_tokens))
            for first in range(0, tokens // o.seq_len, BATCH)]
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        ahead = collections.deque()
        for job in jobs:
            ahead.append((job[0], pool.submit(batch, o, *job)))
            if len(ahead) > 2 * os.cpu_count():
                split, drawn = ahead.popleft()
                yield split, drawn.result()
        for split, drawn in ahead:
            yield split, drawn.result()


def main():
    o = parse_arguments()
    sampler(o)(package("numpy").random.default_rng(0), 1)  # that the samples fit
    o.tokenizer, o.vocab_size, o.end_of_text, o.doc_len, o.shard_tokens = None, o.vocab, 0, o.seq_len, 256 << 20
    writer, complete = Writer(o, "--masked"), False
    try:
        for split, records in batches(o):
            writer.write(2 | split, records)
        complete = True
    finally:
        writer.close(complete)
    print(f"for the trainer: --seq-len {o.seq_len} --set vocab_size={o.vocab} --set bos_token_id=0 "
          "--set eos_token_id=0")


if __name__ == "__main__":
    run(main)

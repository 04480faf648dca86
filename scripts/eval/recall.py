"""
Samples of two recall tasks on token ids, for models that are trained on them from scratch:

    mqar           n keys with a value each; then each key is asked once (Zoology, arXiv 2312.04927)
    overwritten    keys are written again later, with other values: the last one counts

    id 0           end of text: stands in front of a sample, never in one
    1 .. 4095      keys
    4096 .. 8191   values; of another vocabulary V keys are below V / 2, and values are not

A sampler gets a numpy.random.Generator and returns two arrays [samples, T]:

    ids       int32
    counts    bool: the token is a value that is due, the only targets that count. Its key stands before it

Keys and values of a sample do not repeat. Other positions have random ids that are no keys of the sample, so
a key that is asked stands only where it is written, with the value behind it, and where it is asked:
`questions` finds right and stale answers by that.

Needs numpy. recall_shards.py writes samples as shards to train on.
"""
from fox import Error, counted, counted_range, package

VOCAB = 8192
MOST_VOCAB = 1 << 24  # what the trainer takes (llmc/config/config.h)
TABLE = 1 << 26  # entries of fill's table at most, unless a row has more
POWER = 0.01  # of the gaps of mqar: p(gap) ~ gap^(POWER - 1)


def draw_distinct(rng, shape, low, high):
    """Ids of [low, high), of which a row has none twice, all such rows being equally likely."""
    np = package("numpy")
    if shape[1] > high - low:
        raise Error(f"{low} .. {high - 1}: less than {counted(shape[1], 'different id')}")
    ids = rng.integers(low, high, shape, dtype=np.int32)
    rows = np.arange(shape[0])  # that may have an id twice
    while len(rows):
        part = ids[rows]
        order = part.argsort(axis=1, kind="stable")
        ranked = np.take_along_axis(part, order, 1)
        again = np.zeros(part.shape, bool)
        np.put_along_axis(again, order[:, 1:], ranked[:, 1:] == ranked[:, :-1], 1)
        part[again] = rng.integers(low, high, again.sum(), dtype=np.int32)
        ids[rows] = part
        rows = rows[again.any(1)]
    return ids


def draw_orders(rng, shape):
    """A random order of 0 .. shape[1] - 1 in each row."""
    return rng.random(shape, dtype="float32").argsort(axis=1, kind="stable")


def draw_pairs(rng, samples, keys, values, vocab):
    """So many different keys and values for each sample."""
    if not 4 <= vocab <= MOST_VOCAB or vocab % 2:
        raise Error(f"a vocabulary of {vocab}: not an even number from 4 to {MOST_VOCAB}")
    first = vocab // 2
    return draw_distinct(rng, (samples, keys), 1, first), draw_distinct(rng, (samples, values), first, vocab)


def fill(rng, ids, keys, vocab):
    """Writes random ids where there is 0, but none of the row's keys: these become values."""
    np = package("numpy")
    filler = rng.integers(1, vocab, ids.shape, dtype=np.int32)
    n = max(1, TABLE // vocab)  # rows at a time
    for rows in (slice(begin, begin + n) for begin in range(0, len(ids), n)):
        used = np.zeros((len(ids[rows]), vocab), bool)
        np.put_along_axis(used, keys[rows], True, 1)
        filler[rows] += vocab // 2 * np.take_along_axis(used, filler[rows], 1)
    np.copyto(ids, filler, where=ids == 0)


def by_size(rng, samples, T, sizes, sample):
    """Samples of a size each, in their order; sample(rng, samples, T, size) makes those of one size."""
    np = package("numpy")
    ids, counts = np.empty((samples, T), np.int32), np.empty((samples, T), bool)
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        ids[rows], counts[rows] = sample(rng, len(rows), T, int(size))
    return ids, counts


def mqar(rng, samples, T, pairs, vocab=VOCAB):
    """pairs: (lowest, highest) n, drawn for each sample, log-uniform. n pairs, then n questions with gaps."""
    np = package("numpy")
    low, high = pairs
    if not (1 <= low <= high and 4 * high <= T and T % 2 == 0):
        raise Error(f"{counted_range(low, high, 'pair')}: not from 1 to a quarter of the length {T}, which must be even")
    sizes = np.exp(rng.uniform(np.log(low), np.log(high + 1), samples)).astype(int).clip(low, high)
    return by_size(rng, samples, T, sizes, lambda *shape: mqar_of(*shape, vocab))


def mqar_of(rng, samples, T, n, vocab):
    """The mqar of n pairs. Gaps are drawn one after the other, without repetition (by Gumbel's top n)."""
    np = package("numpy")
    keys, values = draw_pairs(rng, samples, n, n, vocab)
    pairs = np.stack([keys, values], 2)
    places = T // 2 - n
    likely = (POWER - 1) * np.log(np.arange(1, places + 1)) + rng.gumbel(size=(samples, places))
    asked = n + (-likely).argsort(axis=1)[:, :n]
    ids, counts = np.zeros((samples, T // 2, 2), np.int32), np.zeros((samples, T // 2, 2), bool)
    rows = np.arange(samples)[:, None]
    ids[:, :n] = ids[rows, asked] = pairs
    counts[rows, asked, 1] = True
    ids = ids.reshape(samples, T)
    fill(rng, ids, keys, vocab)
    return ids, counts.reshape(samples, T)


def overwritten(rng, samples, T, keys, rewrites, vocab=VOCAB):
    """
    keys: (lowest, highest) number of keys, drawn for each sample; rewrites: the same, drawn for each key. A key
    is written 1 + rewrites times, all writes at random places; at the end each key is asked, in random order.
    """
    np = package("numpy")
    low, high = keys
    writes = high * (1 + sum(rewrites) / 2)  # in the mean
    if not (1 <= low <= high and 0 <= rewrites[0] <= rewrites[1] and T % 2 == 0 and 2 * (writes + high) <= T):
        raise Error(f"{counted_range(low, high, 'key')} with {counted_range(*rewrites, 'rewrite')} each: not for the length "
                    f"{T}, which must be even and at least {2 * (writes + high):.0f}")
    sizes = rng.integers(low, high + 1, samples)
    return by_size(rng, samples, T, sizes, lambda *shape: overwritten_of(*shape, rewrites, vocab))


def overwritten_of(rng, samples, T, n, rewrites, vocab):
    """The overwritten of n keys. Writes are [samples, n, most], of which a key has its first ones."""
    np = package("numpy")
    places, most = T // 2 - n, 1 + rewrites[1]
    count = 1 + rng.integers(rewrites[0], rewrites[1] + 1, (samples, n))
    while len(rows := np.flatnonzero(count.sum(1) > places)):
        count[rows] = 1 + rng.integers(rewrites[0], rewrites[1] + 1, (len(rows), n))
    exists = np.arange(most) < count[:, :, None]
    keys, values = draw_pairs(rng, samples, n, n * most, vocab)
    values = values.reshape(exists.shape)
    # write number i of a sample, of those that exist, gets the i-th place of a random order
    number = exists.reshape(samples, -1).cumsum(1) - 1
    place = np.take_along_axis(draw_orders(rng, (samples, places)), number.clip(0), 1).reshape(exists.shape)
    ids, counts = np.zeros((samples, T // 2, 2), np.int32), np.zeros((samples, T // 2, 2), bool)
    row, key, _ = exists.nonzero()
    ids[row, place[exists], 0] = keys[row, key]
    ids[row, place[exists], 1] = values[exists]
    last = np.where(exists, place, -1).argmax(2)
    right = np.take_along_axis(values, last[:, :, None], 2)[:, :, 0]
    order = draw_orders(rng, (samples, n))
    ids[:, places:, 0] = np.take_along_axis(keys, order, 1)
    ids[:, places:, 1] = np.take_along_axis(right, order, 1)
    counts[:, places:, 1] = True
    ids = ids.reshape(samples, T)
    fill(rng, ids, keys, vocab)
    return ids, counts.reshape(samples, T)


def questions(ids, counts):
    """
    The questions of a sample (ids [T], counts [T]), in order: yields (t, right, stale). ids[:t] is the context,
    its last token the key that is asked; right is the value that is due, ids[t]; stale are the values that the
    key had before, the oldest first.
    """
    np = package("numpy")
    for t in np.flatnonzero(counts).tolist():
        written = ids[1 + np.flatnonzero(ids[: t - 1] == ids[t - 1])].tolist()
        yield t, int(ids[t]), written[:-1]

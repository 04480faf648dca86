"""
What the tables and pictures of STUDY.md are made of: measures of a run and of a pair, statistics, cells.
"""
import functools
import math
import random
import statistics

from common import MIN_PAIRS, paired

PAIR, SEEDS = ("fox-pro", "transformer-pro"), range(11, 16)
OTHER_PAIRS = ("fox-llama", "transformer-llama"), ("125m-fox-pro", "125m-transformer-pro")
# what the second study's rows 2 to 4 compare beside each model with its base
CROSSED = (("fox-pro", "transformer-pro-norope"), ("fox-pro-rope", "transformer-pro"), ("fox-pro-bias16384", "transformer-pro"),
           ("fox-pro", "transformer-pro-4heads"), ("fox-pro-4heads", "transformer-pro-4heads"),
           ("fox-pro", "transformer-pro-base1e4"), ("fox-pro-1e-3", "transformer-pro"))
VALIDATED = 128  # held-out documents on which runs are validated, and learning rates chosen
TRAINED, LONGEST = 16384, 65536
SAME_STEPS = {"c8ee50e", "796e75d"},  # versions between which nothing changed of what a step on a GPU runs
DRAWS = 2000  # of the bootstrap
NONE = "no run yet"
NEEDLES = [f"needle_{step:03}" for step in (0, 32, 64, 128, 256)]  # after so many steps of tuning
TASKS = {"copy": "fall", "conflict": "margin", "corrupted": "rise", **dict.fromkeys(NEEDLES, "right")}  # measures shown


# ----------------------------------------------------------------------------
# of a run, of a pair


def gpu_of(result):
    return result["device"].split(",")[0]


def alone(result):
    """Did the run have its GPU for itself? If not, its losses count and its times do not."""
    return not result.get("shared_gpu")


def comparable(a, b):
    """Can the times of two runs be compared: one program, one kind of GPU, each for itself?"""
    versions = {a["version"], b["version"]}
    same = len(versions) == 1 or any(versions <= group for group in SAME_STEPS)
    return gpu_of(a) == gpu_of(b) and same and alone(a) and alone(b)


def loss_within(result):
    """Mean loss of the positions up to the training length, in --eval's pass over whole documents."""
    return math.log(result["eval"]["perplexity"][str(TRAINED)])


def loss_beyond(result):
    e = result["eval"]
    return (LONGEST * e["loss_mean"] - TRAINED * loss_within(result)) / (LONGEST - TRAINED)


def reached(result, loss, by):
    """GPU-hours of training steps (by "hours"), or steps ("step"), until the validation loss is `loss`, between
    validations by a line; None: it never is."""
    before = None
    for v in result["validations"]:
        if v["loss"] <= loss:
            if before is None:
                return v[by]
            share = (before["loss"] - loss) / (before["loss"] - v["loss"])
            return before[by] + share * (v[by] - before[by])
        before = v
    return None


def reach_ratio(fox, transformer, by="hours", loss=None):
    """log of the ratio of what two runs take until a validation loss, by itself the last one that both reach; None: their
    times are to be compared and cannot be, or one never reaches it."""
    if by == "hours" and not comparable(fox, transformer):
        return None
    loss = loss or max(r["validations"][-1]["loss"] for r in (fox, transformer))
    both = [reached(r, loss, by) for r in (fox, transformer)]
    return math.log(both[0] / both[1]) if all(both) else None


def mean_in(ends, row, span):
    """Mean of a document's losses up to, or from, a position."""
    parts = [(end - begin, x) for begin, end, x in zip([0, *ends], ends, row)
             if (end <= span[1] if span[0] == "to" else begin >= span[1])]
    return sum(n * x for n, x in parts) / sum(n for n, _ in parts)


def first_below(result, loss):
    """The step after which the training loss, in the mean of a span of 64 steps, is below."""
    return next((f"{row[0]:,}" for row in result["curve"] if row[1] is not None and row[1] < loss), "never")


PRIMARY = [  # name, difference of a pair, how a difference is printed; hours are those of the repeats
    ("loss at positions 1 to 16,384, nats", lambda f, t: loss_within(f) - loss_within(t), "{:+.4f}"),
    ("loss at positions 16,385 to 65,536, nats", lambda f, t: loss_beyond(f) - loss_beyond(t), "{:+.4f}"),
    ("GPU-hours to the same validation loss, log of the ratio", reach_ratio, "{:+.3f}"),
]


# ----------------------------------------------------------------------------
# statistics


def holm(ps):
    """p-values adjusted for their number, by Holm's rule."""
    order, adjusted, largest = sorted(range(len(ps)), key=lambda i: ps[i]), [0.0] * len(ps), 0
    for rank, i in enumerate(order):
        largest = max(largest, min(1, (len(ps) - rank) * ps[i]))
        adjusted[i] = largest
    return adjusted


@functools.cache
def drawn(groups):
    """The bootstrap's draws, with replacement, the same for every difference of as many groups."""
    rng = random.Random(0)
    return [rng.choices(range(groups), k=groups) for _ in range(DRAWS)]


def by_package(differences, packages, weights=None):
    """95% interval of the mean of differences by document, packages drawn with replacement."""
    groups = {}
    for d, package, weight in zip(differences, packages, weights or [1] * len(packages)):
        group = groups.setdefault(package, [0, 0])
        group[0] += weight * d
        group[1] += weight
    totals, counts = zip(*groups.values())
    means = [sum(map(totals.__getitem__, draw)) / sum(map(counts.__getitem__, draw)) for draw in drawn(len(groups))]
    means.sort()
    return means[DRAWS * 25 // 1000], means[DRAWS * 975 // 1000 - 1]


# ----------------------------------------------------------------------------
# cells


def table(*rows):
    """Rows of cells, the first the titles."""
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def collapsed(rows, column):
    """Rows whose cell in a column is NONE become one."""
    there = [row for row in rows if row[column] != NONE]
    left = len(rows) - len(there)
    return [*there, (f"{left} more", *[""] * (column - 1), NONE, *[""] * (len(rows[0]) - column - 1))] if left else there


def cell_of(values):
    """Mean and standard error over seeds."""
    values = [*values]
    if not values:
        return NONE
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.3f}" if len(values) >= MIN_PAIRS else ""
    return f"{statistics.fmean(values):.3f}{error} ({len(values)})"


def rms(values):
    return math.sqrt(statistics.fmean(x * x for x in values))


def error_of(values, digits=4, sign="+"):
    """Mean of values of seeds and, over at least MIN_PAIRS of them, its standard error."""
    found = paired([*values])
    return f"{found.mean:{sign}.{digits}f}" + (f" ± {found.error:.{digits}f}" if found.p is not None else "")


def mean_share(tables):
    """Mean over runs, layers and heads, of the runs that have the table."""
    shares = [share for layers in tables if layers for heads in layers for share in heads]
    return f"{100 * statistics.fmean(shares):.1f}%" if shares else NONE

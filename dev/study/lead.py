"""
What the lead of fox-pro is made of: how much of it beyond the training length is the Transformer's extrapolation, at
which positions it is, what it is in steps, and at equal learning rates. Tables of STUDY.md, and numbers of findings.py.
"""
import math
import statistics

import plan
from measures import NONE, PAIR, SEEDS, TRAINED, error_of, loss_beyond, loss_within, reach_ratio, table

FOX, OTHER = PAIR
QUARTERS = 4  # of a run's validations are those of which steps are compared


def pairs(report, suffix=""):
    """[(fox-pro, transformer-pro)] of the seeds that have both, or of their repeats."""
    found = [[report.results.get(f"{name}_{s}{suffix}") for name in PAIR] for s in SEEDS]
    return [pair for pair in found if all(pair)]


def last_losses(report):
    """(contexts, last_targets, [(fox-pro's, transformer-pro's)]): the mean loss of the last targets behind each context;
    None: no pair has them."""
    found = [[r["eval"].get("documents") for r in pair] for pair in pairs(report)]
    found = [pair for pair in found if all(pair)]
    means = [[[statistics.fmean(column) for column in zip(*d["last_loss"])] for d in pair] for pair in found]
    return (found[0][0]["contexts"], found[0][0]["last_targets"], means) if found else None


def cut(report):
    """(context, longest, [fox-pro behind the longest minus transformer-pro behind the context], [both behind the longest])
    by seed, of the last targets, where the context is the longest one within the training length: what is left of the
    lead of a Transformer that sees no more than it was trained on. None: there are none."""
    found = last_losses(report)
    inside = [k for k, context in enumerate(found[0]) if context <= TRAINED] if found else []
    if not inside or inside[-1] == len(found[0]) - 1:
        return None
    contexts, k = found[0], inside[-1]
    return contexts[k], contexts[-1], [f[-1] - t[k] for f, t in found[2]], [f[-1] - t[-1] for f, t in found[2]]


def cut_sentence(report):
    """What is left of the lead, in words; "": nothing is known."""
    found = cut(report)
    if not found:
        return ""
    context, longest, left, whole = found
    mean = statistics.fmean(whole)
    share = f": {100 * (1 - statistics.fmean(left) / mean):.0f}% of this lead is the Transformer's extrapolation" if mean else ""
    return (f"on the last targets behind {longest:,} tokens {mean:+.3f} nats, beside a Transformer cut to the last {context:,} "
            f"tokens {error_of(left, 3)}{share}")


def octave(result, begin, end):
    """Mean of a run's L(i) over the positions begin + 1 to end; None: its bins do not have it."""
    rows = [(at - before, x) for before, (at, x) in zip([0, *(p[0] for p in result["eval"]["loss"])], result["eval"]["loss"])
            if before >= begin and at <= end]
    return sum(n * x for n, x in rows) / (end - begin) if sum(n for n, _ in rows) == end - begin else None


def octaves(report):
    """[(first, last position, losses of transformer-pro, differences by seed)]."""
    both = pairs(report)
    longest = max((r["eval"]["loss"][-1][0] for pair in both for r in pair), default=0)
    ends = [0, *(1 << k for k in range(longest.bit_length()))]
    found = [(begin, end, [[octave(r, begin, end) for r in pair] for pair in both]) for begin, end in zip(ends, ends[1:])]
    return [(begin + 1, end, [t for _, t in losses], [f - t for f, t in losses]) for begin, end, losses in found
            if all(None not in pair for pair in losses)]


def early(report):
    """The steps at the ends of quarters of a run."""
    moments = [v["step"] for v in pairs(report)[0][1]["validations"]]
    return [moments[len(moments) * k // QUARTERS - 1] for k in range(1, QUARTERS + 1)]


def loss_at(result, step):
    return next(v["loss"] for v in result["validations"] if v["step"] == step)


def ratio(both, step, by):
    """Geometric mean of what fox-pro takes ("step" or "hours"), in parts of what transformer-pro takes, to the loss that
    transformer-pro has after a step; None: one of them never reaches it, or times cannot be compared."""
    ratios = [reach_ratio(f, t, by, loss_at(t, step)) for f, t in both]
    return None if not ratios or None in ratios else math.exp(statistics.fmean(ratios))


class Lead:
    def __init__(self, report):
        self.report = report

    def table_lead_octaves(self):
        rows = [(f"{first:,}" + f" to {last:,}" * (first < last), f"{statistics.fmean(losses):.3f}", error_of(differences))
                for first, last, losses, differences in octaves(self.report)]
        return table(("positions", OTHER, f"{FOX} minus {OTHER}"), *(rows or [(NONE, "", "")]))

    def table_lead_steps(self):
        both, repeats = pairs(self.report), pairs(self.report, "_repeat")
        rows, cell = [], lambda found: "" if found is None else f"{found:.2f}"
        for step in early(self.report) if both else []:
            nats = [loss_at(f, step) - loss_at(t, step) for f, t in both]
            rows.append((f"{step:,}", error_of(nats), cell(ratio(both, step, "step")), cell(ratio(repeats, step, "step")),
                         cell(ratio(repeats, step, "hours"))))
        return table((f"steps of {OTHER}", "difference of the validation loss, nats", f"steps {FOX} takes to its loss, times",
                      "of the repeats", "GPU-hours of the repeats, times"), *(rows or [(NONE, *[""] * 4)]))

    def equal(self):
        """[(fox-pro's line, fox-pro, transformer-pro)] at one rate and one seed outside the main pair."""
        results = self.report.results
        names = [(line, line.name.replace(f"_{FOX}_", f"_{OTHER}_")) for line in self.report.lines if f"_{FOX}_" in line.name]
        found = [(line, results[line.name], results[other]) for line, other in names
                 if line.name in results and other in results and results[line.name]["lr"] == results[other]["lr"]]
        return sorted(found, key=lambda row: (row[1]["seed"], row[1]["lr"]))

    def table_lead_rates(self):
        rows = [(plan.option(line, "--lr"), f"{f['seed']}{', again' * line.name.startswith('again_')}",
                 *(f"{loss(f) - loss(t):+.4f}" for loss in (lambda r: r["val_loss"], loss_within, loss_beyond)))
                for line, f, t in self.equal()]
        return table(("learning rate of both", "seed", "validation", "1 to 16K", "16K to 64K"), *(rows or [(NONE, *[""] * 4)]))

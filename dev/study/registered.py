"""
What the rows of the second study show, by the rules of STUDY.md ("what separates the pair"): a difference is shown where
its mean over the seeds is further from 0 than the 5% point of a paired t-test, and the lead is fox-pro minus
transformer-pro of the same seeds.
"""
import statistics

from common import paired
from measures import PAIR, error_of, loss_beyond, loss_within, table

FOX, OTHER = PAIR
STARTS = "fox-pro-long", "fox-pro-long64", "fox-pro-T2981"
MODELS = {"transformer-pro-norope", "fox-pro-rope", "fox-pro-bias16384", "transformer-pro-4heads", "fox-pro-4heads",
          "transformer-pro-base1e4", "fox-pro-1e-3", *STARTS}  # that the rules compare


def validation(result):
    return result["val_loss"]


class Missing(Exception):
    """A run that a rule needs is not there yet."""


class Difference:
    """A model's loss minus another's, by seed, once `least` seeds have both, and the lead of these seeds."""

    def __init__(self, report, name, base, loss, least=3):
        runs = report.both(name, base)
        if len(runs) < least:
            raise Missing
        self.values = [loss(a) - loss(b) for a, b in runs]
        self.mean = statistics.fmean(self.values)
        p = paired(self.values).p
        self.shown = p is not None and p < 0.05
        seeds = {a["seed"] for a, _ in runs}
        self.lead = statistics.fmean(loss(f) - loss(t) for f, t in report.both(FOX, OTHER) if f["seed"] in seeds)

    def has_half(self):
        """Is at least half of the lead here, with its sign, and is it shown?"""
        return self.shown and self.mean / self.lead >= 0.5

    def lower(self):
        return self.shown and self.mean < 0

    def __str__(self):
        return error_of(self.values, 3) + " (not shown)" * (not self.shown)


# ----------------------------------------------------------------------------
# rules: (answer, numbers)


def whose(report, loss):
    beside, without = Difference(report, "fox-pro-rope", OTHER, loss), Difference(report, FOX, "transformer-pro-norope", loss)
    missing = Difference(report, "transformer-pro-norope", OTHER, loss)
    answer = ("the gate's" if beside.has_half() and without.has_half() else
              "the missing RoPE's" if missing.has_half() else "both, or neither alone")
    return answer, f"the gate with RoPE {beside}, without {without}; no RoPE {missing}; lead {beside.lead:+.3f}"


def data(report, loss):
    found = Difference(report, FOX, "fox-pro-bias16384", loss)
    part = f", {100 * found.mean / found.lead:.0f}% of the lead" if found.lower() else ""
    return "yes" if found.lower() else "not shown", error_of(found.values, 3) + part


def heads(report, loss):
    found = Difference(report, "transformer-pro-4heads", OTHER, loss)
    beside = f"; lead beside four heads {Difference(report, FOX, 'transformer-pro-4heads', loss)}" if found.lower() else ""
    return "yes" if found.lower() else "not shown", error_of(found.values, 3) + beside


def lead_of_four(report, loss):
    found = Difference(report, "fox-pro-4heads", "transformer-pro-4heads", loss)
    return "yes" if found.lower() else "not shown", error_of(found.values, 3)


def base(report, loss):
    found = Difference(report, "transformer-pro-base1e4", OTHER, loss, 1)
    if len(found.values) < 3:
        return ("seeds 12 and 13 follow" if found.mean < -0.01 else "higher on one seed" if found.mean > 0 else
                "not by more than 0.01 on one seed"), f"{found.mean:+.3f}"
    return "yes" if found.lower() else "not shown", error_of(found.values, 3)


def rate(report, loss):
    found = Difference(report, "fox-pro-1e-3", FOX, loss, 5)
    return "either" if not found.shown else "1e-3" if found.mean < 0 else "5e-4", f"1e-3 minus 5e-4 {error_of(found.values, 3)}"


def start(report, loss):
    found = {name: Difference(report, name, FOX, loss) for name in STARTS}
    serve = [name for name, d in found.items() if d.mean <= 0.01 and not (d.shown and d.mean > 0)]
    return min(serve, key=lambda name: found[name].mean, default="none"), ", ".join(f"{name} {d}" for name, d in found.items())


ROWS = [  # row, question, rule, the losses by which it goes
    (2, "Is the lead the gate's, or the missing RoPE's?", whose, (loss_within, loss_beyond)),
    (2, "Does the gate's dependence on the data matter?", data, (loss_within, loss_beyond)),
    (3, "Are four heads of 128 lower than eight?", heads, (loss_within, loss_beyond)),
    (3, "With four heads in both, is fox-pro lower?", lead_of_four, (loss_within, loss_beyond)),
    (3, "Is RoPE base 10,000 lower?", base, (loss_within,)),
    (4, "Which rate for fox-pro, by validation loss?", rate, (validation,)),
    (5, "Which start serves text and recall, by validation loss?", start, (validation,)),
]


def answers(report):
    """[(row, question, [(answer, numbers), or None: a run is missing])] of each loss."""
    def answer(rule, loss):
        try:
            return rule(report, loss)
        except Missing:
            return None
    return [(row, question, [answer(rule, loss) for loss in losses]) for row, question, rule, losses in ROWS]


def lines(report):
    """The table of STUDY.md."""
    cells = lambda found: [f"**{a[0]}**: {a[1]}" if a else "runs are missing" for a in found] + [""] * (2 - len(found))
    return table(("row", "question", "within the training length", "beyond it"),
                 *((row, question, *cells(found)) for row, question, found in answers(report)))


def sentence(report):
    """The answers that are there; "": none."""
    both = lambda found: found[0][0] if len(found) < 2 else f"{found[0][0]} within the training length, {found[1][0]} beyond it"
    return " ".join(f"{question} {both(found).capitalize()}." for _, question, found in answers(report) if all(found))

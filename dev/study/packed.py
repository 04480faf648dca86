"""
The tables and the picture of packed documents, with and without walls, in STUDY.md.
"""
import statistics

from common import paired
from measures import NONE, PAIR, by_package, table

SEEDS, WALLS = range(11, 14), {"": "without", "-walls": "with"}  # of the runs short-MODEL[-walls]_SEED


class Packed:
    def __init__(self, results, corpus):
        self.results, self.corpus = results, corpus

    def pairs(self):
        """runs_of the seeds that have all four."""
        return [runs for seed in SEEDS if (runs := self.runs_of(seed))]

    def runs_of(self, seed):
        """{(model, walls or not): result} of a seed; None: one of the four has not run."""
        runs = {(name, walls): self.results.get(f"short-{name}{walls}_{seed}") for name in PAIR for walls in WALLS}
        return runs if all(runs.values()) else None

    def table_packed(self):
        """What walls gain, and how much more one model gains: paired t-tests over seeds."""
        found = self.pairs()
        gain = lambda loss, runs, name: loss(runs[name, ""]) - loss(runs[name, "-walls"])
        lead = lambda loss, runs, walls: loss(runs[PAIR[0], walls]) - loss(runs[PAIR[1], walls])
        a_token, a_document = lambda r: r["intact"]["loss_mean"], lambda r: statistics.fmean(r["intact"]["documents"])
        both = lambda loss, runs: gain(loss, runs, PAIR[0]) - gain(loss, runs, PAIR[1])
        rows = []
        for title, value in (
                ("**gain of fox-pro minus gain of transformer-pro**", lambda r: both(a_token, r)),
                *((f"gain of {name}", lambda r, name=name: gain(a_token, r, name)) for name in PAIR),
                *((f"fox-pro minus transformer-pro, {WALLS[w]} walls", lambda r, w=w: lead(a_token, r, w)) for w in WALLS),
                ("gain of fox-pro minus gain of transformer-pro, mean of documents", lambda r: both(a_document, r))):
            values = [value(runs) for runs in found]
            row = [title, len(values), NONE, "", ""]
            if values:
                p = paired(values)
                row[2] = f"{p.mean:+.4f}"
                if p.p is not None:
                    row[3:] = f"{p.mean - p.half_width:+.4f} to {p.mean + p.half_width:+.4f}", f"{p.p:.2g}"
            rows.append(row)
        if rows[0][4]:
            rows[0][4] += ": claimed" if float(rows[0][4]) < 0.05 else ": not claimed"
        return table(("nats a token, intact documents", "seeds", "mean", "95% interval", "p"), *rows)

    def table_packed_documents(self):
        documents = self.corpus["held"]["documents"]
        packages, weights = [d["package"] for d in documents], [d["tokens"] + 1 for d in documents]
        rows = []
        for seed in SEEDS:
            runs, cells = self.runs_of(seed), [NONE, "", ""]
            if runs:
                losses = {key: r["intact"]["documents"] for key, r in runs.items()}
                gains = [[a - b for a, b in zip(losses[name, ""], losses[name, "-walls"])] for name in PAIR]
                cells = []
                for values in (*gains, [a - b for a, b in zip(*gains)]):
                    mean = sum(w * v for w, v in zip(weights, values)) / sum(weights)
                    cells.append("{:+.4f} ({:+.4f} to {:+.4f})".format(mean, *by_package(values, packages, weights)))
            rows.append((seed, *cells))
        return table(("seed", *(f"gain of {name} (95% by package)" for name in PAIR), "the first minus the second"), *rows)

    def draw(self, plots, path):
        """By position in a document: what walls gain either model, and the lead of one over the other with and without."""
        found = self.pairs()
        if not found:
            return
        figure, [[gains, leads]] = plots.panels(2)
        a_run = found[0][PAIR[0], ""]["intact"]
        ends = [end for end, targets in zip(a_run["octaves"], a_run["octave_targets"]) if targets]
    
        def curve(axes, k, label, one, other):
            """Loss of the run `one` minus that of `other`: the mean of seeds, and a band from the lowest to the highest."""
            curves = [[a - b for a, b in zip(*(runs[key]["intact"]["by_octave"][:len(ends)] for key in (one, other)))]
                      for runs in found]
            mean = [statistics.fmean(values) for values in zip(*curves)]
            plots.curve(axes, ends, mean, k, label, plots.band_of(curves))
    
        for k, name in enumerate(PAIR):
            curve(gains, k, name, (name, ""), (name, "-walls"))
        for k, (walls, word) in enumerate(WALLS.items(), len(PAIR)):
            curve(leads, k, word + " walls", *((name, walls) for name in PAIR))
        gains.set(ylabel="gain by walls, nats")
        leads.set(ylabel=f"{PAIR[0]} minus {PAIR[1]}, nats")
        for axes in (gains, leads):
            axes.set(xlabel="token of the document")
            plots.log_scale(axes, "x", 2)
        plots.save(figure, path)

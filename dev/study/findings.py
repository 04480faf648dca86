"""
What STUDY.md says was found, in sentences whose numbers and verdicts are those of the results. A sentence whose results
are not there is left out.
"""
import math
import statistics

import plan
from common import paired
from measures import LONGEST, NEEDLES, NONE, PAIR, SEEDS, TRAINED, alone, loss_beyond, loss_within

RECIPE = "2e-3"  # the learning rate of the paper's repository for models of 125 million parameters
FOX, OTHER = PAIR


class Missing(Exception):
    """A sentence's results are not there."""


def text(report):
    """Lines of Markdown."""
    sentences = []
    for finding in (rates, recall, packed, by_context, by_step, near, conflict, far, losses, beyond, pruning, half_lives):
        try:
            sentences.append(f"- {finding(report)}")
        except Missing:
            pass
    return sentences or [f"{NONE}."]


# ----------------------------------------------------------------------------
# numbers


def have(values):
    """The values, if there is one."""
    if not values:
        raise Missing
    return values


def pairs(report):
    """[(fox-pro, transformer-pro)] of the seeds that have both."""
    found = [[report.results.get(f"{name}_{s}") for name in PAIR] for s in SEEDS]
    return have([pair for pair in found if all(pair)])


def differences(report, measure):
    """fox-pro minus transformer-pro of a measure, by seed."""
    return [measure(f) - measure(t) for f, t in pairs(report)]


def at_point(report, task, measure, **at):
    """(means of fox-pro and transformer-pro, differences by seed) of a task at a point."""
    found = [[next((row[measure] for row in plan.unpacked(r["tasks"].get(task, {"names": [], "rows": []}))
                    if at.items() <= row.items() and measure in row), None) for r in pair] for pair in pairs(report)]
    found = have([pair for pair in found if None not in pair])
    return [statistics.fmean(column) for column in zip(*found)], [f - t for f, t in found]


def verdict(values, unit="nats", digits=3):
    """What differences by seed show: how much higher or lower, or no difference."""
    found = paired(values)
    if found.p is None:
        return f"{found.mean:+.{digits}f} {unit} in {found.n} pair{'s' * (found.n > 1)}, too few to say more"
    number = f"{found.mean:+.{digits}f} ± {found.error:.{digits}f} {unit}"
    return f"{number}, p = {found.p:.2g}" if found.p < 0.05 else f"no difference shown, {number}"


# ----------------------------------------------------------------------------
# sentences, what is unfavourable to FoX, or not as in the paper, first


def rates(report):
    losses = {name: {rate: loss for rate, loss, _ in plan.losses(name, report.lines, report.rates)
                     if loss and loss < math.inf} for name in PAIR}
    common = have(sorted(losses[FOX].keys() & losses[OTHER].keys()))
    best = {name: sorted(found.items(), key=lambda item: item[1]) for name, found in losses.items()}
    if float(RECIPE) not in common or len(best[FOX]) < 2:
        raise Missing
    (first, least), (second, next_least) = best[FOX][:2]
    sd = statistics.stdev(f["val_loss"] for f, _ in pairs(report)) if len(pairs(report)) > 1 else math.nan
    cost = [losses[name][float(RECIPE)] - best[name][0][1] for name in PAIR]
    leads = ", ".join(f"{losses[FOX][rate] - losses[OTHER][rate]:+.3f} at {rate:g}" for rate in common)
    return (f"**Learning rates,** one seed. {FOX} is best at {first:g} and {second:g}, which differ by "
            f"{next_least - least:.4f} nats where seeds differ by {sd:.4f} (sd); {OTHER} at {best[OTHER][0][0]:g}. The rate "
            f"of the paper's repository for small models, {RECIPE}, costs {cost[0]:.3f} and {cost[1]:.3f} nats here; steps "
            f"are an eighth of its steps. {FOX} minus {OTHER} at the same rate: {leads}.")


def recall(report):
    def right(model):
        found = [r["validations"][-1]["accuracy"] or 0 for name, r in report.all_results.items()
                 if name.startswith(f"lr_mqar-{model}_")]
        return f"{100 * max(have(found)):.0f}%"
    return (f"**MQAR from scratch,** one seed, the best of three learning rates. With plain gates {FOX} ends with "
            f"{right(FOX)} right, fox-llama with {right('fox-llama')}; {OTHER} with {right(OTHER)}, transformer-llama with "
            f"{right('transformer-llama')}. Gates that begin with half-lives of 44 to 11,000 tokens: "
            f"{right('fox-pro-long')} and {right('fox-llama-long')} ([below](#mqar-from-scratch)).")


def packed(report):
    loss = lambda of, name, walls: of[name, walls]["intact"]["loss_mean"]
    runs = have(report.packed.pairs())
    lead = {walls: verdict([loss(of, FOX, walls) - loss(of, OTHER, walls) for of in runs]) for walls in ("", "-walls")}
    return (f"**Packed documents.** {FOX} minus {OTHER} with walls: {lead['-walls']}; without: {lead['']} "
            "([below](#packed-documents)).")


def by_context(report):
    documents = [[r["eval"].get("documents") for r in pair] for pair in pairs(report)]
    documents = have([pair for pair in documents if all(pair)])
    contexts = documents[0][0]["contexts"]
    inside = [k for k, context in enumerate(contexts) if context <= TRAINED]
    mean = lambda d, k: statistics.fmean(row[k] for row in d["last_loss"])
    at = {k: [mean(f, k) - mean(t, k) for f, t in documents] for k in inside}
    growth = [last - first for first, last in zip(at[inside[0]], at[inside[-1]])]
    return ("**Lead and context,** within the training length. Difference of the loss of the same targets behind "
            f"{', '.join(f'{contexts[k]:,}' for k in inside)} tokens: "
            f"{', '.join(f'{statistics.fmean(at[k]):+.3f}' for k in inside)} nats; from the first to the last: "
            f"{verdict(growth)}.")


def by_step(report):
    steps = [v["step"] for v in pairs(report)[0][0]["validations"]]
    loss = lambda r, step: next((v["loss"] for v in r["validations"] if v["step"] == step), None)
    found = [[(loss(f, step), loss(t, step)) for f, t in pairs(report)] for step in steps]
    if any(None in both for row in found for both in row):
        raise Missing
    means = ", ".join(f"{statistics.fmean(f - t for f, t in row):+.3f}" for row in found)
    return ("**Lead and length of training.** Difference of the validation loss after "
            f"{', '.join(f'{step:,}' for step in steps)} steps: {means}. What a longer run leaves of it was not measured.")


def near(report):
    copies = [f"after {gap:,} tokens: {verdict(at_point(report, 'copy', 'fall', gap=gap)[1])}" for gap in (256, 4096)]
    (fox, other), by_seed = at_point(report, NEEDLES[-1], "right", distractors=63, gap=4096)
    return (f"**Recall within the training length.** The fall of a copy's loss, {FOX} minus {OTHER}, {'; '.join(copies)}. "
            f"Needles after 4,096 tokens, among 63 others, after tuning: {fox:.0f}% and {other:.0f}% right, "
            f"{verdict(by_seed, 'points', 0)}. No distance between 4,096 tokens and the training length was tested.")


def conflict(report):
    _, one = at_point(report, "conflict", "margin", stale=1, gap=4096)
    points = {gap: at_point(report, "conflict", "margin", stale=4, gap=gap) for gap in (4096, LONGEST)}
    show = lambda gap: "{:.1f} and {:.1f} nats ({})".format(*points[gap][0], verdict(points[gap][1], digits=1))
    return (f"**Conflict,** log-probability of the newer continuation minus that of the older, of {FOX} and of {OTHER}. "
            f"Against four older ones, 4,096 tokens behind the newer: {show(4096)}; {LONGEST:,} tokens behind it "
            f"{show(LONGEST)}. Against one, 4,096 tokens behind, the difference is {verdict(one, digits=1)}.")


def far(report):
    copy = at_point(report, "copy", "fall", gap=TRAINED)
    needles = {gap: at_point(report, NEEDLES[-1], "right", distractors=63, gap=gap) for gap in (TRAINED, 63488)}
    show = lambda gap: "after {:,} tokens {:.0f}% and {:.0f}% right, {}".format(
        gap, *needles[gap][0], verdict(needles[gap][1], "points", 0))
    return (f"**Recall beyond the training length.** The loss of a copy {TRAINED:,} tokens later, just beyond it, falls by "
            "{:.2f} and {:.2f} nats ".format(*copy[0]) + f"({verdict(copy[1])}). Needles among 63 others, after tuning: "
            f"{show(TRAINED)}; {show(63488)}.")


def losses(report):
    return (f"**Loss,** {FOX} minus {OTHER}: {verdict(differences(report, loss_within))} within the training length, "
            f"{verdict(differences(report, loss_beyond))} from there to {LONGEST:,} tokens.")


def beyond(report):
    documents = [[r["eval"].get("documents") for r in pair] for pair in pairs(report)]
    documents = have([pair for pair in documents if all(pair)])
    contexts = documents[0][0]["contexts"][-2:]
    fox, other = (statistics.fmean(row[-1] - row[-2] for pair in documents for row in pair[k]["last_loss"]) for k in range(2))
    return (f"**A context longer than in training:** from {contexts[0]:,} to {contexts[1]:,} tokens the loss of the same "
            f"targets changes by {fox:+.3f} nats of {FOX}, by {other:+.3f} of {OTHER} (RoPE with base 500,000, and nothing "
            "done to extend it).")


def pruning(report):
    runs = have([r for r in report.seeds(FOX) if r.get("unpruned") and r.get("pruned_by_layer")])
    cost = max(abs(r["eval"]["loss_mean"] - r["unpruned"]["loss_mean"]) for r in runs)
    share = statistics.fmean(share for r in runs for share in r["pruned_by_layer"])
    speeds = [r["eval"]["tokens_per_second"] / r["unpruned"]["tokens_per_second"] for r in runs if alone(r)]
    slower = f" and takes {statistics.fmean(speeds):.1f} times as long ({len(speeds)} runs)" if speeds else ""
    return (f"**Pruning** skips {100 * share:.0f}% of attention at the last step. Evaluating {len(runs)} checkpoints at "
            f"{LONGEST:,} tokens without it changes the loss by less than {max(2 * cost, 1e-5):.5f} nats{slower}.")


def half_lives(report):
    last = [[*r["half_lives"].values()][-1] for r in report.seeds(FOX) if r.get("half_lives")]
    lives = [life for layers in last for heads in layers for life in heads]
    finite = have([life for life in lives if life is not None])
    share = lambda test: 100 * sum(map(test, lives)) / len(lives)
    return (f"**Half-lives.** The median of all heads is {statistics.median(finite):.1f} tokens; "
            f"{share(lambda x: x is not None and x < 16):.0f}% are below 16, "
            f"{share(lambda x: x is None or x > 1000):.0f}% above 1,000.")

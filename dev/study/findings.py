"""
What STUDY.md says was found, in sentences whose numbers and verdicts are those of the results. A sentence whose results
are not there is left out.
"""
import contextlib
import fnmatch
import math
import statistics

import from_scratch
import lead
import plan
import registered
from common import counted, paired
from measures import (LONGEST, NEEDLES, NONE, OTHER_PAIRS, PAIR, SEEDS, TRAINED, alone, error_of, gpu_of, loss_beyond,
                      loss_within, reach_ratio, rms)

RECIPE = "2e-3"  # the learning rate of the paper's repository for models of 125 million parameters
FOX, OTHER = PAIR


class Missing(Exception):
    """A sentence's results are not there."""


def text(report):
    """Lines of Markdown."""
    sentences = []
    for finding in (rates, recall, overwritten, packed, by_context, by_step, near, conflict, far, copies, losses, hours, beyond,
                    separates, other_pairs, variants, recurrent, pruning, half_lives):
        try:
            sentences.append(f"- {finding(report)}")
        except Missing:
            pass
    return [*(sentences or [f"{NONE}."]), "", left(report)]


# ----------------------------------------------------------------------------
# numbers


def require(found):
    """What was found, if it is there."""
    if not found:
        raise Missing
    return found


def pairs(report, suffix=""):
    """As lead.pairs."""
    return require(lead.pairs(report, suffix))


def differences(report, measure):
    """fox-pro minus transformer-pro of a measure, by seed."""
    return [measure(f) - measure(t) for f, t in pairs(report)]


def last_losses(report):
    """As lead.last_losses."""
    return require(lead.last_losses(report))


def at_points(report, task, **at):
    """(means of fox-pro and transformer-pro, differences by seed) of a task over the points with these keys, each a value or
    a list of them, of the seeds that both have."""
    at = {key: value if isinstance(value, (list, tuple)) else [value] for key, value in at.items()}
    points = require([of for (_, point), of in report.points_of_tasks((task,)).items()
                      if all(dict(point)[key] in values for key, values in at.items())])
    seeds = require([seed for seed in SEEDS if all(seed in of[name] for of in points for name in PAIR)])
    one, other = ([statistics.fmean(of[name][seed] for of in points) for seed in seeds] for name in PAIR)
    return [*map(statistics.fmean, (one, other))], [a - b for a, b in zip(one, other)]


def verdict(values, unit="nats", digits=3):
    """What differences by seed show: how much higher or lower, or no difference."""
    found = paired(values)
    count = f"{found.n} pair{'s' * (found.n > 1)}"
    if found.p is None:
        return f"{found.mean:+.{digits}f} {unit} in {count}, too few to say more"
    if not found.error:  # all pairs the same: nothing is known of how much they differ
        return f"{found.mean:+.{digits}f} {unit} in each of {count}"
    number = f"{found.mean:+.{digits}f} ± {found.error:.{digits}f} {unit}, {count}"
    return f"{number}, p = {found.p:.2g}" if found.p < 0.05 else f"no difference shown, {number}"


# ----------------------------------------------------------------------------
# sentences, what is unfavourable to FoX, or not as in the paper, first


def rates(report):
    losses = {name: {plan.option(line, "--lr"): loss for _, loss, line in
                     plan.losses(name, report.lines, report.with_diverged) if loss and loss < math.inf} for name in PAIR}
    common = [rate for rate in losses[FOX] if rate in losses[OTHER]]
    best = {name: sorted(found, key=found.get) for name, found in losses.items()}
    if RECIPE not in common or len(best[FOX]) < 2:
        raise Missing
    first, second = best[FOX][:2]
    noise = rms(require([a["val_loss"] - b["val_loss"] for a, b in report.repeats(FOX)]))
    cost = [losses[name][RECIPE] - losses[name][best[name][0]] for name in PAIR]
    return (f"**Learning rates,** one seed. {FOX} is best at {first} and {second}, which differ by "
            f"{losses[FOX][second] - losses[FOX][first]:.4f} nats, two runs of one command by {noise:.4f} (rms); {OTHER} at "
            f"{best[OTHER][0]}. The rate of the paper's repository for small models, {RECIPE}, costs {cost[0]:.3f} and "
            f"{cost[1]:.3f} nats here; a step has an eighth of its tokens ([equal rates](#where-the-lead-is)). On "
            f"another seed: {again_on(report, losses)}.{on_five_seeds(report)}")


def again_on(report, losses):
    """The two rates of each model that ran on another seed: which is better, and whether seed 1 says the same."""
    found = []
    for name in PAIR:
        runs = [line for line in report.lines if line.name.startswith(f"confirm_{name}_")]
        results = {plan.option(line, "--lr"): plan.loss_of(report.with_diverged.get(line.name)) for line in runs}
        if None in results.values():
            found.append(f"{name} not run yet")
            continue
        low, high = sorted(results, key=results.get)
        one = [losses[name].get(rate, math.inf) for rate in (low, high)]  # that of a run that diverged is not there
        order = "as" if one[0] < one[1] else "not as"
        found.append(f"{name} is {results[high] - results[low]:.4f} nats lower at {low} than at {high}, {order} on the first")
    return "; ".join(found)


def on_five_seeds(report):
    """The other of fox-pro's two best rates, on the main pair's seeds."""
    values = [a["val_loss"] - b["val_loss"] for a, b in report.both(f"{FOX}-1e-3", FOX)]
    return (f" On seeds 11 to 15 {FOX} at 1e-3 minus at 5e-4, the main pair's rate: {error_of(values)} "
            "([row 4](#what-separates-the-pair))." if len(values) == len(SEEDS) else "")


def recall(report):
    def right(pattern):
        names = fnmatch.filter([line.name for line in report.all_lines], pattern)
        require(all(name in report.with_diverged for name in names))
        found = [report.all_results[name]["validations"][-1]["accuracy"] or 0 for name in names
                 if name in report.all_results]
        return f"{100 * max(found, default=0):.0f}%"
    best = lambda model: right(f"lr_mqar-{model}_*")
    more = ""
    with contextlib.suppress(Missing):
        more = (f". {FOX} with plain gates where no token is seen twice, the best of three rates: {right(f'mqar-fresh-{FOX}_*')}; "
                + "; ".join(f"at width {width} and 5e-4: {right(f'mqar-{FOX}-5e-4_d{width}')}" for width in (64, 256)))
    return (f"**MQAR from scratch,** width 128, one seed, the best of three learning rates. With plain gates {FOX} ends with "
            f"{best(FOX)} right, fox-llama with {best('fox-llama')}; {OTHER} with {best(OTHER)}, transformer-llama with "
            f"{best('transformer-llama')}. Gates that begin long, half-lives 44 and 11,400 tokens in a layer's two heads: "
            f"{best('fox-pro-long')} and {best('fox-llama-long')}{more} ([below](#mqar-from-scratch)).")


def overwritten(report):
    right = lambda run, test: run.get("tests", {}).get(f"over_{test}", {}).get("accuracy")
    by_model, rates = {}, set()
    for line in from_scratch.lines_of("over", report.all_lines):
        if run := report.with_diverged.get(line.name):
            by_model.setdefault(line.name.removeprefix("over-").rpartition("_")[0], []).append(run)
            rates.add(plan.option(line, "--lr"))
    best = {model: max(runs, key=lambda run: right(run, "T1024") or 0) for model, runs in require(by_model).items()}
    begin = ("**Overwritten keys from scratch,** one seed, learning rate" + "s" * (len(rates) > 1) + " "
             + " and ".join(sorted(rates, key=float)))
    learned = {model: run for model, run in best.items() if 100 * (right(run, "T1024") or 0) >= from_scratch.LEARNED}
    if not learned:
        return (f"{begin}: none of {counted(len(best), 'model')} learns it, so that it says nothing of their differences "
                "([below](#overwritten-keys-from-scratch)).")
    failed = [model + " (diverged)" * ("diverged" in run) for model, run in best.items() if model not in learned]
    share = lambda run, test: from_scratch.percent(right(run, test))
    shares = ", ".join(f"{model} {share(run, 'T1024')} and {share(run, 'T8192')}%" for model, run in learned.items())
    return (f"{begin}, the best of them. " + f"Below {from_scratch.LEARNED}% right: {', '.join(failed)}. " * bool(failed)
            + "Right at the length of training, and of 64 keys with up to 32 rewrites at 8 times this length: "
            f"{shares} ([below](#overwritten-keys-from-scratch)).")


def packed(report):
    runs = require(report.packed.pairs())
    lead = {walls: [of[FOX, walls]["intact"]["loss_mean"] - of[OTHER, walls]["intact"]["loss_mean"] for of in runs]
            for walls in ("", "-walls")}
    gain = [without - with_walls for without, with_walls in zip(lead[""], lead["-walls"])]
    return (f"**Packed documents.** What walls gain {FOX} minus what they gain {OTHER}: {verdict(gain)}. {FOX} minus {OTHER} "
            f"with walls: {verdict(lead['-walls'])}; without: {verdict(lead[''])} ([below](#packed-documents)).")


def by_context(report):
    contexts, targets, means = last_losses(report)
    inside = require([k for k, context in enumerate(contexts) if context + targets <= TRAINED])
    at = {k: [f[k] - t[k] for f, t in means] for k in inside}
    growth = [last - first for first, last in zip(at[inside[0]], at[inside[-1]])]
    return ("**Lead and context,** within the training length. Difference of the loss of the same targets behind "
            f"{' and '.join(f'{contexts[k]:,}' for k in inside)} tokens: "
            f"{' and '.join(f'{statistics.fmean(at[k]):+.3f}' for k in inside)} nats; what the longer context adds to it: "
            f"{verdict(growth)} ([by octave](#where-the-lead-is)).")


def by_step(report):
    both = pairs(report)
    steps = lead.early(report)
    loss = lambda r, step: next((v["loss"] for v in r["validations"] if v["step"] == step), None)
    found = [[(loss(f, step), loss(t, step)) for f, t in both] for step in steps]
    require(all(None not in losses for row in found for losses in row))
    means = ", ".join(f"{statistics.fmean(f - t for f, t in row):+.3f}" for row in found)
    return ("**Lead and length of training.** Difference of the validation loss after "
            f"{', '.join(f'{step:,}' for step in steps)} steps: {means} ([in steps](#where-the-lead-is)). What a longer run "
            "leaves of it was not measured.")


def near(report):
    copies = [f"after {gap:,} tokens: {verdict(at_points(report, 'copy', gap=gap)[1])}" for gap in (256, 4096)]
    (fox, other), by_seed = at_points(report, NEEDLES[-1], gap=(1024, 4096))
    return (f"**Recall within the training length.** The fall of a copy's loss, {FOX} minus {OTHER}, {'; '.join(copies)}. "
            f"Needles after 1,024 and 4,096 tokens together, after tuning: {fox:.0f}% and {other:.0f}% right, "
            f"{verdict(by_seed, 'points', 1)}. No distance between 4,096 tokens and the training length was tested.")


def conflict(report):
    _, one = at_points(report, "conflict", stale=1, gap=4096)
    points = {gap: at_points(report, "conflict", stale=4, gap=gap) for gap in (4096, LONGEST)}
    show = lambda gap: "{:.1f} and {:.1f} nats ({})".format(*points[gap][0], verdict(points[gap][1], digits=1))
    return (f"**Conflict,** log-probability of the newer continuation minus that of the older, of {FOX} and of {OTHER}; "
            f"where it is negative the older one is preferred. Against four older ones, 4,096 tokens behind the newer: {show(4096)}; {LONGEST:,} tokens behind it "
            f"{show(LONGEST)}. Against one, 4,096 tokens behind, the difference is {verdict(one, digits=1)}.")


def far(report):
    copy = at_points(report, "copy", gap=TRAINED)
    needles = {gap: at_points(report, NEEDLES[-1], gap=gap) for gap in (TRAINED, 63488)}
    show = lambda gap: "after {:,} tokens {:.0f}% and {:.0f}% right, {}".format(
        gap, *needles[gap][0], verdict(needles[gap][1], "points", 1))
    return (f"**Recall beyond the training length.** The loss of a copy {TRAINED:,} tokens later, just beyond it, falls by "
            "{:.2f} and {:.2f} nats ".format(*copy[0]) + f"({verdict(copy[1])}). Needles after tuning: "
            f"{show(TRAINED)}; {show(63488)}. Cut to its training length {OTHER} would see nothing of these.")


def copies(report):
    """How well the second study's models recall a copy."""
    show = lambda name, base, gap: verdict(require(report.copies(name, base).get(gap)))
    four = "fox-pro-4heads", "transformer-pro-4heads"
    starts = "; ".join(f"{name} {show(name, FOX, LONGEST)}" for name in registered.STARTS)
    return ("**Recall of other models,** the fall of a copy's loss ([all](#tasks)). With four heads in both: after 4,096 tokens "
            f"{show(*four, 4096)}; after {TRAINED:,}: {show(*four, TRAINED)}. fox-pro-rope minus {OTHER} after {TRAINED:,}: "
            f"{show('fox-pro-rope', OTHER, TRAINED)}. Gates that begin long minus plain ones after {LONGEST:,}: {starts}.")


def losses(report):
    within, beyond = (statistics.fmean(differences(report, loss)) for loss in (loss_within, loss_beyond))
    return (f"**Loss,** {FOX} minus {OTHER}: {within:+.3f} nats within the training length, {beyond:+.3f} from there to "
            f"{LONGEST:,} tokens ([whether this is claimed, and beside a Transformer that is cut](#primary-comparisons)).")


def hours(report):
    both = require([pair for pair in pairs(report, "_repeat") if reach_ratio(*pair) is not None])
    mean = lambda ratios: math.exp(statistics.fmean(require(ratios)))
    time, steps = (mean([reach_ratio(*pair, by) for pair in both]) for by in ("hours", "step"))
    gpus = " and ".join(sorted({gpu_of(f) for f, _ in both}))
    return (f"**GPU-hours.** To the same validation loss {FOX} takes {time:.2f} times the GPU-hours of {OTHER} "
            f"([whether this is claimed](#primary-comparisons)): {steps:.2f} times the steps, each {time / steps:.2f} times as "
            f"long ([to earlier losses](#where-the-lead-is)). Geometric means of {counted(len(both), 'pair')} of repeats on "
            f"{gpus}, both models trained by this program.")


def beyond(report):
    contexts, targets, means = last_losses(report)
    require(len(contexts) > 1 and contexts[-1] > TRAINED)
    fox, other = (statistics.fmean(pair[k][-1] - pair[k][-2] for pair in means) for k in range(2))
    return (f"**A context longer than in training.** From {contexts[-2]:,} to {contexts[-1]:,} tokens in front of the same "
            f"{targets:,} targets their loss changes by {fox:+.3f} nats of {FOX}, by {other:+.3f} of {OTHER} (RoPE, base "
            f"500,000, not extended).{with_yarn(report)}")


def with_yarn(report):
    """A sentence on FoX beside Transformers with YaRN; "": none was evaluated so."""
    leads = {name.removeprefix("again_"): [report.lead_over(runs, way) for way in ("yarn", "eval")]
             for (name, *ways), runs in report.extended().items() if "yarn" in ways}
    found = "; ".join(f"{name.replace(OTHER, FOX)} minus {name} {verdict(lead)} ({statistics.fmean(without):+.3f} without)"
                      for name, (lead, without) in leads.items() if lead)
    return f" Where YaRN extends it, to {LONGEST:,} tokens: {found} ([table](#what-a-longer-context-is-worth))." if found else ""


def beside(report, models):
    """The validation loss of models [(name, base)] minus that of their bases, and beyond the training length."""
    found = [(name, base, both) for name, base in models if (both := report.both(name, base))]
    show = lambda loss, both: verdict([loss(a) - loss(b) for a, b in both], digits=4)
    return "; ".join(f"{name} minus {base} {show(registered.validation, both)}, beyond the training length "
                     f"{show(loss_beyond, both)}" for name, base, both in require(found))


def separates(report):
    return f"**What separates the pair** ([numbers](#what-separates-the-pair)). {require(registered.sentence(report))}"


def other_pairs(report):
    return ("**Other blocks and sizes,** validation loss, the larger pair at the learning rates of the smaller: "
            f"{beside(report, OTHER_PAIRS)}.")


def variants(report):
    models = [model for model in report.variants() if "-fp8" not in model[0] and model[0] not in registered.MODELS]
    return f"**One thing changed,** validation loss: {beside(report, models)}."


def recurrent(report):
    best = {name: require(report.best_of(name)) for name in ("mamba2", "hgrn2", "deltanet", *PAIR)}
    rates = {name: sum(loss is not None for _, loss, _ in plan.losses(name, report.lines, report.with_diverged)) for name in best}
    return ("**Recurrent models,** one seed, each at the best of its learning rates, whose number is in brackets, validation "
            "loss, and loss beyond the training length: " + ", ".join(
                f"{name} ({rates[name]}) {r['val_loss']:.3f} and {loss_beyond(r):.3f}" for name, r in best.items()) + ".")


def pruning(report):
    runs = require([r for r in report.seeds(FOX) if r.get("unpruned") and r.get("pruned_by_layer")])
    cost = max(abs(r["eval"]["loss_mean"] - r["unpruned"]["loss_mean"]) for r in runs)
    share = statistics.fmean(share for r in runs for share in r["pruned_by_layer"])
    speeds = [r["eval"]["tokens_per_second"] / r["unpruned"]["tokens_per_second"] for r in runs if alone(r)]
    slower = f" and takes {statistics.fmean(speeds):.1f} times as long (mean of {counted(len(speeds), 'run')})" if speeds else ""
    return (f"**Pruning** skips {100 * share:.0f}% of attention's blocks at the last step. Evaluating checkpoints "
            f"({len(runs)}) at {LONGEST:,} tokens without it changes the loss by at most {cost:.6f} nats{slower}.")


def half_lives(report):
    last = [[*r["half_lives"].values()][-1] for r in report.seeds(FOX) if r.get("half_lives")]
    lives = require([math.inf if life is None else life for layers in last for heads in layers for life in heads])
    share = lambda test: f"{100 * sum(map(test, lives)) / len(lives):.0f}%"
    return (f"**Half-lives.** The median of all heads is {statistics.median_low(lives):.1f} tokens; {share(lambda x: x < 16)} are "
            f"below 16, {share(lambda x: x > 1000)} above 1,000.")


def left(report):
    """What has not run, or not with all seeds and rates, by the names of the runs without their seeds and rates."""
    def group(name):
        return name.removesuffix("_repeat").rpartition("_")[0] + " (repeats)" * name.endswith("_repeat")
    names = [line.name for line in report.all_lines if line.measures != "edge" and line.name not in report.with_diverged]
    return f"Not run yet, or not with all seeds and rates: {', '.join(dict.fromkeys(map(group, names)))}." if names else "All runs are there."

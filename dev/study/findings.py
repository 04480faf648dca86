"""
What STUDY.md says was found, in sentences whose numbers are those of the results.
"""
import re
import statistics

import plan
from measures import LONGEST, NEEDLES, NONE, PAIR, SEEDS, alone, loss_beyond, loss_within

RECIPE = "2e-3"  # the paper's learning rate for models of 125 million parameters
LONG_LIVED = 1000  # tokens
NEEDED = re.compile(r"(lr_|lr_mqar-|short-)?(fox|transformer)-pro(-walls)?_[^_]*$")  # runs that sentences speak of


def text(report):
    """Lines of Markdown: what is unfavourable, what is favourable, advice."""
    needed = [line for line in report.all_lines if line.measures != "edge" and NEEDED.match(line.name)]
    left = [line.name for line in needed if line.name not in report.all_results]
    if left:
        return [f"{NONE}: after {', '.join(left)}."]
    return ["**Not in favour of FoX, or not as the paper leads to expect:**", "", *unfavourable(report), "",
            "**In favour of FoX:**", "", *favourable(report), "",
            "**Advice,** for models and budgets of this size:", "", *advice(report)]


def rates(report, name):
    """({learning rate: loss} that ran, the best rate as text)."""
    found = {rate: loss for rate, loss, _ in plan.losses(name, report.lines, report.rates) if loss is not None}
    return found, plan.best_lr(name, report.lines, report.rates)


def point(report, task, model, **at):
    """The mean over seeds at one point of a task."""
    found = {dict(at_point).items() <= at.items(): of for (_, at_point), of in report.points_of_tasks((task,)).items()}
    return statistics.fmean(found[True][model])


def unfavourable(report):
    losses, best = zip(*(rates(report, name) for name in PAIR))
    costs = [of[float(RECIPE)] - of[float(at)] for of, at in zip(losses, best)]
    learned = [max(r["validations"][-1]["accuracy"] for run, r in report.all_results.items()
                   if run.startswith(f"lr_mqar-{name}_")) for name in PAIR]
    copy = [[point(report, "copy", name, segment=64, gap=gap) for name in PAIR] for gap in (256, 4096)]
    older = [point(report, "conflict", name, stale=4, gap=4096) for name in PAIR]
    return [
        f"- **Learning rate.** {PAIR[0]} is best at {best[0]}, {PAIR[1]} at {best[1]}. In the paper's main table FoX takes the larger "
        f"one, 2e-3 beside 1e-3. The paper's {RECIPE} for small models costs {costs[0]:.3f} and {costs[1]:.3f} nats here.",
        f"- **Recall from scratch.** With plain gates {PAIR[0]} ends MQAR with {100 * learned[0]:.0f}% right at best, {PAIR[1]} with "
        f"{100 * learned[1]:.0f}%; gates that start long learn it ([below](#mqar-from-scratch)).",
        "- **Packed documents with walls.** No lead of FoX is left ([below](#packed-documents)).",
        f"- **Copies at short distance.** The loss of a segment's copy falls by {copy[0][0]:.2f} nats beside {copy[0][1]:.2f} after 256 "
        f"tokens, {copy[1][0]:.2f} beside {copy[1][1]:.2f} after 4,096: forgetting is no help there.",
        f"- **Outdated facts.** Of one newer and four older continuations both models prefer the older ones "
        f"({older[0]:.1f} and {older[1]:.1f} nats, 4,096 tokens behind the newer): a gate does not make the last one count."]


def favourable(report):
    pairs = [[report.results[f"{name}_{s}"] for name in PAIR] for s in SEEDS]
    within, beyond = ([loss(f) - loss(t) for f, t in pairs] for loss in (loss_within, loss_beyond))
    last = [[statistics.fmean(column) for column in zip(*(row for pair in pairs
             for row in pair[k]["eval"]["documents"]["last_loss"]))] for k in range(2)]
    lower = lambda values: f"{-statistics.fmean(values):.3f} nats lower, in {sum(v < 0 for v in values)} of {len(values)} pairs"
    needles = [[point(report, NEEDLES[-1], name, distractors=63, gap=gap) for name in PAIR] for gap in (16384, 63488)]
    copies = [point(report, "copy", name, segment=64, gap=16384) for name in PAIR]
    fox = [f for f, _ in pairs]
    speeds = [r["eval"]["tokens_per_second"] / r["unpruned"]["tokens_per_second"] for r in fox if alone(r)]
    lives = [life for r in fox for layer in list(r["half_lives"].values())[-1] for life in layer]
    long_lived = sum(life is None or life > LONG_LIVED for life in lives) / len(lives)
    pruned = statistics.fmean(share for r in fox for share in r["pruned_by_layer"])
    cost = max(abs(r["eval"]["loss_mean"] - r["unpruned"]["loss_mean"]) for r in fox)
    return [
        f"- **Loss within the training length:** {lower(within)}. **Beyond it,** to four times the length: {lower(beyond)}.",
        f"- **A longer context keeps helping.** From 16,384 to 63,488 tokens of context the same targets' loss changes by "
        f"{last[0][-1] - last[0][-2]:+.3f} nats, that of {PAIR[1]} by {last[1][-1] - last[1][-2]:+.3f}.",
        f"- **Recall at long distance.** Needles among 63 others, after tuning: {needles[0][0]:.0f}% right beside {needles[0][1]:.0f}% "
        f"behind 16,384 tokens, {needles[1][0]:.0f}% beside {needles[1][1]:.0f}% behind 63,488. Copies after 16,384 tokens: their loss "
        f"falls by {copies[0]:.2f} nats beside {copies[1]:.2f}.",
        f"- **Pruning.** {100 * pruned:.0f}% of attention is skipped at the last step of training. Evaluating the same checkpoints "
        f"without pruning changes the loss by at most {cost:.6f} nats and takes {statistics.fmean(speeds):.1f} times as long at "
        f"{LONGEST:,} tokens. {100 * long_lived:.0f}% of the heads have a half-life above {LONG_LIVED:,} tokens."]


def advice(report):
    best = [rates(report, name)[1] for name in PAIR]
    return [
        f"- Search the learning rate of {PAIR[0]} around {best[0]}, that of {PAIR[1]} around {best[1]}.",
        "- Plain gates are enough for text. A small model that must learn recall from scratch needs gates that start long "
        "(`--set fgate_bias_init=true`).",
        "- Leave pruning on when evaluating: it changes no loss.",
        f"- Expect {PAIR[0]} to gain from up to four times the training length, and {PAIR[1]} to lose from it.",
        f"- Pack short documents with walls for {PAIR[1]}; {PAIR[0]} does as well without."]

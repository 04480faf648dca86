"""
Tables of the tasks that small models learn from scratch: a row a run that has its result, and how many have not.
"""
import plan

NONE = "no run yet"
REACHED = 0.5, 0.9  # shares of right answers whose step is shown


def first_step(validations, share):
    """The first validation with so many right answers."""
    return next((f"{v['step']:,}" for v in validations if v["accuracy"] is not None and v["accuracy"] >= share), "never")


def percent(share):
    return NONE if share is None else f"{100 * share:.1f}"


def lines_of(task, lines):
    return [line for line in lines if plan.task_of(line) == task]


def rows_of_task(task, lines, results, data):
    """Titles; steps to each share of REACHED, and the accuracy of each data set TASK_*, in percent, of each run."""
    names = [*plan.tests_of(task, data)]
    rows = [("run", "lr", "seed", *(f"step of {share:.0%}" for share in REACHED), "at the end",
             *(name.removeprefix(f"{task}_").replace("_", ", ") for name in names))]
    mine = lines_of(task, lines)
    for line in mine:
        if r := results.get(line.name):
            rows.append((line.name, f"{r['lr']:g}", r["seed"], *(first_step(r["validations"], s) for s in REACHED),
                         percent(r["validations"][-1]["accuracy"]),
                         *(percent(r["tests"].get(name, {}).get("accuracy")) for name in names)))
    if left := len(mine) + 1 - len(rows):
        rows.append((f"{left} runs", NONE, *[""] * (len(rows[0]) - 2)))
    return rows


def rows_of_keys(task, lines, results, tests):
    """Titles; of each run and point of keys.py's tests, right, stale and other answers in percent."""
    rows = [("run", "test", "keys", "rewrites", "right", "stale", "other")]
    for line in lines_of(task, lines):
        for name in plan.tests_of(task, tests):
            found = results.get(line.name, {}).get("tasks", {}).get(name)
            for mean in plan.unpacked(found) if found else []:
                right, stale = mean["right"], mean["stale"]
                rows.append((line.name, name.removeprefix(f"{task}_"), mean["keys"], mean["rewrites"], f"{right:.1f}",
                             f"{stale:.1f}", f"{100 - right - stale:.1f}"))
    return rows if len(rows) > 1 else [*rows, (NONE, *[""] * 6)]

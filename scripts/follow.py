#!/usr/bin/env python3
"""
Sends the logs of runs to TensorBoard while they grow, from their beginning, or with --wandb to Weights &
Biases.

    scripts/follow.py out/fox-pro-nano &
    tensorboard --logdir out

Events go to RUN/tensorboard, or with --wandb to a W&B run of the folder's name. It ends with each run's last
checkpoint, with --once at the end of what is logged. RUN/tensorboard/position (RUN/wandb.position) says what
was sent: the next call goes on there. In TensorBoard, what a resumed run does again replaces what it had
done. A damaged line is reported and passed over. Needs tensorboard or wandb (pip install -c
scripts/requirements.txt tensorboard).
"""
import calendar
import glob
import hashlib
import json
import os
import sys
import time

from common import BadLine, Parser, attention_layers, log_line, package, run, write_file

NOT_SHOWN = {"event", "step", "eta_s", "ms", "waited_ms", "val_tokens", "ranks", "slowest_rank"}


class TensorBoard:
    def __init__(self, folder, _):
        self.event = package("tensorboard.compat.proto.event_pb2")
        self.summary = package("tensorboard.compat.proto.summary_pb2").Summary
        writer = package("tensorboard.summary.writer.event_file_writer")
        folder = os.path.join(folder, "tensorboard")
        # TensorBoard reads events.out.tfevents.SECOND.HOST.PROCESS in the order of these names: one file a second
        while glob.glob(f"{glob.escape(folder)}/events.out.tfevents.{int(time.time())}.*"):
            time.sleep(0.1)
        self.writer = writer.EventFileWriter(folder)
        self.position = os.path.join(folder, "position")
        self.flush = self.writer.flush

    def start(self, line, when):
        """A process starts after line["step"]: what an earlier one did after that step is void."""
        log = self.event.SessionLog(status=self.event.SessionLog.START)
        self.writer.add_event(self.event.Event(wall_time=when, step=line["step"] + 1, session_log=log))

    def add(self, step, values, when):
        rows = [self.summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.writer.add_event(self.event.Event(wall_time=when, step=step, summary=self.summary(value=rows)))


class WandB:
    def __init__(self, folder, project):
        path = os.path.realpath(folder)
        self.position = os.path.join(folder, "wandb.position")
        self.run = package("wandb").init(
            project=project, name=os.path.basename(path), resume="allow", dir=folder,
            id=hashlib.sha256(path.encode()).hexdigest()[:16], reinit="create_new")
        self.run.define_metric("*", step_metric="step")

    def start(self, line, _):
        self.run.config.update(line, allow_val_change=True)

    def add(self, step, values, _):
        self.run.log({"step": step, **values})

    def flush(self):
        pass


def numbers(line, config):
    """{tag: number} of a line of the log of a model."""
    kind = "train" if line["event"] == "step" else line["event"]
    groups = {kind: line, "perplexity/below": line.get("perplexity_by_length"),
              "val_loss_of": line.get("val_loss_of"),
              **{f"requests/{k}": v for k, v in (line.get("requests") or {}).items()}}
    values = {f"{group}{'_' if '/' in group else '/'}{k}": float(v)
              for group, members in groups.items() if isinstance(members, dict) for k, v in members.items()
              if k not in NOT_SHOWN and isinstance(v, (int, float)) and not isinstance(v, bool)}
    pruned = line.get("pruned_by_layer", [])
    values.update({f"pruned/layer_{i:02d}": v for i, v in zip(attention_layers(config, len(pruned)), pruned)
                   if v is not None})
    values.update({f"position/below_{row['to']}": row["loss"] for row in line.get("by_position", [])
                   if row["loss"] is not None})
    return values


class Follower:
    def __init__(self, folder, sink, project):
        self.path, self.file = os.path.join(folder, "log.jsonl"), None
        self.open_sink = lambda: sink(folder, project)  # which writes into the folder, once there is a log
        self.offset, self.lines, self.when, self.run = 0, 0, time.time(), None

    def begin(self):
        self.sink = self.open_sink()
        try:
            with open(self.sink.position) as f:
                self.offset, self.when, self.run = json.load(f)
        except (OSError, ValueError, TypeError):
            pass  # nothing was sent yet

    def read(self):
        """Sends the complete lines that are new. True at the run's end."""
        if not self.file:
            if not os.path.exists(self.path):
                return False
            self.begin()
            self.file = open(self.path, "rb")
            if os.fstat(self.file.fileno()).st_size < self.offset:
                self.offset = 0  # another log
            self.lines = self.file.read(self.offset).count(b"\n")
        end, before = False, self.offset
        self.file.seek(self.offset)
        for text in self.file:
            if not text.endswith(b"\n"):
                break  # not complete yet
            self.offset, self.lines = self.offset + len(text), self.lines + 1
            try:
                line = log_line(self.path, self.lines, text)
                end = self.send(line) if line else end
            except BadLine as e:
                print(f"warning: {e}; it is passed over", file=sys.stderr, flush=True)
        if self.offset != before:
            self.sink.flush()
            write_file(self.sink.position, json.dumps([self.offset, self.when, self.run]))
        return end

    def send(self, line):
        """True: the line is the run's last."""
        if line["event"] == "run":
            try:
                self.when = calendar.timegm(time.strptime(line["started"], "%Y-%m-%dT%H:%M:%SZ"))
            except ValueError:
                raise BadLine(f"{self.path}: line {self.lines}: 'started' is not a time")
            self.run = line
            self.sink.start(line, self.when)
        self.when += line.get("ms", 0) / 1000
        if line["event"] in ("step", "validation", "evaluation"):
            self.sink.add(line["step"], numbers(line, self.run["config"] if self.run else {}), self.when)
        return line["event"] == "checkpoint" and self.run and line["step"] >= self.run["num_steps"]


def main():
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders with log.jsonl, or that will have it")
    parser.add_argument("--wandb", metavar="PROJECT", help="to this project of Weights & Biases")
    parser.add_argument("--once", action="store_true", help="end where the logs end now")
    options = parser.parse_args()
    sink = WandB if options.wandb else TensorBoard
    followers = [Follower(folder, sink, options.wandb) for folder in options.runs]
    missing = [f.path for f in followers if not os.path.exists(f.path)]
    for path in missing:
        print(f"error: {path}: no such file" if options.once else f"waiting for {path}", file=sys.stderr, flush=True)
    while followers:
        followers = [f for f in followers if not f.read() and not options.once]
        if followers:
            time.sleep(1)
    sys.exit(options.once and len(missing) > 0)


if __name__ == "__main__":
    run(main)

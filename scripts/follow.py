#!/usr/bin/env python3
"""
Sends the logs of runs to TensorBoard while they grow, from their beginning, or with --wandb to Weights & Biases.

    scripts/follow.py out/fox-pro-nano &
    tensorboard --logdir out

Events go to RUN/tensorboard, or with --wandb to a W&B run of the folder's name. It ends with each run's last
checkpoint, with --once at the end of what is logged. RUN/tensorboard/position (RUN/wandb.position) says what was sent:
the next call goes on there. In TensorBoard, what a resumed run does again replaces what it had done. Needs tensorboard
(scripts/requirements.txt), or wandb.
"""
import argparse
import calendar
import hashlib
import json
import os
import sys
import time

NOT_SHOWN = {"event", "step", "eta_s", "ms", "waited_ms", "val_tokens", "ranks", "slowest_rank"}


class TensorBoard:
    def __init__(self, folder, _):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        self.event, self.summary = event_pb2, summary_pb2
        self.position = os.path.join(folder, "tensorboard", "position")
        self.writer = EventFileWriter(os.path.join(folder, "tensorboard"))

    def start(self, run, when):
        """A process starts after run["step"]: what an earlier one did after that step is void."""
        text = self.event.SessionLog(status=self.event.SessionLog.START)
        self.writer.add_event(self.event.Event(wall_time=when, step=run["step"] + 1, session_log=text))

    def add(self, step, values, when):
        rows = [self.summary.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.writer.add_event(self.event.Event(wall_time=when, step=step, summary=self.summary.Summary(value=rows)))

    def flush(self):
        self.writer.flush()


class WandB:
    def __init__(self, folder, project):
        import wandb
        self.wandb, self.position = wandb, os.path.join(folder, "wandb.position")
        path = os.path.realpath(folder)
        self.run = wandb.init(project=project, name=os.path.basename(path), resume="allow", dir=folder,
                              id=hashlib.sha256(path.encode()).hexdigest()[:16], reinit="create_new")
        self.run.define_metric("*", step_metric="step")

    def start(self, run, _):
        self.run.config.update(run, allow_val_change=True)

    def add(self, step, values, _):
        self.run.log({"step": step, **values})

    def flush(self):
        pass


def numbers(line):
    """{tag: number} of a line of the log."""
    kind = "validation/" if line["event"] == "validation" else "train/"
    values = {kind + k: float(v) for k, v in line.items()
              if k not in NOT_SHOWN and isinstance(v, (int, float)) and not isinstance(v, bool)}
    values.update({f"pruned/layer_{i:02d}": v for i, v in enumerate(line.get("pruned_by_layer", []))})
    values.update({f"position/below_{row['to']}": row["loss"] for row in line.get("by_position", [])
                   if row["loss"] is not None})
    return values


class Follower:
    def __init__(self, folder, sink, project):
        self.path, self.sink = os.path.join(folder, "log.jsonl"), sink(folder, project)
        self.file, self.run, self.when = None, None, time.time()
        try:
            with open(self.sink.position) as f:
                self.offset, self.when, self.run = json.load(f)
        except (OSError, ValueError):
            self.offset = 0

    def done(self, line):
        return line["event"] == "checkpoint" and self.run and line["step"] >= self.run["num_steps"]

    def read(self):
        """Sends the complete lines that are new. True at the run's end."""
        if not self.file:
            if not os.path.exists(self.path):
                return False
            self.file = open(self.path, "rb")
            if os.fstat(self.file.fileno()).st_size < self.offset:
                self.offset = 0  # another log
        end, before = False, self.offset
        self.file.seek(self.offset)
        for text in self.file:
            if not text.endswith(b"\n"):
                break  # not complete yet
            self.offset += len(text)
            try:
                line = json.loads(text)
            except ValueError:
                continue  # of a process that was killed while it wrote
            end = self.send(line)
        if self.offset != before:
            self.sink.flush()
            with open(self.sink.position + ".tmp", "w") as f:
                json.dump([self.offset, self.when, self.run], f)
            os.replace(self.sink.position + ".tmp", self.sink.position)
        return end

    def send(self, line):
        if line["event"] == "run":
            self.run = line
            self.when = calendar.timegm(time.strptime(line["started"], "%Y-%m-%dT%H:%M:%SZ"))
            self.sink.start(line, self.when)
        self.when += line.get("ms", 0) / 1000
        if line["event"] in ("step", "validation"):
            self.sink.add(line["step"], numbers(line), self.when)
        return self.done(line)


def main():
    parser = argparse.ArgumentParser(description="sends the logs of runs to TensorBoard or W&B while they grow")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders with log.jsonl, which may not exist yet")
    parser.add_argument("--wandb", metavar="PROJECT", help="to this project of Weights & Biases")
    parser.add_argument("--once", action="store_true", help="end where the logs end now")
    options = parser.parse_args()
    try:
        followers = [Follower(run, WandB if options.wandb else TensorBoard, options.wandb) for run in options.runs]
    except ImportError as e:
        sys.exit(f"error: {e}: pip install -r scripts/requirements.txt" + (" wandb" if options.wandb else ""))
    while followers:
        followers = [f for f in followers if not f.read() and not options.once]
        if followers:
            time.sleep(1)


if __name__ == "__main__":
    try:
        main()
    except OSError as e:
        sys.exit(f"error: {e.filename}: {e.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)

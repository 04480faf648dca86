"""
The frame of the tests of scripts/eval/tasks: that of dev/test/eval, with models that a fake solver stands for.
"""
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOLVER = ROOT / "dev/test/tasks/fake_solver.py"
sys.path[:0] = [str(ROOT / "dev/test/eval"), str(ROOT / "scripts/eval/tasks")]

from eval_case import SCRIPTS, Case, needs_harness, needs_plots, run_tests  # noqa: E402,F401


class TaskCase(Case):
    def measure(self, script, answers, *arguments):
        """Runs a script of tasks for the solver that answers so. Returns its file's object and its output."""
        out = self.tmp / f"{answers}{len(list(self.tmp.iterdir()))}.json"
        text = self.run_script(f"tasks/{script}", "--init", self.model(answers=answers), "--trainer", SOLVER,
                               "--out", out, *arguments)
        return json.loads(out.read_text()), text

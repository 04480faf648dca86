"""
The frame of the tests of scripts/eval: a folder for each, a fake trainer (fake_requests.py), scripts that run or
die, and which optional packages are there.
"""
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FAKE = ROOT / "dev/test/eval/fake_requests.py"
SCRIPTS = ROOT / "scripts/eval"
sys.path[:0] = [str(SCRIPTS), str(ROOT / "scripts"), str(FAKE.parent), str(ROOT / "dev/test/scripts")]

import fox  # noqa: E402

PLOTS = [m for m in ("matplotlib", "numpy", "safetensors") if not importlib.util.find_spec(m)]
HARNESS = [m for m in ("lm_eval",) if not importlib.util.find_spec(m)]
TOKENS = [m for m in ("tokenizers",) if not importlib.util.find_spec(m)]
needs_plots = unittest.skipIf(PLOTS, f"not installed: {', '.join(PLOTS)}")
needs_tokenizers = unittest.skipIf(TOKENS, "not installed: tokenizers")
needs_harness = unittest.skipIf(HARNESS, "not installed: lm_eval")


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tmp = Path(folder.name)

    def model(self, vocab_size=257, options=None, **config):
        """A folder for the fake trainer."""
        folder = self.tmp / f"model{len(list(self.tmp.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size, **config}))
        if options:
            (folder / "trainer.json").write_text(json.dumps({"options": options}))
        return folder

    def trainer(self, folder, **options):
        trainer = fox.Trainer(folder, FAKE, **options)
        self.addCleanup(lambda: [stop(p) for p in trainer.processes])
        return trainer

    def start(self, name, *arguments):
        command = [sys.executable, SCRIPTS / name, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True)

    def run_script(self, name, *arguments):
        """Runs a script; returns its stdout."""
        done = self.start(name, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def dies(self, expected, name, *arguments):
        """Runs a script that must end with exit code 1, its last line `error: ...expected...`."""
        done = self.start(name, *arguments)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, rf"(^|\n)error: [^\n]*{re.escape(expected)}[^\n]*\n$")
        self.assertNotIn("Traceback", done.stderr)
        return done.stderr


def stop(process):
    process.stdin.close()
    process.wait()
    process.stdout.close()


def run_tests():
    """Runs the test cases of the script that was started, and prints the totals that dev/test/run.sh reads."""
    done = unittest.main("__main__", exit=False, verbosity=0).result
    for reason in sorted({reason for _, reason in done.skipped}):
        print(f"skipped: {reason}")
    failed = len(done.failures) + len(done.errors)
    print(f"{done.testsRun - failed - len(done.skipped)} passed, {failed} failed")
    sys.exit(failed > 0)

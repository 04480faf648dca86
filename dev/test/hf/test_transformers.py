"""
Some of each kind of what the tests of this folder check, in one process: PyTorch takes longer to import than most of
them. test_transformers.sh runs this where the packages are installed.
"""
import contextlib
import importlib.util
import io
import os
import re
import runpy
import sys
import traceback
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PARTS = (("test_hf", "fox-pro-rope"), ("test_hf", "gated-deltanet-dh128"), ("test_hf_trained", "fox-pro-rope"),
         ("test_hf_trained", "stack-packed"), ("test_hf_trained", "foreign-llama"), ("test_hf_trained", "byte"),
         ("test_hf_rope",), ("test_finetune", "fox-pro-nano"), ("test_lm_eval",))


def run(name, *words):
    """Runs a test as its command line does. Returns what it printed."""
    sys.argv = [name, *words]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        except SystemExit:
            pass
        except Exception:
            traceback.print_exc(file=said)
    return said.getvalue()


def main():
    missing = [m for m in ("torch", "transformers", "lm_eval") if not importlib.util.find_spec(m)]
    if missing:
        print(f"skipped: not installed: {', '.join(missing)}\n0 passed, 0 failed")
        return
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")  # before they are imported
    totals = [0, 0]
    for part in PARTS:
        said = run(*part)
        counts = re.findall(r"^(\d+) passed, (\d+) failed$", said, re.M)
        passed, failed = map(int, counts[-1]) if counts else (0, 0)
        failed += not passed and not failed
        for line in re.findall(r"^skipped: .*$", said, re.M):
            print(line)
        if failed:
            print(f"FAILED {' '.join(part)}: {said[-3000:]}")
        totals = [totals[0] + passed, totals[1] + failed]
    print(f"{totals[0]} passed, {totals[1]} failed")
    sys.exit(totals[1] > 0)


if __name__ == "__main__":
    main()

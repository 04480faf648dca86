"""
Tests of scripts/eval/tasks and scripts/eval/recall.py, with a fake that solves the tasks in place of a trainer
(fake_solver.py), and beside lm-evaluation-harness, where that is installed:

    build/eval/bin/python dev/test/tasks/test_tasks.py      (dev/test/eval/test_eval.py makes this Python)

The last lines say which packages were missing, and how many tests passed.
"""
from task_case import run_tests
from test_keys import TestIds, TestText  # noqa: F401: run here, as those below
from test_lookup import TestLookup  # noqa: F401
from test_recall import TestRecall  # noqa: F401
from test_ruler import TestHarness, TestRuler  # noqa: F401
from test_zero_shot import TestZeroShot  # noqa: F401

if __name__ == "__main__":
    run_tests()

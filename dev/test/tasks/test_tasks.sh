#!/bin/bash
# Tests of scripts/eval/tasks with the Python that is installed; test_tasks.py says what more packages are for.
set -u
cd "$(dirname "$0")/../../.." || exit 1
exec python3 dev/test/tasks/test_tasks.py

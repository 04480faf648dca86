#!/bin/bash
# Tests of scripts/eval with the Python that is installed: its standard library is enough for most of them.
# The rest needs packages, which a line names (test_eval.py says how to install them).
set -u
cd "$(dirname "$0")/../../.." || exit 1
exec python3 dev/test/eval/test_eval.py

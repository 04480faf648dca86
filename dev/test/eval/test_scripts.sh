#!/bin/bash
# Tests of scripts/eval with the Python that is installed: its standard library is enough for most of them. The
# rest, which a line names, needs the packages of scripts/eval/requirements.txt (test_eval.py says how).
set -u
cd "$(dirname "$0")/../../.." || exit 1
exec python3 dev/test/eval/test_eval.py

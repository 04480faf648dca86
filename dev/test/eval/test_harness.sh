#!/bin/bash
# lm-evaluation-harness over --requests gives the numbers of its own model `hf` (test_harness.py), where Python has
# PyTorch, transformers and lm_eval; elsewhere a line says what is missing. HF_PYTHON: such a Python.
set -u
cd "$(dirname "$0")/../../.." || exit 1
exec "${HF_PYTHON:-python3}" dev/test/eval/test_harness.py "$@"

#!/bin/bash
# Checkpoints in Hugging Face's libraries: some of each kind of what the Python tests of this folder check
# (test_transformers.py). All of it, by hand: python dev/test/hf/test_*.py. HF_PYTHON: a Python with PyTorch, transformers
# and lm_eval; without one, a line.
set -u
cd "$(dirname "$0")/../../.." || exit 1
exec "${HF_PYTHON:-python3}" dev/test/hf/test_transformers.py

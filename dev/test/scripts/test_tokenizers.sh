#!/bin/bash
# A model of any tokenizer from text to answers (test_tokenizers.py), where Python has the tokenizers library; elsewhere a
# line says what is missing. HF_PYTHON: such a Python.
set -u
cd "$(dirname "$0")/../../.." || exit 1
exec "${HF_PYTHON:-python3}" dev/test/scripts/test_tokenizers.py "$@"

#!/bin/bash
# Checkpoints in Hugging Face's libraries: some of each kind of what the Python tests of this folder check. All of it, by
# hand: python dev/test/hf/test_*.py. HF_PYTHON: a Python with PyTorch, transformers and lm_eval; without one, a line.
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/transformers
. dev/test/check.sh
rm -rf "$scratch"
mkdir -p "$scratch"
python=$(command -v "${HF_PYTHON:-build/hf/bin/python}" || echo python3)
if ! "$python" -c 'import torch, transformers, lm_eval' 2>/dev/null; then
    skip "not installed: PyTorch, transformers, lm_eval"
    report
fi
# all_pass TEST [WORD]: its last line counts; a model that fails has a line
all_pass() {
    local counts
    "$python" "dev/test/hf/$1.py" "${@:2}" >"$scratch/stdout" 2>"$scratch/stderr"
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$scratch/stdout" | tail -n 1)
    case $counts in
    '' | '0 passed'* | *', '[1-9]*) fail "$*: ${counts:-no summary}: $(grep FAILED "$scratch/stdout" || tail -n 3 "$scratch/stderr")" ;;
    *) passed=$((passed + ${counts%% *})) ;;
    esac
}
for word in fox-pro-rope gated-deltanet-dh128; do all_pass test_hf $word; done
for word in fox-pro-rope stack-packed foreign-llama byte; do all_pass test_hf_trained $word; done
all_pass test_hf_rope
all_pass test_finetune fox-pro-nano
all_pass test_lm_eval
report

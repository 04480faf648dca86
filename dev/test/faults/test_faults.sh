#!/bin/sh
# Some of the faults of `make faults`: evenly spaced calls of each class. They are the same in every run.
if [ "${TEST_ALL:-}" ]; then sample=5; else sample=2; fi
exec python3 dev/test/faults/faults.py --sample $sample

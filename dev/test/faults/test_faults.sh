#!/bin/sh
# Some of the faults of `make faults`: evenly spaced calls of each class. They are the same in every run.
exec python3 dev/test/faults/faults.py --sample 2

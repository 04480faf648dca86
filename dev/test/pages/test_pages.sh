#!/usr/bin/env bash
# The pages: their links lead somewhere, and the README's commands run.
cd "$(dirname "$0")/../../.." || exit 1
scratch=build/test/pages
rm -rf $scratch
mkdir -p $scratch
. dev/test/check.sh
export OMP_NUM_THREADS=1

check "links" python3 dev/test/pages/pages.py
equals "" "$(cat $scratch/stdout)"
report

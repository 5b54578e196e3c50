#!/usr/bin/env bash
# Watches a few small calls with compute-sanitizer: memcheck, then racecheck.  One line each; fails if either finds something.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
status=0
# Calls that a library tries and does without when they fail are none of the kernels' errors.
for tool in "memcheck --report-api-errors no" racecheck; do
    log=$(PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        timeout "${SANITIZE_TIMEOUT:-100}" compute-sanitizer --tool $tool --kernel-name kernel_substring=_kernel --error-exitcode 9 \
        "${PYTHON:-python3}" tools/sanitize_calls.py 2>&1) || status=1
    printf '%s: %s\n' "${tool%% *}" "$(printf '%s\n' "$log" | grep -E 'SUMMARY|Error' | tail -n 1)"
    [ "$status" = 0 ] || printf '%s\n' "$log" | grep '^=====' | head -n 40
done
exit "$status"

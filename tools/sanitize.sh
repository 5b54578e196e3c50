#!/usr/bin/env bash
# Watches a few small calls with compute-sanitizer: memcheck, then racecheck.  Prints what each found, and fails if either
# found something that counts (sanitize_verdict.py says what does).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
status=0
# Calls that a library tries and does without when they fail are none of the kernels' errors.  How many mbarriers a kernel has,
# racecheck takes from what the compiler notes, which may be too few, unless it is told.
for tool in "memcheck --report-api-errors no" "racecheck --num-cuda-barriers 64"; do
    log=$(PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        timeout "${SANITIZE_TIMEOUT:-100}" compute-sanitizer --tool $tool --kernel-name kernel_substring=_kernel --print-limit 0 \
        "$python" tools/sanitize_calls.py 2>&1)
    ended=$?
    printf '%s\n' "$log" | "$python" tools/sanitize_verdict.py "${tool%% *}" "$ended" || status=1
done
exit "$status"

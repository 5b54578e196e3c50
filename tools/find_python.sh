#!/bin/sh
# Prints the path of a Python interpreter that runs and can make virtual environments, or fails.
#   find_python.sh          the first one of at least 3.11; $PYTHON, where set, is the only candidate
#   find_python.sh 3.12     one of exactly this version
# Each candidate is run: a version manager's shim can stand on PATH and fail.
wanted=${1-}
check='
import sys
import ensurepip, venv
have = "%d.%d" % sys.version_info[:2]
wanted = sys.argv[1]
if wanted and have != wanted or sys.version_info < (3, 11):
    sys.exit(1)
print(sys.executable)
'
if [ -n "${PYTHON-}" ]; then
    candidates=$PYTHON
elif [ -n "$wanted" ]; then
    candidates="python$wanted python3 ${PYENV_ROOT:-$HOME/.pyenv}/versions/$wanted.*/bin/python3"
else
    candidates="python3 python python3.14 python3.13 python3.12 python3.11 ${PYENV_ROOT:-$HOME/.pyenv}/versions/3.1[1-9].*/bin/python3"
fi
for candidate in $candidates; do
    if "$candidate" -c "$check" "$wanted" 2>/dev/null; then
        exit 0
    fi
done
echo "no usable Python ${wanted:-(3.11 or newer)} with venv and ensurepip; tried: $candidates" >&2
exit 1

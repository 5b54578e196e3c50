#!/bin/sh
# Makes a virtual environment with this package installed in editable form, or keeps one that is up to date.
#   make_venv.sh DIR CONSTRAINTS EXTRAS        e.g. make_venv.sh .venv constraints/all.txt torch,jax,test
set -eu
cd "$(dirname "$0")/.."
venv=$1 constraints=$2 extras=$3

gpu=no
if nvidia-smi -L >/dev/null 2>&1; then
    gpu=yes
fi
if [ -n "${PYTHON-}" ] || [ ! -x "$venv/bin/python" ]; then
    python=$(sh tools/find_python.sh)
else
    python=$("$venv/bin/python" -c 'import sys; print(sys._base_executable)') || python=$(sh tools/find_python.sh)
fi
# One interpreter has several names: an environment knows the one that it was made by resolved, the search may not.
python=$("$python" -c 'import os, sys; print(os.path.realpath(sys.executable))')
state="$PWD $python $constraints $extras gpu=$gpu $(cat pyproject.toml tools/make_venv.sh constraints/*.txt | cksum)"
if [ -f "$venv/state" ] && [ "$(cat "$venv/state")" = "$state" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
    echo "$venv exists and is no virtual environment; not touching it" >&2
    exit 1
fi
echo "making $venv with $python"
rm -rf "$venv"
"$python" -m venv "$venv"
install() {
    "$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check "$@"
}
install -c "$constraints" --upgrade pip
if [ "$gpu" = yes ]; then
    install -c "$constraints" -c constraints/cuda-plugin.txt -e ".[$extras]" "jax[cuda13]"
else
    install -c "$constraints" -e ".[$extras]"
    install --no-deps -r constraints/cuda-plugin.txt
fi
echo "$state" >"$venv/state"

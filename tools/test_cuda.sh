#!/bin/sh
# Runs pytest in .venv-cuda, which it makes where it is not there. Where PyTorch's CUDA wheel cannot be had, it says so
# and runs nothing.
#
#   tools/test_cuda.sh PYTHON ARGUMENTS
set -eu
python=$1
shift
status=0
make --no-print-directory PYTHON="$python" .venv-cuda/.ready || status=$?
if [ "$status" -ne 0 ]; then
    # make answers 2 whatever the recipe answered: the file says that the wheel is what is missing
    [ -e .venv-cuda/no-wheel ] || exit "$status"
    exit 0
fi
exec .venv-cuda/bin/python -m pytest -q -n 2 "$@"

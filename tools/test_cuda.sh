#!/bin/sh
# Runs the tests of CUDA, quick ones first: the stand-in's own, then lowtide's. ARGUMENTS go to pytest.
#
#   tools/test_cuda.sh PYTHON [ARGUMENTS]
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
exec .venv-cuda/bin/python -m pytest -q -n 2 "$@" cuda_standin/tests tests/cuda

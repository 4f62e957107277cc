#!/bin/sh
# Makes .venv-cuda: PyTorch's CUDA build without a GPU and without any nvidia package, on cuda_standin.
#
#   tools/cuda_environment.sh PYTHON       1.4 GB from the package index; 1.1 GB on disk
#
# Where PyTorch's CUDA wheel cannot be had, .venv-cuda/no-wheel says so and the exit status is 1.
set -eu

. tools/cuda_versions
python=.venv-cuda/bin/python

stop() {
    echo "lowtide: $*" >&2
    exit 1
}
no_wheel() {
    touch .venv-cuda/no-wheel
    stop "test-cuda is skipped: $*"
}
install() {
    STANDIN_CUDA=0 DS_BUILD_OPS=0 "$python" -m pip install -q --disable-pip-version-check --no-deps "$@" 2>.venv-cuda/pip.log ||
        return 1
}

command -v "${CXX:-g++}" >/dev/null || stop "there is no ${CXX:-g++}, and the CUDA stand-in is built with it: install it, or set CXX."
[ -e "$python" ] || "$1" -m venv .venv-cuda
rm -f .venv-cuda/no-wheel
echo "Installing PyTorch $CUDA_TORCH for CUDA and the packages of constraints.txt into .venv-cuda."
install "torch==$CUDA_TORCH" "triton==$CUDA_TRITON" ||
    no_wheel "the CUDA build of torch==$CUDA_TORCH cannot be had: $(tail -n 1 .venv-cuda/pip.log)"
case $("$python" -c 'import re, pathlib, importlib.util as i
print(re.search(r"^cuda.*= (.*)$", pathlib.Path(i.find_spec("torch").origin).with_name("version.py").read_text(), re.M)[1])') in
None) no_wheel "the package index offers no CUDA build of torch==$CUDA_TORCH for this machine." ;;
esac
# Without dependencies: torch would bring 4 GB of nvidia packages. The versions are the ones of .venv.
sed -e '/^#/d' -e '/^torch==/d' -e '/^triton==/d' constraints.txt >.venv-cuda/packages.txt
install -r .venv-cuda/packages.txt || { cat .venv-cuda/pip.log >&2; stop "pip could not install constraints.txt into .venv-cuda."; }
install --no-build-isolation -e . -e cuda_standin || { cat .venv-cuda/pip.log >&2; stop "pip could not install lowtide into .venv-cuda."; }
"$python" -m cuda_standin slim
"$python" -m cuda_standin enable
echo "Building the stand-in for it; half a minute, once."
"$python" -m cuda_standin build

#!/bin/sh
# Checks and fills .venv for the Makefile. What cannot work ends in one sentence that says the way out.
#
#   tools/environment.sh check PYTHON        before anything else: .venv where it is there, else the Python
#   tools/environment.sh create PYTHON       .venv where it is not there
#   tools/environment.sh install ARGUMENTS   pip install, in the versions of constraints.txt
#   tools/environment.sh compiler            what the tests' own accelerator needs
set -u

stop() {
    echo "lowtide: $*" >&2
    exit 1
}

# Read where pip reads them.
least_python=$(sed -n 's/^requires-python = ">=\(.*\)"$/\1/p' pyproject.toml)
least_torch=$(sed -n 's/^ *"torch>=\([0-9.]*\)".*$/\1/p' pyproject.toml)
tested_torch=$(sed -n 's/^torch==\([0-9]*\.[0-9]*\).*$/\1/p' constraints.txt)

# Such as 3.11; fails where the interpreter does not run.
version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# Whether version $1 is $2 or newer.
reaches() {
    [ "${1%%.*}" -gt "${2%%.*}" ] || { [ "${1%%.*}" -eq "${2%%.*}" ] && [ "${1#*.}" -ge "${2#*.}" ]; }
}

check_python() {
    other="name another one, as in make PYTHON=python3.12 demo"
    found=$(version_of "$1") ||
        stop "there is no $1 that runs: install Python $least_python or newer, or $other."
    reaches "$found" "$least_python" ||
        stop "$1 is Python $found, and lowtide needs $least_python or newer: $other."
}

check_environment() {
    again="run make clean, then this command again"
    found=$(version_of .venv/bin/python) ||
        stop "the Python that .venv was made with does not run any more: $again."
    reaches "$found" "$least_python" ||
        stop ".venv has Python $found, and lowtide needs $least_python or newer: $again with PYTHON=python3.12 or newer."
    # The scripts in .venv/bin begin with its path; pip writes a long one into their second line.
    made_as=$(sed -n '1,2s|^[^/]*\(/.*\)/bin/python.*$|\1|p' .venv/bin/pip 2>/dev/null | head -n 1)
    [ -n "$made_as" ] || stop ".venv is incomplete, it has no pip: $again."
    now=$(cd .venv && pwd -P)
    [ "$made_as" = "$now" ] ||
        stop "this folder was moved or copied: .venv was made as $made_as and is now $now: $again."
    # What is out of date is about to be installed again.
    if [ ! -e .venv/.demo ] || [ -n "$(find pyproject.toml constraints.txt -newer .venv/.demo)" ]; then
        return
    fi
    torch=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null) ||
        stop ".venv has no torch any more: $again."
    minor=$(echo "$torch" | sed 's/^\([0-9]*\.[0-9]*\).*$/\1/')
    { reaches "$minor" "$least_torch" && reaches "$tested_torch" "$minor"; } ||
        stop ".venv has torch $torch, and this lowtide goes with $least_torch to $tested_torch: $again."
    runs=$(.venv/bin/python -c 'import os, lowtide; print(os.path.realpath(lowtide.__path__[0]))' 2>/dev/null)
    [ "$runs" = "$(pwd -P)/src/lowtide" ] ||
        stop ".venv runs ${runs:-no lowtide}, not $(pwd -P)/src/lowtide: $again."
}

create() {
    [ ! -e .venv/bin/python ] || return 0
    "$1" -m venv .venv && return
    rm -rf .venv
    stop "$1 cannot make a virtual environment: install what it lacks (on Debian, the package python3-venv)."
}

install() {
    .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "$@" 2>.venv/pip.log && return
    if grep -Eq 'ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|Max retries exceeded' .venv/pip.log; then
        stop "pip cannot reach its package index: check the network and pip config list, then run this command again."
    fi
    cat .venv/pip.log >&2
    stop "pip could not install what is above: free what it asks for, or mend constraints.txt, and run this command again."
}

compiler() {
    command -v "${CXX:-g++}" >/dev/null ||
        stop "there is no ${CXX:-g++}, and the tests of the accelerator need it: install it, set CXX to another compiler," \
            "or run make test, which leaves them out."
}

action=$1
shift
case $action in
check)
    # -L: a link to a Python that is gone does not exist.
    if [ -e .venv/bin/python ] || [ -L .venv/bin/python ]; then check_environment; else check_python "$1"; fi
    ;;
create) create "$1" ;;
install) install "$@" ;;
compiler) compiler ;;
esac

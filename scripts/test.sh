#!/usr/bin/env bash
# Sets up the environment like quickstart.sh does, then runs the tests.
#
#   bash scripts/test.sh                     all tests
#   bash scripts/test.sh tests/test_plan.py  arguments go to pytest; -n 0 keeps to one process
#
# JAXTP_PYTHON and JAXTP_VENV are those of setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
exec "${JAXTP_VENV:-.venv}/bin/python" -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"

#!/usr/bin/env bash
# The main job in one command: sets up the environment, then trains a small Llama on 8 simulated devices.
#
#   bash scripts/quickstart.sh               a few minutes, no GPU and no data needed
#   bash scripts/quickstart.sh --steps 50    arguments go to `jaxtp quickstart`; JAXTP_PYTHON and JAXTP_VENV to setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
exec "${JAXTP_VENV:-.venv}/bin/python" -m jaxtp.cli.commands quickstart "$@"

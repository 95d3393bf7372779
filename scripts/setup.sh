#!/usr/bin/env bash
# Makes or updates the virtual environment of this clone; does nothing when it is up to date.
#
#   bash scripts/setup.sh            make .venv on the newest Python found, 3.11 to 3.14
#   bash scripts/setup.sh --find     only print that Python
#
#   JAXTP_PYTHON   a path, a command or a version such as 3.11: use this Python and no other
#   JAXTP_VENV     the environment's folder, instead of .venv
#   JAXTP_EXTRAS   extras of pyproject.toml to install, instead of "test"
#   JAXTP_SEARCH   folders in which to look for Pythons, separated by ":", instead of the usual places
#
# Exit status: 0 done, 1 the installation failed, 3 no usable Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${JAXTP_VENV:-.venv}"
EXTRAS="${JAXTP_EXTRAS:-test}"
# Complete or not, and from what: the first line is the Python, the rest sums of what was installed.
STAMP="$VENV/.jaxtp-setup"

say() { printf '[setup] %s\n' "$*" >&2; }
fail() { # fail STATUS WHAT FIX
  printf '[setup] error: %s\n  fix: %s\n' "$2" "$3" >&2
  exit "$1"
}

# Folders that may hold Pythons, one a line; what is first wins between equal versions.
places() {
  if [ -n "${JAXTP_SEARCH:-}" ]; then
    printf '%s\n' "$JAXTP_SEARCH" | tr ':' '\n'
    return
  fi
  printf '%s\n' "$PATH" | tr ':' '\n'
  local uv="${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}"
  printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin "$uv"/*/bin \
    /usr/local/bin /usr/bin /opt/homebrew/bin /opt/*/bin
}

# "003.013.000 /path/to/python" when $1 runs and jaxtp can use it, nothing otherwise. A pyenv shim whose version
# is not selected, a Debian python3 without ensurepip, PyPy and free-threaded builds print nothing.
probe() {
  "$1" -c '
import ensurepip, sys, sysconfig, venv
v = sys.version_info
if (
    sys.implementation.name == "cpython"
    and (3, 11) <= v[:2] <= (3, 14)  # 3.15 has no wheels of the pinned dependencies yet
    and v.releaselevel == "final"
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
):
    print("%03d.%03d.%03d" % v[:3], sys.executable)
' </dev/null 2>/dev/null | tail -n 1 || true
}

# Every usable Python as probe prints it, newest first.
pythons() {
  local wanted="${JAXTP_PYTHON:-}" prefix="" dir python
  case "$wanted" in
    [0-9].[0-9] | [0-9].[0-9][0-9]) prefix="$(printf '%03d.%03d.' "${wanted%.*}" "${wanted#*.}")" ;;
    ?*)
      probe "$wanted"
      return
      ;;
  esac
  places | while IFS= read -r dir; do
    for python in "$dir"/python3 "$dir"/python3.1[1-9]; do
      if [ -x "$python" ]; then probe "$python"; fi
    done
  done | sort -s -r -k1,1 | grep "^$prefix" || true
}

find_python() {
  local found
  found="$(pythons)"
  if [ -z "$found" ]; then
    fail 3 "found no Python that jaxtp can use; wanted: ${JAXTP_PYTHON:-3.11 to 3.14}" \
      "install one with its venv module (Debian: apt-get install python3-venv), or set JAXTP_PYTHON=/path/to/python"
  fi
  printf '%s\n' "${found%%$'\n'*}"
}

install() { # install WHAT PIP-ARGUMENTS...
  say "installing $1"
  shift
  "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --no-input "$@" </dev/null ||
    fail 1 "pip install $* failed" "read pip's last lines above; what it made so far is discarded by the next run"
}

main() {
  # What stands: "" no environment that runs, "incomplete" a half-made one, else the Python it was made from. The
  # machine is searched only when that is not settled, so that most runs take no time.
  local current="" python pins wanted jax
  if [ -f "$STAMP" ] && "$VENV/bin/python" -c "" 2>/dev/null; then current="$(head -n 1 "$STAMP")"; fi
  python="$current"
  if [ -z "${current%incomplete}" ] || [ -n "${JAXTP_PYTHON:-}" ]; then python="$(find_python)"; fi

  case "$python" in 003.011.*) pins=constraints-oldest.txt ;; *) pins=constraints-newest.txt ;; esac
  wanted="$(printf '%s\n' "$python" "$EXTRAS" && cksum "$pins" pyproject.toml)"
  if [ "$current" = "$python" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then return; fi
  if [ -e "$VENV" ] && [ ! -f "$STAMP" ]; then
    fail 1 "$VENV exists and was not made by this script" "move it away, or set JAXTP_VENV to another folder"
  fi

  if [ "$current" != "$python" ]; then
    say "making $VENV on ${python#* }"
    rm -rf "$VENV" && mkdir -p "$VENV" && echo incomplete >"$STAMP"
    "${python#* }" -m venv "$VENV" ||
      fail 1 "${python#* } could not make an environment" "set JAXTP_PYTHON to another Python 3.11 to 3.14"
  fi
  echo incomplete >"$STAMP"
  install "the dependencies of $pins (some minutes the first time)" -c "$pins" -e ".[$EXTRAS]"
  if [ "$(uname -s)" = Linux ]; then
    # The real GPU compiler without the CUDA libraries that its wheels would pull in: no GPU is needed to compile.
    jax="$(sed -n 's/^jax==//p' "$pins")"
    install "the GPU compiler of jax $jax" --no-deps "jax-cuda12-plugin==$jax" "jax-cuda12-pjrt==$jax"
  fi
  printf '%s\n' "$wanted" >"$STAMP"
  say "$VENV is ready"
}

if [ "${1:-}" = --find ]; then find_python; else main; fi

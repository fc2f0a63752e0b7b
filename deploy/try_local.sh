#!/bin/sh
# Run what the container runs where there is no container engine; deploy/try_local.py says what that is and is not.
#
#   sudo sh deploy/try_local.sh [--work FOLDER] [--torch "torch==..."] [--manifest FILE]
set -eu
exec unshare --mount --pid --fork --kill-child --mount-proc -- "${PYTHON:-python3}" "$(dirname "$0")/try_local.py" "$@"

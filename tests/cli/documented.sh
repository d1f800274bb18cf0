#!/bin/sh
# Every command of the README and the guide runs as it is written, in a folder that holds what its
# page speaks of and nothing else. One that takes longer than a few seconds is interrupted, and has
# to have got so far without a complaint.
set -eu
. "$2/tests/cli/support/expect.sh"
command -v python3 >/dev/null 2>&1 || { echo "skipped: needs python3"; exit 77; }
python3 "$source/tests/cli/support/documented.py" "$mneme" "$source" "$work"

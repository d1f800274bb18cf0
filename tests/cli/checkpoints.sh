#!/bin/sh
# Model folders of other software give the logits of the software that defines them, read whole and
# token by token. MNEME_CHECKPOINTS names the folder that holds them; without it there is nothing to
# compare with. Arguments after the first three choose folders by name.
set -eu
. "$2/tests/cli/support/expect.sh"
shift $(($# > 3 ? 3 : $#))
folders=${MNEME_CHECKPOINTS:-$source/../shared/checkpoints}
if [ ! -d "$folders" ]; then
    echo "skipped: no folder of checkpoints; set MNEME_CHECKPOINTS to it"
    exit 0
fi
if ! command -v python3 >/dev/null 2>&1; then
    echo "skipped: comparing needs python3"
    exit 0
fi
# what agrees today and has to stay so; with names: those
[ $# -gt 0 ] || set -- $(grep -v '^#' "$source/tests/cli/support/checkpoints.txt")
python3 "$source/tests/cli/support/checkpoints.py" "$mneme" "$folders" "$work" "$@"

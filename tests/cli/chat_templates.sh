#!/bin/sh
# Chat templates of other software give its prompts, text and ids. MNEME_CHECKPOINTS names the folder
# of checkpoints; without it there is nothing to compare with.
set -eu
. "$2/tests/cli/support/expect.sh"
folders=${MNEME_CHECKPOINTS:-$source/../shared/checkpoints}/chat-templates
if [ ! -d "$folders" ]; then
    echo "skipped: no folder of chat templates; set MNEME_CHECKPOINTS to the folder of checkpoints"
    exit 77
fi
if ! command -v python3 >/dev/null 2>&1; then
    echo "skipped: comparing needs python3"
    exit 77
fi
python3 "$source/tests/cli/support/chat_templates.py" "$mneme" "$folders"

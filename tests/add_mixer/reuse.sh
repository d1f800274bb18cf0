#!/bin/sh
# A compiler launcher for a copy of the project: takes an object from a build of the original where nothing
# that the object was made of differs, and compiles it where something does.
#   REUSE_BUILD, REUSE_SOURCE   the original's build folder and sources
#   REUSE_COPY, REUSE_CHANGED   the copy's sources; a file with the ends of paths of what differs there, a line each
#   REUSE_LAUNCHER              what else stands before a compiler, or nothing
#   reuse.sh COMPILER ARGUMENTS...      in the copy's build folder
set -eu
object=
previous=
for argument; do
    [ "$previous" != -o ] || object=$argument
    previous=$argument
done

# The same options (but for the places), and no dependency that differs.
same() {
    case $object in *.o) ;; *) return 1 ;; esac
    [ -f "$REUSE_BUILD/$object" ] && [ -f "$REUSE_BUILD/$object.d" ] || return 1
    ! grep -q -F -f "$REUSE_CHANGED" "$REUSE_BUILD/$object.d" || return 1
    target=${object#CMakeFiles/}
    flags=CMakeFiles/${target%%/*}/flags.make
    [ -f "$REUSE_BUILD/$flags" ] || return 1
    here=$(options "$flags" | sed "s|$PWD|$REUSE_BUILD|g; s|$REUSE_COPY|$REUSE_SOURCE|g")
    [ "$here" = "$(options "$REUSE_BUILD/$flags")" ]
}
options() {
    grep -F -e 'C_DEFINES =' -e 'C_INCLUDES =' -e 'C_FLAGS =' -e "$object"_ "$1"
}

if same; then
    mkdir -p "$(dirname "$object")"
    cp "$REUSE_BUILD/$object" "$object"    # a link would be older than its sources here, and made for each target again
    cp "$REUSE_BUILD/$object.d" "$object.d"
    exit 0
fi
# shellcheck disable=SC2086
exec ${REUSE_LAUNCHER-} "$@"

#!/bin/sh
# Gives a copy of the project the objects of a build of the original, where nothing that an object was made of
# differs in a way that reaches it; what is left, make compiles.
#   reuse.sh SOURCE BUILD COPY COPY_BUILD CHANGED TARGETS...
#   CHANGED   a file with the ends of paths of what differs, a line each
#   TARGETS   those that are wanted, by their names in build/CMakeFiles without .dir; the shell's patterns
set -eu
source=$1 build=$2 copy=$3 copy_build=$4 changed=$5
shift 5
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
there() {
    sed "s|$copy_build|$build|g; s|$copy|$source|g" "$1"
}

# Targets that have the same options, but for the places and for files of the copy alone.
cd "$build"
for target; do
    for flags in CMakeFiles/$target.dir/flags.make; do
        [ -f "$copy_build/$flags" ] || continue
        there "$copy_build/$flags" >"$work/flags"
        grep -q -v -x -F -f "$work/flags" "$flags" || echo "${flags%/flags.make}"
    done
done >"$work/targets"
# shellcheck disable=SC2046
find $(cat "$work/targets") -name '*.o.d' -exec grep -L -F -f "$changed" {} + >"$work/same"
# shellcheck disable=SC2046
find $(cat "$work/targets") -name '*.o.d' -exec grep -l -F -f "$changed" {} + >"$work/reached"

# What the preprocessor makes of a source, in both places. A kind more moves the numbers of those after it: to a
# source that names no kind, and so no number, their list is nothing.
left() {
    sh -c "$1" 2>"$work/errors" | awk '/^typedef enum mn_layer_kind/ { skip = 1 } !skip && NF { print } /} mn_layer_kind;/ { skip = 0 }'
}
awk -v tab='	' 'FNR == NR { sub(/\.d$/, ""); reached[$0]; next }
    /^  "command": / && match($0, / -o [^ ]* -c /) {
        object = substr($0, RSTART + 4, RLENGTH - 8)
        if (!(object in reached)) next
        sub(/ -o [^ ]* -c /, " -E -P "); sub(/^  "command": "/, ""); sub(/",$/, ""); gsub(/\\"/, "\""); gsub(/\\\\/, "\\")
        print object tab $0
    }' "$work/reached" compile_commands.json >"$work/commands"
while IFS='	' read -r object command; do
    left "cd '$build' && $command" >"$work/a"
    ! grep -q -E 'MN_LAYER_([a-z]|COUNT)' "$work/a" || continue
    left "cd '$copy_build' && $(printf '%s' "$command" | sed "s|$build|$copy_build|g; s|$source|$copy|g")" >"$work/b"
    if [ -s "$work/b" ] && [ ! -s "$work/errors" ] && there "$work/b" | cmp -s - "$work/a"; then echo "$object.d"; fi
done <"$work/commands" >>"$work/same"

# Objects get the time of now, so they are younger than the copy's sources; precompiled headers come first.
find $(cat "$work/targets") -name '*.gch' >"$work/precompiled"
[ ! -s "$work/precompiled" ] || tar -cf - -T "$work/precompiled" | tar -C "$copy_build" -xmf -
sed 'p; s/\.d$//' "$work/same" | tar -cf - -T - | tar -C "$copy_build" -xmf -
echo "add_mixer: $(wc -l <"$work/same") objects are those of $build"

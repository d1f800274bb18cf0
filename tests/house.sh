#!/bin/sh
# The checks of the house: at most 32 files in a folder of src, no word of the old private language, the field's
# words where an engineer looks for them, operators told apart by columns of their rows instead of by name,
# and comments that name files which are there.
#   house.sh SOURCE_DIR
set -eu
cd "$1"
git rev-parse --git-dir >/dev/null 2>&1 || { echo "no git checkout: skipped"; exit 77; }
bad=0
complain() {
    echo "house: $*" >&2
    bad=1
}
full=$(git ls-files src | xargs -n1 dirname | sort | uniq -c | awk '$1 > 32')
[ -z "$full" ] || complain "more than 32 files in a folder: $full"

private=$(git grep -nE 'mn_few_|MN_FEW_|_walk|purse|unsaid|mn_apart|_there\(' -- src | wc -l)
[ "$private" = 0 ] || complain "$private lines with words of the private language; docs/internals/glossary.md has the field's"

for term in TMA PDL mbarrier producer epilogue 'UT transform'; do
    git grep -qiw "$term" -- src/kernels/cuda || complain "no kernel says '$term'"
done

# Files that comments and documents name are there (docs/log tells of files that were).
names=$(git ls-files | sed 's|.*/||' | sort -u)
for file in $(git grep -hoE '\b[a-z0-9_]+\.(cuh?|def)\b' -- src docs ':!docs/log' | sort -u); do
    echo "$names" | grep -qxF "$file" || complain "no file $file, which $(git grep -lwF "$file" -- src docs | head -1) names"
done

named=$(git grep -n 'op == MN_OP_' -- src | wc -l)
[ "$named" -le 5 ] || complain "$named places tell operators apart by name (op == MN_OP_x); 5 are the most, a column of ops.def serves"
[ "$bad" = 0 ] && echo "house: in order"
exit "$bad"

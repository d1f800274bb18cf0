#!/bin/sh
# The documents hold together: every page is reachable from docs/README.md, no page over 400 lines, no line over 600 characters, links
# lead somewhere, rows of a table have as many cells as its header, tables taken from the program are current.
#   docs.sh SOURCE_DIR [MNEME]
set -eu
cd "$1"
git rev-parse --git-dir >/dev/null 2>&1 || { echo "no git checkout: skipped"; exit 77; }
mneme=${2-}
bad=0
complain() {
    echo "docs: $*" >&2
    bad=1
}

links() {    # the files that a page links to, from the root
    folder=$(dirname "$1")
    grep -oE '\]\([^)# ]+' "$1" | sed 's/^](//' | grep -vE '^(https?:|mailto:)' | while read -r target; do
        realpath -m --relative-to=. "$folder/$target"
    done
}

pages=$(git ls-files -co --exclude-standard 'docs/*.md' README.md CONTRIBUTING.md)
for page in $pages; do
    lines=$(wc -l <"$page")
    [ "$lines" -le 400 ] || complain "$page has $lines lines, 400 are the most"
    wide=$(awk 'length > 600 { printf " %d", FNR }' "$page")
    [ -z "$wide" ] || complain "$page has lines of more than 600 characters:$wide"
    for target in $(links "$page"); do
        [ -e "$target" ] || complain "$page links to $target, which is not there"
    done
done

reached=docs/README.md
fresh=$reached
while [ -n "$fresh" ]; do
    next=
    for page in $fresh; do
        for target in $(links "$page"); do
            case $target in *.md) ;; *) continue ;; esac
            case " $(echo $reached) " in *" $target "*) continue ;; esac
            [ -e "$target" ] || continue
            reached="$reached $target"
            next="$next $target"
        done
    done
    fresh=$next
done
for page in $(git ls-files -co --exclude-standard 'docs/*.md'); do
    case " $(echo $reached) " in *" $page "*) ;; *) complain "$page cannot be reached from docs/README.md" ;; esac
done

# Cells by bars that are neither escaped nor inside of code.
for page in $pages; do
    awk -v page="$page" '
        function cells(row,    n, i, c, code) {
            n = 0; code = 0
            for (i = 1; i <= length(row); i++) {
                c = substr(row, i, 1)
                if (c == "\\") { i++; continue }
                if (c == "`") code = !code
                if (c == "|" && !code) n++
            }
            return n
        }
        /^```/ { fenced = !fenced }
        fenced { next }
        /^\|/ {
            if (!inside) { inside = 1; width = cells($0) }
            else if (cells($0) != width) { printf "docs: %s:%d: %d cells, the header has %d\n", page, FNR, cells($0) - 1, width - 1; bad = 1 }
            next
        }
        { inside = 0 }
        END { exit bad }' "$page" >&2 || bad=1
done

if [ -n "$mneme" ]; then
    CHECK=1 sh tools/tables.sh "$mneme" docs README.md || bad=1
fi
if command -v python3 >/dev/null 2>&1; then
    python3 tools/performance.py --check docs/internals/performance.md || bad=1
fi
[ "$bad" = 0 ] && echo "docs: $(echo "$pages" | wc -w) pages in order"
exit "$bad"

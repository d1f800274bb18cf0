#!/bin/sh
# sass_digest.sh OLD NEW - is the machine code of two builds the same, whatever its functions are called?
#
# OLD and NEW are object files, libraries, programs or folders of object files. Of each the code of every
# GPU kernel (cuobjdump -sass) or, with --host, of every C function (objdump -d) is taken with names,
# addresses and file names stripped, and hashed; the two lists are compared. Compilers lay out the
# subroutines of a kernel in the order of their names, which moves registers and addresses: kernels whose
# arithmetic and memory instructions are as many of each kind count as the same in kind, and are told apart.
# Exit status: 0 the same or the same in kind, 1 not the same (listed), 2 used wrongly.
#   sass_digest.sh [--host] OLD NEW
#   sass_digest.sh [--host] --list PLACE >NAME.digest      such a list may stand for OLD or NEW later
set -eu
kind=sass
if [ "${1:-}" = --host ]; then kind=host; shift; fi
[ $# = 2 ] || { sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 2; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# One line per function: hash, hash of the kinds (of what is neither a move, an address nor control), number
# of instructions, name.
hashes='
import hashlib, re, sys
kind, name, code, rows = sys.argv[1], None, [], []
def digest(lines):
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:20]
kinds = re.compile(r"(F|D|H|MUFU|[A-Z]*MMA|MOVM|LDG|STG|LDS|STS|LDSM|RED|ATOM|UTMA|UBLK|SYNCS|BAR|WARPGROUP|SHFL)")
def close():
    if name and code:
        ops = sorted(o for o in (re.sub(r"^@\S+ ", "", c).split()[0] for c in code) if kinds.match(o))
        rows.append("%s %s %6d %s" % (digest(code), digest(ops if kind == "sass" else code), len(code), name))
for line in sys.stdin:
    line = line.rstrip()
    if kind == "sass":
        k = re.match(r"\s*Function : (\S+)", line)
        if k:
            close(); name, code = k.group(1), []
        elif re.match(r"\s*(arch =|code for)", line):
            close(); name, code = None, []
        else:
            k = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);?\s*(/\*.*)?$", line)
            # names in an operand (calls, addresses of functions and of constants)
            if k: code.append(re.sub(r"`?\(?[.$]?[A-Za-z_.$]*_Z\w+\)?", "NAME", k.group(1)))
    else:
        k = re.match(r"[0-9a-f]+ <(.+)>:$", line)
        if k:
            close(); name, code = k.group(1), []
        else:
            k = re.match(r"\s*[0-9a-f]+:\s+(\S.*)$", line)
            if k and "R_X86_64" not in line:
                code.append(re.sub(r"<[^>]*>|#.*$|\b(call|j\w+)\s+[0-9a-f]+", r"\1", k.group(1)).strip())
close()
sys.stdout.write("\n".join(sorted(rows)) + "\n" if rows else "")
'
list() {
    case $1 in *.digest) cat "$1"; return ;; esac
    if [ -d "$1" ]; then find "$1" -name '*.o' | sort; else echo "$1"; fi | while read -r object; do
        if [ $kind = sass ]; then cuobjdump -sass "$object"; else objdump -d --no-show-raw-insn "$object"; fi
    done | python3 -c "$hashes" $kind
}
if [ "$1" = --list ]; then list "$2"; exit; fi
for side in old new; do
    if [ $side = old ]; then place=$1; else place=$2; fi
    list "$place" >"$scratch/$side"
    cut -d' ' -f1 "$scratch/$side" | sort >"$scratch/$side.hash"
    [ -s "$scratch/$side" ] || { echo "no machine code in $place"; exit 2; }
done
if cmp -s "$scratch/old.hash" "$scratch/new.hash"; then
    echo "$(wc -l <"$scratch/new.hash") functions, all with the same machine code"
    exit 0
fi
# What differs, by the kinds of its instructions.
for side in old new; do
    comm -3 "$scratch/old.hash" "$scratch/new.hash" | tr -d '\t' | sort -u >"$scratch/differ"
    grep -F -f "$scratch/differ" "$scratch/$side" >"$scratch/$side.differ" || true
    cut -d' ' -f2 "$scratch/$side.differ" | sort >"$scratch/$side.kinds"
done
if cmp -s "$scratch/old.kinds" "$scratch/new.kinds"; then
    echo "$(wc -l <"$scratch/new.hash") functions: $(wc -l <"$scratch/new.kinds") the same in kind, all others the same machine code"
    exit 0
fi
comm -3 "$scratch/old.kinds" "$scratch/new.kinds" | tr -d '\t' | sort -u >"$scratch/differ"
echo "only in $1:"; grep -F -f "$scratch/differ" "$scratch/old.differ" || true
echo "only in $2:"; grep -F -f "$scratch/differ" "$scratch/new.differ" || true
exit 1

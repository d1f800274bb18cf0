# expect.sh - sourced by the scripts next to this folder; $1 is the program, $2 the source folder.
mneme=$1
source=$2
. "$source/tests/support/temporary.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
    printf 'FAIL: %s\n' "$*" >&2
    printf -- '--- standard output\n%s\n' "$(head -c 2000 "$work/out")" >&2
    printf -- '--- standard error\n%s\n' "$(head -c 2000 "$work/err")" >&2
    exit 1
}

# run STATUS ARGUMENT...: the program ends with that exit status
run() {
    expected=$1
    shift
    command="mneme $*"
    status=0
    "$mneme" "$@" >"$work/out" 2>"$work/err" || status=$?
    [ "$status" = "$expected" ] || fail "$command: exit status $status, expected $expected"
}

# says PATTERN, complains PATTERN: a line of the last run's output, or of its errors
says() { grep -q -e "$1" "$work/out" || fail "$command: no line like \"$1\""; }
complains() { grep -q -e "$1" "$work/err" || fail "$command: no complaint like \"$1\""; }
quiet() { [ ! -s "$work/err" ] || fail "$command: complains"; }

# the last run's output is one JSON document in which the Python expression about `d` holds
json() {
    command -v python3 >/dev/null 2>&1 || return 0
    python3 -c 'import json, sys
d = json.load(open(sys.argv[1]))
assert eval(sys.argv[2]), sys.argv[2]' "$work/out" "$1" 2>"$work/err" || fail "$command: not $1"
}

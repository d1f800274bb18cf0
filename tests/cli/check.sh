#!/bin/sh
# mneme check: passes golden files, fails what is wrong and names it, never crashes on any of it.
set -eu
. "$2/tests/cli/support/expect.sh"
golden=$source/tests/golden
good=$golden/additive_scalar.safetensors

run 0 check "$good"
quiet
says '^ok   ref f64 additive_scalar.safetensors o: rms '
says ' dq: rms '
[ "$(tail -1 "$work/out" | cut -d, -f2)" = " 0 failed" ] || fail "closing line"
[ "$(grep -c '^ok ' "$work/out")" = "$(tail -1 "$work/out" | cut -d' ' -f1)" ] || fail "count"
run 0 check --quiet --target ref --dtype f32 --threads 3 "$good" "$golden/rope_half.safetensors"
[ "$(wc -l <"$work/out")" = 1 ] || fail "--quiet is not"

# what layers make of several operators, which no operator is called; wrong numbers are seen there too
run 0 check --quiet "$golden"/programs/*.safetensors
says "^[0-9]* passed, 0 failed"
sed 's/"window":"5"/"window":"6"/' "$golden/programs/window_attention.safetensors" >"$work/window.safetensors"
run 1 check --target ref "$work/window.safetensors"
says '^FAIL ref f64 window.safetensors o:'

# one changed number, and a tolerance nobody can meet
size=$(wc -c <"$good")
cp "$good" "$work/changed.safetensors"
printf '\377\377\377\377\377\377\357\177' |
    dd of="$work/changed.safetensors" bs=1 seek=$((size - 64)) conv=notrunc 2>/dev/null
run 1 check --target ref "$work/changed.safetensors"
says '^FAIL ref f64 .*changed.safetensors'
sed 's/"tol64.o":"[^"]*"/"tol64.o":"1e-99"/' "$good" >"$work/strict.safetensors"
if cmp -s "$good" "$work/strict.safetensors"; then fail "no tolerance found to change"; fi
run 1 check --target ref "$work/strict.safetensors"
says 'FAIL .*strict.safetensors'

# cut at every kind of place
for keep in 0 4 8 100 $((size / 2)) $((size - 1)); do
    head -c "$keep" "$good" >"$work/cut.safetensors"
    run 1 check --target ref "$work/cut.safetensors"
    says "FAIL .*cut.safetensors: ."
done

# headers that lie
printf '\377\377\377\377\377\377\377\177{}' >"$work/long.safetensors"
printf '\002\000\000\000\000\000\000\000{}' >"$work/empty.safetensors"
printf '\010\000\000\000\000\000\000\000not json' >"$work/text.safetensors"
for name in long empty text; do
    run 1 check --target ref "$work/$name.safetensors"
    says "FAIL .*$name.safetensors: ."
done
sed 's/"op":"additive"/"op":"subtract"/' "$good" >"$work/other.safetensors"
if cmp -s "$good" "$work/other.safetensors"; then fail "no op found to change"; fi
run 1 check --target ref "$work/other.safetensors"
says 'FAIL .*other.safetensors'

run 1 check --target ref "$work/absent.safetensors"
says 'FAIL .*absent.safetensors: '
run 1 check --target ref "$work"
says 'FAIL '
# a good file next to a bad one still counts
run 1 check --quiet --target ref "$good" "$work/empty.safetensors"
says '^[1-9][0-9]* passed, 1 failed$'

run 2 check
complains 'golden file'
run 2 check --target abacus "$good"
complains 'abacus'
run 2 check --dtype f8 "$good"
complains 'f8'
run 2 check --threads none "$good"
complains 'threads'
run 2 check --target
complains 'target'

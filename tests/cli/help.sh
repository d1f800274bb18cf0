#!/bin/sh
# Every verb explains itself; what is no verb is refused by name.
set -eu
. "$2/tests/cli/support/expect.sh"

run 0 --help
quiet
says '^usage: mneme VERB'
verbs=$(awk '/^  [a-z]/ { print $1 }' "$work/out")
[ "$(echo "$verbs" | wc -l)" -ge 4 ] || fail "too few verbs: $verbs"
[ "$(echo "$verbs" | sort | uniq -d)" = "" ] || fail "verbs listed twice"
for verb in $verbs; do
    run 0 "$verb" --help
    quiet
    says "^usage: mneme $verb"
    says '[a-z]\{3,\} .*[a-z]'
    run 2 "$verb" --no-such-option
    complains 'no-such-option'
done

run 2
complains 'usage: mneme VERB'
run 2 frobnicate
complains 'frobnicate'
run 0 --version
quiet
version=$(sed -n 's/^#define MN_VERSION "\(.*\)"/\1/p' "$source/include/mneme.h")
says "^mneme $version\$"

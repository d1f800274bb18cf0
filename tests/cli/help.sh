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

# help VERB is VERB --help; every option of a table is in the help, and every option in the help is read
for verb in $verbs; do
    run 0 "$verb" --help
    cp "$work/out" "$work/said"
    [ "$verb" != tokenizer ] || for sub in train encode decode info; do
        run 0 tokenizer $sub --help
        cat "$work/out" >>"$work/said"
    done
    if [ "$verb" != tokenizer ]; then
        run 0 help "$verb"
        cmp -s "$work/out" "$work/said" || fail "help $verb differs from $verb --help"
    fi
    awk -v verb="$verb" 'length($0) > 100 { print verb ": " $0; bad = 1 } END { exit bad }' "$work/said" ||
        fail "a line of help is wider than 100 columns"
    run 0 help --options "$verb"
    cut -f 1 "$work/out" | sort -u >"$work/table"
    for option in $(cat "$work/table"); do
        grep -q -e "^  .*$option\\([ ,]\\|\$\\)" "$work/said" || fail "$verb --help does not name $option"
    done
    sed -n 's/^  \(-[a-z-]*\), \(--[a-z-]*\).*/\1 \2/p; s/^  \(--[a-z-]*\).*/\1/p; s/^  \(-[a-z]\) .*/\1/p' "$work/said" |
        tr ' ' '\n' | sort -u >"$work/named"
    for option in $(cat "$work/named"); do
        [ "$option" = --help ] || grep -q -x -e "$option" "$work/table" || fail "$verb does not read $option"
    done
done
run 2 help trian
complains 'did you mean "train"'
run 2 trian
complains 'did you mean "train"'
run 2 tokenizer encod x
complains 'did you mean "encode"'
run 1 help tokenizer trian
complains 'did you mean "train"'
! grep -q failed "$work/err" || fail "$command: a mistake is called a failure"
run 1 task mqra
complains 'did you mean "mqar"?; mneme task lists them'
run 1 reproduce mqar-updat
complains 'did you mean "mqar-update"?; mneme reproduce --list'
run 2 train --stepz=5
complains 'stepz is no option, did you mean --steps'
run 2 train --quiet=yes
complains 'takes no value'

# manual pages and completion
run 0 help --man
says '^.TH MNEME 1'
for verb in $verbs; do
    run 0 help --man "$verb"
    says '^.SH SYNOPSIS'
    ! grep -A 1 '^.SH EXAMPLES' "$work/out" | grep -q '^[A-Za-z]' || fail "mneme-$verb(1): text under EXAMPLES"
    if command -v man >/dev/null 2>&1; then
        MANWIDTH=80 man -l --warnings "$work/out" >"$work/page" 2>"$work/err" || fail "no manual page"
        quiet
    fi
done
run 0 help --completion bash
if command -v bash >/dev/null 2>&1; then
    cp "$work/out" "$work/mneme.bash"
    bash -c '. "$1"; COMP_WORDS=(mneme train --st) COMP_CWORD=2; _mneme; echo "${COMPREPLY[@]}"
        COMP_WORDS=(mneme tok) COMP_CWORD=1; _mneme; echo "${COMPREPLY[@]}"' - "$work/mneme.bash" >"$work/out"
    says '^--steps$'
    says '^tokenizer$'
fi
run 0 help --completion zsh
! command -v zsh >/dev/null 2>&1 || zsh -n "$work/out" || fail "zsh does not read its completion"
run 0 help --completion fish
! command -v fish >/dev/null 2>&1 || fish -n "$work/out" || fail "fish does not read its completion"
run 1 help --completion csh
complains 'none of bash'
run 2 frobnicate
complains 'frobnicate'
run 0 --version
quiet
version=$(sed -n 's/^#define MN_VERSION "\(.*\)"/\1/p' "$source/include/mneme.h")
says "^mneme $version\$"

#!/bin/sh
# The packages of a build: what they hold, the tarball from a folder of its own, and both in fresh roots
# of Debian 12 and Debian 13, where those can be made (root rights, debootstrap, a mirror): mneme train runs
# there. Debian 13 has the library names of 64-bit time that Ubuntu 24.04 has. MNEME_ROOTS names roots that
# are there already, of Ubuntu too (the libraries the .deb depends on installed).
#   sh package.sh SOURCE_DIR BUILD_DIR
set -eu
source=$1
build=$2
[ "$(uname)" = Linux ] || { echo "no Linux: skipped"; exit 77; }
command -v dpkg-deb >/dev/null 2>&1 || { echo "no dpkg-deb: skipped"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    echo "package: $*" >&2
    exit 1
}

MNEME_PACKAGE_LEVEL=1 sh "$source/tools/package.sh" "$build" "$work/out" >"$work/log" || fail "no packages"
deb=$(ls "$work/out"/mneme_*.deb)
tarball=$(ls "$work/out"/mneme-*.tar.gz)
dpkg-deb --contents "$deb" >"$work/contents"
for file in usr/bin/mneme 'usr/lib/libmneme\.so' 'usr/lib/libmneme\.a' usr/include/mneme.h 'man1/mneme-train\.1\.gz' \
    bash-completion/completions/mneme site-functions/_mneme 'vendor_completions.d/mneme\.fish' pkgconfig/mneme.pc; do
    grep -q "$file" "$work/contents" || fail "the .deb has no $file"
done
dpkg-deb --field "$deb" Depends | grep -q libc6 || fail "the .deb depends on nothing"

# What the packages ask of a system is there in Debian 12, and so in Ubuntu 24.04, whose versions are all
# younger (glibc 2.39, jansson 2.14, PCRE2 10.42, libmicrohttpd 1.0.1, libedit 20230828). Made on a system
# younger than Debian 12 they may ask for its own.
least() {
    case $1 in
    libc6) echo 2.36 ;;
    libjansson4) echo 2.14 ;;
    libpcre2-8-0) echo 10.42 ;;
    libmicrohttpd12 | libmicrohttpd12t64) echo 0.9.75 ;;
    libedit2) echo 3.1-20221030 ;;
    *) fail "the .deb depends on $1, of which this test knows no version in Debian 12 and Ubuntu 24.04" ;;
    esac
}
newest_glibc() { objdump -T "$1" | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort -V | tail -n 1; }
own=$(getconf GNU_LIBC_VERSION 2>/dev/null | sed 's/.* //')
if [ -n "$own" ] && dpkg --compare-versions "$own" le 2.36; then
    dpkg-deb --field "$deb" Depends | tr ',|' '\n\n' | sed 's/^ *//; s/[()]//g; s/ *$//' >"$work/depends"
    while read -r name relation version; do
        have=$(least "$name")
        [ -z "$relation" ] || dpkg --compare-versions "$have" ge "$version" ||
            fail "the .deb needs $name $relation $version, Debian 12 has $have"
    done <"$work/depends"
    mkdir "$work/bound"
    tar -C "$work/bound" -xzf "$tarball"
    find "$work/bound" -type f \( -name 'lib*.so*' -o -path '*/bin/mneme' \) >"$work/binaries"
    [ "$(wc -l <"$work/binaries")" -ge 5 ] || fail "the tarball holds too few libraries"
    while read -r binary; do
        needs=$(newest_glibc "$binary")
        { [ -n "$needs" ] && dpkg --compare-versions "$needs" le 2.36; } ||
            fail "${binary##*/} needs glibc ${needs:-of no version}, Debian 12 has 2.36"
        echo "$needs" >>"$work/needs"
    done <"$work/binaries"
    echo "packages need glibc $(sort -V "$work/needs" | tail -n 1), Debian 12 has 2.36, Ubuntu 24.04 2.39"
fi

i=0
while [ $i -lt 200 ]; do
    echo "line $i says a thing, and another thing $((i * 7 % 13))."
    i=$((i + 1))
done >"$work/text.txt"

# unpacked anywhere, with no library of the system but its own
mkdir "$work/somewhere"
tar -C "$work/somewhere" -xzf "$tarball"
program=$(ls "$work"/somewhere/*/bin/mneme)
ldd "$program" | grep -q "$work/somewhere/.*/lib.*/mneme/libjansson" || fail "the tarball does not use its own libraries"
! ldd "$program" | grep -q 'not found' || fail "the tarball lacks a library"
(cd "$work" && "$program" train text.txt --steps 2 --threads 1 --quiet --out run >"$work/trained") || fail "the tarball does not train"
grep -q 'best on held-out data' "$work/trained" || fail "the tarball's training says nothing"

# in a root: the tarball first, which needs nothing of it, then the .deb
in_root() {
    root=$1
    mkdir -p "$root/tmp/tarball"
    cp "$deb" "$work/text.txt" "$root/tmp/"
    tar -C "$root/tmp/tarball" -xzf "$tarball"
    chroot "$root" sh -c 'cd /tmp && rm -rf runs && tarball/*/bin/mneme train text.txt --steps 2 --threads 1 --quiet' \
        >"$work/trained" || fail "the tarball does not train in $2"
    grep -q 'best on held-out data' "$work/trained" || fail "the tarball's training in $2 says nothing"
    rm -rf "$root/tmp/tarball"
    chroot "$root" dpkg --install "/tmp/${deb##*/}" >"$work/dpkg.log" 2>&1 || fail "$2: $(tail -n 3 "$work/dpkg.log")"
    chroot "$root" sh -c 'cd /tmp && rm -rf runs && mneme train text.txt --steps 2 --threads 1 --quiet' >"$work/trained" ||
        fail "mneme train fails in $2"
    grep -q 'best on held-out data' "$work/trained" || fail "training in $2 says nothing"
    chroot "$root" sh -c 'cd /tmp && mneme generate --model runs/text line --tokens 4 --quiet' >/dev/null ||
        fail "generate fails in $2"
    chroot "$root" dpkg --purge mneme >/dev/null 2>&1 || fail "the .deb cannot be removed from $2"
    echo "packages at work in $2"
}

if [ -n "${MNEME_ROOTS-}" ]; then
    for root in $MNEME_ROOTS; do in_root "$root" "$root"; done
    exit 0
fi
[ "$(id -u)" = 0 ] || { echo "packages in order; no root rights for a fresh root: that part is skipped"; exit 0; }
command -v debootstrap >/dev/null 2>&1 || { echo "packages in order; no debootstrap: a fresh root is skipped"; exit 0; }
# Of a dependency with alternatives the first is the name in Debian 12, the last that in Debian 13.
names() {
    dpkg-deb --field "$deb" Depends | tr ',' '\n' | sed "$1; s/^ *\([a-z0-9.+-]*\).*/\1/" | sort -u | paste -s -d ,
}
for suite in bookworm trixie; do    # both at once: they wait for a mirror
    depends=$(names 's/|.*//')
    [ $suite = bookworm ] || depends=$(names 's/.*|//')
    (timeout 900 debootstrap --variant=minbase --include="$depends" $suite "$work/$suite" >"$work/$suite.log" 2>&1 &&
        touch "$work/$suite.made") &
done
wait
for suite in bookworm trixie; do
    if [ -f "$work/$suite.made" ]; then in_root "$work/$suite" "a fresh root of $suite"
    else echo "packages in order; no root of $suite ($(tail -n 1 "$work/$suite.log")): that part is skipped"; fi
done

#!/bin/sh
# The packages of a build: what they hold, the tarball from a folder of its own, and the .deb in a fresh
# Debian root where one can be made (root rights, debootstrap, a mirror): mneme train runs there.
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

sh "$source/tools/package.sh" "$build" "$work/out" >"$work/log" || fail "no packages"
deb=$(ls "$work/out"/mneme_*.deb)
tarball=$(ls "$work/out"/mneme-*.tar.gz)
dpkg-deb --contents "$deb" >"$work/contents"
for file in usr/bin/mneme 'usr/lib/libmneme\.so' 'usr/lib/libmneme\.a' usr/include/mneme.h 'man1/mneme-train\.1\.gz' \
    bash-completion/completions/mneme site-functions/_mneme 'vendor_completions.d/mneme\.fish' pkgconfig/mneme.pc; do
    grep -q "$file" "$work/contents" || fail "the .deb has no $file"
done
dpkg-deb --field "$deb" Depends | grep -q libc6 || fail "the .deb depends on nothing"

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

# a fresh root
root=${MNEME_ROOT-}
if [ -z "$root" ]; then
    [ "$(id -u)" = 0 ] || { echo "packages in order; no root rights for a fresh root: that part is skipped"; exit 0; }
    command -v debootstrap >/dev/null 2>&1 || { echo "packages in order; no debootstrap: a fresh root is skipped"; exit 0; }
    root=$work/root
    depends=$(dpkg-deb --field "$deb" Depends | tr ',' '\n' | sed 's/ *\([a-z0-9.+-]*\).*/\1/' | sort -u | paste -s -d ,)
    timeout 900 debootstrap --variant=minbase --include="$depends" bookworm "$root" >"$work/debootstrap.log" 2>&1 ||
        { echo "packages in order; debootstrap could not make a root ($(tail -n 1 "$work/debootstrap.log")): that part is skipped"; exit 0; }
fi
cp "$deb" "$work/text.txt" "$root/tmp/"
chroot "$root" dpkg --install "/tmp/${deb##*/}" >"$work/dpkg.log" 2>&1 || fail "dpkg: $(tail -n 3 "$work/dpkg.log")"
chroot "$root" sh -c 'cd /tmp && rm -rf runs && mneme train text.txt --steps 2 --threads 1 --quiet' >"$work/trained" ||
    fail "mneme train fails in the fresh root"
grep -q 'best on held-out data' "$work/trained" || fail "training in the fresh root says nothing"
chroot "$root" sh -c 'cd /tmp && mneme generate --model runs/text line --tokens 4 --quiet' >/dev/null || fail "generate fails there"
chroot "$root" dpkg --purge mneme >/dev/null 2>&1 || fail "the .deb cannot be removed"
echo "packages in order, and at work in a fresh root"

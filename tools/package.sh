#!/bin/sh
# Packages of a build: mneme_VERSION_ARCH.deb, which takes its libraries from the distribution, and
# mneme-VERSION-linux-ARCH.tar.gz, which brings them along and runs wherever it is unpacked.
#   sh tools/package.sh BUILD_DIR OUT_DIR     MNEME_PACKAGE_LEVEL: how hard to compress, 1 to 9
set -eu
level=${MNEME_PACKAGE_LEVEL:-6}
build=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)
source=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=$(sed -n 's/^#define MN_VERSION "\(.*\)"/\1/p' "$source/include/mneme.h")
machine=$(uname -m)

# ---- what both hold
cmake --install "$build" --prefix "$work/tree" >"$work/install.log" || { cat "$work/install.log" >&2; exit 1; }
find "$work/tree" -type f \( -name 'lib*.so*' -o -path '*/bin/*' \) -exec strip --strip-unneeded {} +
mkdir -p "$work/tree/share/doc/mneme"
cp "$source/LICENSE" "$work/tree/share/doc/mneme/copyright"
cp "$source/README.md" "$source/CHANGELOG.md" "$work/tree/share/doc/mneme/"

# ---- tarball: libraries that a bare system may lack lie in lib/mneme, found by the run path of the program
name=mneme-$version-linux-$machine
mkdir "$work/tar"
cp -a "$work/tree" "$work/tar/$name"
library=$(dirname "$(find "$work/tar/$name" -name libmneme.so)")
mkdir -p "$library/mneme"
ldd "$work/tree/bin/mneme" "$library/libmneme.so" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
    while read -r path; do
        case ${path##*/} in
        libc.so.* | libm.so.* | libdl.so.* | libpthread.so.* | librt.so.* | ld-linux*) ;;    # the system's own
        libcuda.so.*) ;;                                                                     # the driver's
        *)
            cp -L "$path" "$library/mneme/"
            package=$(dpkg -S "$(readlink -f "$path")" 2>/dev/null | cut -d : -f 1) || continue
            licence=/usr/share/doc/$package/copyright
            [ ! -e "$licence" ] || cp -L "$licence" "$work/tar/$name/share/doc/mneme/copyright.$package"
            ;;
        esac
    done
tar -C "$work/tar" --sort=name --owner=0 --group=0 --numeric-owner -cf - "$name" | gzip -n "-$level" >"$out/$name.tar.gz"
echo "$out/$name.tar.gz"

# ---- .deb
if ! command -v dpkg-deb >/dev/null 2>&1; then
    echo "no dpkg-deb here: no .deb" >&2
    exit 0
fi
architecture=$(dpkg --print-architecture)
mkdir -p "$work/deb/DEBIAN" "$work/shlibs/debian"
cp -a "$work/tree" "$work/deb/usr"
find "$work/deb/usr/share/man" -name '*.1' -exec gzip -9n {} +
printf 'Source: mneme\n\nPackage: mneme\nArchitecture: any\n' >"$work/shlibs/debian/control"
depends=libc6
if command -v dpkg-shlibdeps >/dev/null 2>&1; then
    depends=$(cd "$work/shlibs" && dpkg-shlibdeps -O --ignore-missing-info "$work/deb/usr/bin/mneme" \
        "$(find "$work/deb/usr" -name 'libmneme.so.*.*')" 2>/dev/null | sed -n 's/^shlibs:Depends=//p')
fi
# Ubuntu 24.04 has it by the name of its 64-bit time
depends=$(echo "$depends" | sed 's/libmicrohttpd12 \(([^)]*)\)/libmicrohttpd12 \1 | libmicrohttpd12t64/')
cat >"$work/deb/DEBIAN/control" <<END
Package: mneme
Version: $version
Architecture: $architecture
Maintainer: the mneme authors <mneme@localhost>
Installed-Size: $(du -sk "$work/deb/usr" | cut -f 1)
Depends: $depends
Suggests: gnuplot-nox
Section: science
Priority: optional
Description: sequence memory: train, inspect and measure layers that keep a belief
 Trains language models whose layers are linear attention, delta rules, state
 spaces, attention or Bayesian memories, writes text with them and serves them.
 Holds the program, the library with its header, manual pages and completion.
END
cat >"$work/deb/DEBIAN/triggers" <<END
activate-noawait ldconfig
END
dpkg-deb -Zxz "-z$level" --root-owner-group --build "$work/deb" "$out/mneme_${version}_$architecture.deb" >/dev/null
echo "$out/mneme_${version}_$architecture.deb"

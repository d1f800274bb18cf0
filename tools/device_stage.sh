#!/bin/sh
# Stages a self-contained folder to run on another machine, one with a GPU say: the stripped program,
# the shared libraries it needs besides the C library, the golden files, and `run`, which starts the
# program with those libraries; the tests that are scripts come along.
#   tools/device_stage.sh BUILD_DIR FOLDER       then there: FOLDER/run check --target cuda ...
#   sh FOLDER/tests/cli/cuda.sh FOLDER/run FOLDER
#   LD_LIBRARY_PATH=FOLDER/lib sh FOLDER/tests/sanitize.sh FOLDER/mneme LOGS
# The shared library and _fastcall.abi3.so come along for Python: MNEME_LIBRARY=FOLDER/lib/libmneme.so.
# Configure with -DMN_OPENBLAS=OFF to leave out 40 MB that only a ceiling of `mneme bench` uses.
set -eu
[ $# = 2 ] || { echo "usage: tools/device_stage.sh BUILD_DIR FOLDER" >&2; exit 2; }
build=$1
folder=$2
source=$(cd "$(dirname "$0")/.." && pwd)
[ -x "$build/mneme" ] || { echo "$build/mneme is not there; build it first" >&2; exit 1; }
mkdir -p "$folder/lib"
rm -f "$folder"/lib/*
strip -o "$folder/mneme" "$build/mneme"
ldd "$build/mneme" | sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p' | while read -r library; do
    case $library in
    */libc.so* | */libm.so* | */libpthread.so* | */libdl.so* | */librt.so*) ;;
    *) cp -L "$library" "$folder/lib/" ;;
    esac
done
if [ -e "$build/libmneme.so" ]; then
    strip -o "$folder/lib/libmneme.so" "$build/libmneme.so"
    [ ! -e "$build/_fastcall.abi3.so" ] || cp "$build/_fastcall.abi3.so" "$folder/lib/"
fi
rm -rf "$folder/golden"
cp -R "$source/tests/golden" "$folder/golden"
mkdir -p "$folder/tests/cli/support"
cp "$source/tests/cli/cuda.sh" "$folder/tests/cli/"
cp "$source/tests/cli/support/expect.sh" "$folder/tests/cli/support/"
cp "$source/tests/sanitize.sh" "$folder/tests/"
ln -sfn ../golden "$folder/tests/golden"
cat >"$folder/run" <<'END'
#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$here/mneme" "$@"
END
chmod +x "$folder/run"
du -sh "$folder" | cut -f1

#!/bin/sh
# Build under a sanitizer in a copy of the sources and run the core tests there, each file in a process of its own.
#
#     tests/run_sanitizers.sh                     address, undefined and thread, one after the other
#     tests/run_sanitizers.sh thread              one of them, or address,undefined in one build
#     tests/run_sanitizers.sh address tests/core/test_faults.py -x
#
# PYTHON names an interpreter that has the test requirements. SANITIZE_DIR keeps the build and the list of files that
# passed: a run that was interrupted goes on where it was, until the sources change. gcc only: the sanitizer's run-time
# library is preloaded. Exit status 0: clean. Leaks are not looked for (the interpreter keeps memory by design).
set -eu

PYTHON=${PYTHON:-python3}
CC=${CC:-gcc}
export CC
root=$(cd "$(dirname "$0")/.." && pwd)

if [ $# -eq 0 ]; then
    for sanitizer in address undefined thread; do "$0" "$sanitizer"; done
    exit 0
fi
sanitizer=$1
shift
case $sanitizer in
    address | address,undefined) library=libasan.so ;;
    undefined) library=libubsan.so ;;
    thread) library=libtsan.so ;;
    *) echo "run_sanitizers.sh: '$sanitizer' is not one of address, undefined, thread" >&2; exit 2 ;;
esac

if [ -n "${SANITIZE_DIR:-}" ]; then
    mkdir -p "$SANITIZE_DIR/$sanitizer"
    work=$(cd "$SANITIZE_DIR/$sanitizer" && pwd)
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi

# Sources only: compiled files and generated C of an ordinary build must not be picked up.
sources() {
    (cd "$root" && find setup.py pyproject.toml pagedkv csrc tests -type f ! -name '*.so' ! -name '*.o' ! -name '*.pyc' \
        ! -path 'pagedkv/core/*.c' ! -path pagedkv/build.json | LC_ALL=C sort)
}
sum=$(sources | (cd "$root" && xargs cksum) | cksum)
if [ "$(cat "$work/built" 2>/dev/null)" != "$sum" ]; then
    rm -rf "$work/source" "$work/built" "$work/passed"
    mkdir "$work/source"
    sources | (cd "$root" && tar cf - -T -) | (cd "$work/source" && tar xf -)
    echo "== $sanitizer: building"
    (cd "$work/source" && PAGEDKV_SANITIZE=$sanitizer "$PYTHON" setup.py -q build_ext --inplace -j"$(nproc)") \
        >"$work/build.log" 2>&1 || {
        cat "$work/build.log"
        exit 1
    }
    echo "$sum" >"$work/built"
fi

echo "== $sanitizer: testing"
cd "$work/source"
export LD_PRELOAD="$($CC -print-file-name=$library)"
export PYTHONMALLOC=malloc PYTHONDONTWRITEBYTECODE=1
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:report_signal_unsafe=0
# Fewer model steps: a sanitizer is about ten times slower.
export PAGEDKV_MODEL_STEPS="${PAGEDKV_MODEL_STEPS:-40000}"
if [ $# -gt 0 ]; then
    "$PYTHON" -m pytest -p no:cacheprovider "$@"
    exit 0
fi
# The run time of the thread sanitizer cannot start threads in the child of a fork.
selected=
[ "$sanitizer" != thread ] || selected="thread and not fork and not child"
failed=
for file in tests/core/test_*.py; do
    grep -qx "$file" "$work/passed" 2>/dev/null && continue
    status=0
    "$PYTHON" -m pytest -p no:cacheprovider -q "$file" -k "$selected" >"$work/log" 2>&1 || status=$?
    cp "$work/log" "$work/$(basename "$file" .py).log"
    if [ $status -eq 0 ] || [ $status -eq 5 ]; then # 5: nothing selected
        echo "$file" >>"$work/passed"
        echo "$file: $(tail -n 1 "$work/log")"
    else
        failed="$failed $file"
        cat "$work/log"
    fi
done
[ -z "$failed" ] || {
    echo "== $sanitizer: failed:$failed" >&2
    exit 1
}
echo "== $sanitizer: clean"

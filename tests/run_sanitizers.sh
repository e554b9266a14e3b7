#!/bin/sh
# Build under a sanitizer in a temporary copy and run the core tests there.
#
#     tests/run_sanitizers.sh                     address, undefined and thread, one after the other
#     tests/run_sanitizers.sh thread              one of them
#     tests/run_sanitizers.sh address tests/core/test_faults.py -x
#
# PYTHON names an interpreter that has the test requirements. gcc only: the sanitizer's run-time library is preloaded.
# Exit status 0: clean. Leaks are not looked for (the interpreter keeps memory by design).
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
    address) library=libasan.so ;;
    undefined) library=libubsan.so ;;
    thread) library=libtsan.so ;;
    *) echo "run_sanitizers.sh: '$sanitizer' is not one of address, undefined, thread" >&2; exit 2 ;;
esac
if [ $# -eq 0 ]; then
    case $sanitizer in
        # the sanitizer's own run time cannot start threads in the child of a fork
        thread) set -- tests/core -k "thread and not fork and not child" ;;
        *) set -- tests/core ;;
    esac
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Sources only: compiled files and generated C of an ordinary build must not be picked up.
(cd "$root" && tar cf - --exclude='*.so' --exclude='*.o' --exclude='build' --exclude='.git' --exclude='.venv*' \
    --exclude='pagedkv/core/*.c' setup.py pyproject.toml pagedkv csrc tests) | (cd "$work" && tar xf -)
cd "$work"
echo "== $sanitizer: building"
PAGEDKV_SANITIZE=$sanitizer "$PYTHON" setup.py -q build_ext --inplace -j"$(nproc)" >build.log 2>&1 || {
    cat build.log
    exit 1
}
echo "== $sanitizer: testing"
export LD_PRELOAD="$("$CC" -print-file-name=$library)"
export PYTHONMALLOC=malloc PYTHONDONTWRITEBYTECODE=1
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:report_signal_unsafe=0
# Fewer model steps: a sanitizer is about ten times slower.
PAGEDKV_MODEL_STEPS=${PAGEDKV_MODEL_STEPS:-40000} "$PYTHON" -m pytest -p no:cacheprovider "$@"
echo "== $sanitizer: clean"

/* Asks for tile permission of a system that answers as the test wants: cpu.c with its system call replaced.
 *     amx_permission [ANSWER]     without ANSWER the real system answers
 * Prints, a line each, for a processor with tiles and for one without: features left, calls made. */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef ARCH_REQ_XCOMP_PERM
enum { REQUEST = ARCH_REQ_XCOMP_PERM };
#undef ARCH_REQ_XCOMP_PERM
#else /* headers older than Linux 5.16 */
enum { REQUEST = 0x1023 };
#endif

static int asks_linux, n_calls;
static long answer;

static long call_system(long number, long code, long argument)
{
    n_calls++;
    if (number != SYS_arch_prctl || code != REQUEST || argument != 18 /* XTILEDATA of XCR0 */)
        abort();
    return asks_linux ? syscall(number, code, argument) : answer;
}

#define syscall(number, code, argument) call_system(number, code, argument)
#include "cpu.c"

int main(int argc, char **argv)
{
    const uint64_t vnni = PKV_FEATURE_AVX2 | PKV_FEATURE_AVX512 | PKV_FEATURE_VNNI, cases[] = {vnni | PKV_FEATURE_AMX_INT8, vnni};
    asks_linux = argc < 2;
    answer = argc < 2 ? 0 : atol(argv[1]);
    for (int i = 0; i < 2; i++) {
        n_calls = 0;
        unsigned long long left = permitted(cases[i]);
        printf("%llx %d\n", left, n_calls);
    }
    return 0;
}

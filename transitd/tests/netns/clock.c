// Preloaded into a process: its wall clock is ahead by as many seconds as the file named by CLOCK_STEP says at that moment.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *time) {
    long result = syscall(SYS_clock_gettime, clock, time);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        char text[32] = {0};
        int file = open(getenv("CLOCK_STEP"), O_RDONLY | O_CLOEXEC);
        if (file >= 0) {
            if (read(file, text, sizeof text - 1) > 0)
                time->tv_sec += atol(text);
            close(file);
        }
    }
    return (int)result;
}

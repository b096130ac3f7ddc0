/* Holds a pod's namespaces: as PID 1 it reaps what is left to it and ends on SIGTERM or SIGINT. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void stop(int signal_number) {
	(void)signal_number;
	_exit(0);
}

static void reap(int signal_number) {
	(void)signal_number;
	while (waitpid(-1, 0, WNOHANG) > 0) {
	}
}

int main(void) {
	struct sigaction action = {.sa_handler = stop};
	sigaction(SIGTERM, &action, 0);
	sigaction(SIGINT, &action, 0);
	action.sa_handler = reap;
	action.sa_flags = SA_NOCLDSTOP;
	sigaction(SIGCHLD, &action, 0);
	for (;;)
		pause();
}

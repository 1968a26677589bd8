/* Preloaded, this stands for a peer that dies as it is being connected to: the kernel has taken the
 * connection for it, resets it, and refuses the next. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

typedef int (*connect_function)(int, const struct sockaddr *, socklen_t);

static int dying;
static int num_connects;

/* Have the peers that are connected to from now on die, or live. Returns how often any was. */
int let_peers_die(int die) {
    int before = num_connects;
    dying = die;
    num_connects = 0;
    return before;
}

int connect(int fd, const struct sockaddr *address, socklen_t size) {
    connect_function real = (connect_function)dlsym(RTLD_NEXT, "connect");
    if (!dying || address->sa_family != AF_INET)
        return real(fd, address, size);
    if (num_connects++) {
        errno = ECONNREFUSED;
        return -1;
    }
    struct sockaddr_in peer = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t peer_size = sizeof peer;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&peer, sizeof peer) || listen(listener, 1) ||
        getsockname(listener, (struct sockaddr *)&peer, &peer_size))
        _exit(100);
    int result = real(fd, (struct sockaddr *)&peer, sizeof peer);
    int error = errno;
    close(listener);
    errno = error;
    return result;
}

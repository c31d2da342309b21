/* A net plugin for comparison: one plain TCP connection for each communicator, progressed by test, as NCCL's own
 * sockets are without helper threads. A message is its size in eight bytes, and its data. SOCKETS_ADDRESS is the
 * address of the listeners. */
#include <errno.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "abi.h"

#define ROOM 64 /* requests of a communicator; more than NCCL has in flight */

struct request {
	struct comm *comm;
	char *data;
	uint64_t size, head; /* head: the size on the wire */
	size_t at;           /* bytes of the head and the data */
	int busy, done;
};

struct comm {
	int fd, sends, failed;
	uint32_t first, next;
	struct request requests[ROOM];
};

static ncclResult_t init(void **context, uint64_t id, void *config, ncclDebugLogger_t log, void *profiler)
{
	(void)context, (void)id, (void)config, (void)log, (void)profiler;
	return ncclSuccess;
}

static ncclResult_t devices(int *n)
{
	*n = 1;
	return ncclSuccess;
}

static ncclResult_t properties(int dev, ncclNetProperties_v12_t *p)
{
	(void)dev;
	memset(p, 0, sizeof *p);
	p->name = "sockets";
	p->ptrSupport = NCCL_PTR_HOST;
	p->maxRecvs = 1;
	p->maxComms = 1024;
	return ncclSuccess;
}

static ncclResult_t listen_at(void *context, int dev, void *handle, void **out)
{
	(void)context, (void)dev;
	const char *address = getenv("SOCKETS_ADDRESS");
	struct sockaddr_in a = {.sin_family = AF_INET};
	socklen_t size = sizeof a;
	int *fd = malloc(sizeof *fd);
	if (!fd || !address || inet_pton(AF_INET, address, &a.sin_addr) != 1) {
		free(fd);
		return ncclInvalidUsage;
	}
	*fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	if (*fd < 0 || bind(*fd, (struct sockaddr *)&a, sizeof a) || listen(*fd, 8) || getsockname(*fd, (struct sockaddr *)&a, &size))
		return ncclSystemError;
	memcpy(handle, &a, sizeof a);
	*out = fd;
	return ncclSuccess;
}

static ncclResult_t new_comm(int fd, int sends, void **out)
{
	struct comm *c = calloc(1, sizeof *c);
	if (!c)
		return ncclSystemError;
	int yes = 1;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
	c->fd = fd;
	c->sends = sends;
	*out = c;
	return ncclSuccess;
}

static ncclResult_t connect_to(void *context, int dev, void *handle, void **out, void **device)
{
	(void)context, (void)dev, (void)device;
	struct sockaddr_in a;
	memcpy(&a, handle, sizeof a);
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof a))
		return ncclSystemError;
	return new_comm(fd, 1, out);
}

static ncclResult_t accept_one(void *listener, void **out, void **device)
{
	(void)device;
	int fd = accept(*(int *)listener, NULL, NULL);
	*out = NULL;
	return fd < 0 ? ncclSuccess : new_comm(fd, 0, out);
}

/* progress writes or reads what the socket takes or has. */
static ncclResult_t progress(struct comm *c)
{
	while (c->first != c->next) {
		struct request *r = &c->requests[c->first % ROOM];
		struct iovec parts[2];
		struct msghdr m = {.msg_iov = parts};
		if (r->at < sizeof r->head)
			parts[m.msg_iovlen++] = (struct iovec){(char *)&r->head + r->at, sizeof r->head - r->at};
		if (c->sends || r->at >= sizeof r->head) { /* the size comes first: a message may be shorter than its buffer */
			size_t at = r->at < sizeof r->head ? 0 : r->at - sizeof r->head;
			parts[m.msg_iovlen++] = (struct iovec){r->data + at, r->size - at};
		}
		ssize_t n = 0;
		if (r->at < sizeof r->head || r->size) {
			n = c->sends ? sendmsg(c->fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL) : recvmsg(c->fd, &m, MSG_DONTWAIT);
			if (n < 0 && (errno == EAGAIN || errno == EINTR))
				return ncclSuccess;
			if (n <= 0)
				return ncclRemoteError;
		}
		r->at += (size_t)n;
		if (!c->sends && r->at == sizeof r->head) {
			if (r->head > r->size)
				return ncclInvalidUsage;
			r->size = r->head;
		}
		if (r->at == sizeof r->head + r->size) {
			r->done = 1;
			c->first++;
		}
	}
	return ncclSuccess;
}

static ncclResult_t submit(struct comm *c, void *data, size_t size, void **out)
{
	struct request *r = &c->requests[c->next % ROOM];
	*out = NULL;
	if (r->busy)
		return ncclSuccess;
	*r = (struct request){.comm = c, .data = data, .size = size, .head = size, .busy = 1};
	c->next++;
	*out = r;
	return progress(c);
}

static ncclResult_t isend(void *comm, void *data, size_t size, int tag, void *memory, void *phandle, void **request)
{
	(void)tag, (void)memory, (void)phandle;
	return submit(comm, data, size, request);
}

static ncclResult_t irecv(void *comm, int n, void **data, size_t *sizes, int *tags, void **memory, void **phandles, void **request)
{
	(void)tags, (void)memory, (void)phandles;
	return n == 1 ? submit(comm, data[0], sizes[0], request) : ncclInvalidArgument;
}

static ncclResult_t test(void *request, int *done, int *sizes)
{
	struct request *r = request;
	ncclResult_t result = progress(r->comm);
	*done = r->done;
	if (r->done) {
		r->busy = 0;
		if (sizes)
			sizes[0] = (int)r->size;
	}
	return r->done ? ncclSuccess : result;
}

static ncclResult_t close_comm(void *comm)
{
	struct comm *c = comm;
	close(c->fd);
	free(c);
	return ncclSuccess;
}

static ncclResult_t close_listener(void *listener)
{
	close(*(int *)listener);
	free(listener);
	return ncclSuccess;
}

static ncclResult_t reg(void *comm, void *data, size_t size, int type, void **handle)
{
	(void)comm, (void)data, (void)size, (void)type;
	*handle = NULL;
	return ncclSuccess;
}

static ncclResult_t dereg(void *comm, void *handle)
{
	(void)comm, (void)handle;
	return ncclSuccess;
}

static ncclResult_t finalize(void *context)
{
	(void)context;
	return ncclSuccess;
}

const ncclNet_v12_t ncclNetPlugin_v12 = {
	.name = "sockets",
	.init = init,
	.devices = devices,
	.getProperties = properties,
	.listen = listen_at,
	.connect = connect_to,
	.accept = accept_one,
	.regMr = reg,
	.deregMr = dereg,
	.isend = isend,
	.irecv = irecv,
	.test = test,
	.closeSend = close_comm,
	.closeRecv = close_comm,
	.closeListen = close_listener,
	.finalize = finalize,
};

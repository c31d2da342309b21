/* Lanes: sockets that carry frames. */
#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm.h"

#define CONTROL_ROOM 4096        /* greatest payload of a frame other than DATA */
#define UNSENT_BYTES (256 << 10) /* that the kernel holds before the network takes them: more would delay a change of weights */
#define TURNS 16                 /* system calls before other lanes have their turn */
#define AHEAD_BYTES 2048         /* that a call receives after those of which the place is known */
#define MOST_STALLS 6
#define CALM_TIME (10000 * MILLISECOND) /* without a stall, after which a lane's stalls are noticed sooner again */

static const char zeros[4096];

static void set_options(int fd)
{
	int yes = 1, unsent = UNSENT_BYTES;
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
	setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
}

socklen_t socket_address(struct sockaddr_storage *out, const struct fared_address *a, uint16_t port)
{
	static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
	memset(out, 0, sizeof *out);
	if (memcmp(a->bytes, mapped, sizeof mapped) == 0) {
		struct sockaddr_in *in = (struct sockaddr_in *)out;
		in->sin_family = AF_INET;
		in->sin_port = htons(port);
		memcpy(&in->sin_addr, a->bytes + 12, 4);
		return sizeof *in;
	}
	struct sockaddr_in6 *in = (struct sockaddr_in6 *)out;
	in->sin6_family = AF_INET6;
	in->sin6_port = htons(port);
	memcpy(&in->sin6_addr, a->bytes, 16);
	return sizeof *in;
}

static struct lane *new_lane(int fd, const struct lane_owner *owner)
{
	struct lane *lane = calloc(1, sizeof *lane);
	if (lane)
		lane->control = malloc(CONTROL_ROOM);
	if (!lane || !lane->control) {
		free(lane);
		close(fd);
		return NULL;
	}
	lane->kind = SOURCE_LANE;
	lane->owner = owner;
	lane->fd = fd;
	lane->slot = -1;
	lane->since = lane->progress = lane->received = engine.now;
	struct epoll_event e = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.ptr = lane};
	if (epoll_ctl(engine.epoll, EPOLL_CTL_ADD, fd, &e)) {
		close(fd);
		free(lane->control);
		free(lane);
		return NULL;
	}
	return lane;
}

void lane_join(struct lane *lane, struct comm *c)
{
	lane->comm = c;
	c->lanes[c->lane_count++] = lane;
}

/* leave takes a lane off its communicator. */
static void leave(struct lane *lane)
{
	struct comm *c = lane->comm;
	for (int i = 0; i < c->lane_count; i++) {
		if (c->lanes[i] == lane) {
			c->lanes[i] = c->lanes[--c->lane_count];
			break;
		}
	}
	if (!c->lane_count && lane->state == LANE_READY)
		c->alive = engine.now;
}

struct lane *lane_open(struct comm *c, int slot)
{
	struct sockaddr_storage from, to;
	uint16_t port = slot < 0 ? 0 : c->sender.deal.slots[slot].source_port;
	socklen_t size = socket_address(&from, &c->source, port);
	socket_address(&to, &c->sender.destination, c->sender.port);
	int fd = socket(to.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return NULL;
	int yes = 1;
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
	set_options(fd);
	if (bind(fd, (struct sockaddr *)&from, size) || (connect(fd, (struct sockaddr *)&to, size) && errno != EINPROGRESS)) {
		int error = errno;
		close(fd);
		errno = error;
		return NULL;
	}
	struct lane *lane = new_lane(fd, c->owner);
	if (!lane)
		return NULL;
	lane->slot = slot;
	lane->port = port;
	if (slot >= 0) {
		lane->plane = c->sender.deal.slots[slot].plane;
		lane->sub_port = c->sender.deal.slots[slot].sub_port;
	}
	lane_join(lane, c);
	return lane;
}

struct lane *lane_accept(struct listener *l, int fd)
{
	set_options(fd);
	struct lane *lane = new_lane(fd, l->owner);
	if (!lane)
		return NULL;
	lane->state = LANE_GREETING;
	lane->listener = l;
	lane->next = l->greeting;
	l->greeting = lane;
	l->greeting_count++;
	return lane;
}

void lane_progress(struct lane *lane)
{
	lane->progress = engine.now;
	if (lane->suspect) {
		lane->suspect = false;
		lane->stalls += lane->stalls < MOST_STALLS;
		lane->calm = engine.now;
	} else if (lane->stalls && engine.now - lane->calm > CALM_TIME) {
		lane->stalls--;
		lane->calm = engine.now;
	}
}

void lane_close(struct lane *lane)
{
	if (lane->comm) {
		leave(lane);
	} else if (lane->listener) {
		struct lane **p = &lane->listener->greeting;
		while (*p && *p != lane)
			p = &(*p)->next;
		if (*p)
			*p = lane->next;
		lane->listener->greeting_count--;
	}
	close(lane->fd);
	free(lane->control);
	free(lane->out);
	free(lane);
}

void lane_control(struct lane *lane, const struct frame *f, const void *payload)
{
	size_t size = sizeof *f + f->length;
	if (lane->out_end + size > lane->out_room) {
		if (lane->out)
			memmove(lane->out, lane->out + lane->out_at, lane->out_end - lane->out_at);
		lane->out_end -= lane->out_at;
		lane->out_at = 0;
		if (lane->out_end + size > lane->out_room) {
			size_t room = (lane->out_end + size) * 2;
			char *out = realloc(lane->out, room);
			if (!out) {
				lane->ended = true; /* a lane that misses a frame is of no use */
				return;
			}
			lane->out = out;
			lane->out_room = room;
		}
	}
	memcpy(lane->out + lane->out_end, f, sizeof *f);
	((struct frame *)(void *)(lane->out + lane->out_end))->version = WIRE_VERSION;
	if (f->length)
		memcpy(lane->out + lane->out_end + sizeof *f, payload, f->length);
	lane->out_end += size;
}

void lane_acknowledge(struct lane *lane)
{
	if (!lane->ack_count)
		return;
	lane_control(lane, &(struct frame){.type = FRAME_ACK, .length = (uint32_t)(lane->ack_count * sizeof lane->acks[0])}, lane->acks);
	lane->ack_count = 0;
}

/* consume accounts for received bytes: those of the present header, or of the present payload. */
static bool consume(struct lane *lane, size_t n)
{
	if (lane->in_payload) {
		lane->payload_have += (uint32_t)n;
		if (lane->payload_have < lane->in.length)
			return true;
	} else {
		lane->in_have += (uint32_t)n;
		if (lane->in_have < sizeof lane->in)
			return true;
		if (lane->in.version != WIRE_VERSION || (lane->in.type != FRAME_DATA && lane->in.length > CONTROL_ROOM) || !lane->owner->begin(lane))
			return false;
		lane->in_payload = true;
		lane->payload_have = 0;
		if (lane->in.length)
			return true;
	}
	lane->in_payload = false;
	lane->in_have = 0;
	if (!lane->owner->end(lane))
		return false;
	if (lane->ack_count == sizeof lane->acks / sizeof lane->acks[0])
		lane_acknowledge(lane);
	return true;
}

/* place returns where the next bytes go, and how many fit there. */
static struct iovec place(struct lane *lane)
{
	uint32_t room;
	if (!lane->in_payload)
		return (struct iovec){(char *)&lane->in + lane->in_have, sizeof lane->in - lane->in_have};
	void *to = lane->owner->target(lane, &room);
	return (struct iovec){to, room};
}

/* receive accounts for bytes of which the first ones are in their place, and the others ahead of it. */
static bool receive(struct lane *lane, size_t placed, size_t n, const char *ahead)
{
	if (!consume(lane, n < placed ? n : placed))
		return false;
	for (n -= n < placed ? n : placed; n;) {
		struct iovec to = place(lane);
		size_t part = n < to.iov_len ? n : to.iov_len;
		memcpy(to.iov_base, ahead, part);
		if (!consume(lane, part))
			return false;
		ahead += part;
		n -= part;
	}
	return true;
}

void lane_read(struct lane *lane)
{
	char ahead[AHEAD_BYTES]; /* of the present place: small frames arrive by one call */
	for (int turn = 0; lane->readable && !lane->ended && turn < TURNS; turn++) {
		struct iovec parts[] = {place(lane), {ahead, sizeof ahead}};
		size_t placed = parts[0].iov_len, left = lane->in_payload ? lane->in.length - lane->payload_have : 0;
		struct msghdr m = {.msg_iov = parts, .msg_iovlen = left > placed ? 1 : 2};
		ssize_t got = recvmsg(lane->fd, &m, 0);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 && errno == EAGAIN) {
			lane->readable = false;
			break;
		}
		if (got <= 0) {
			lane->ended = true;
			break;
		}
		lane->received = engine.now;
		/* A socket with less than was asked for is empty, and what comes later is another event. */
		lane->readable = lane->ending || (size_t)got == placed + (m.msg_iovlen == 2 ? sizeof ahead : 0);
		if (!receive(lane, placed, (size_t)got, ahead)) {
			if (lane->comm)
				lane->owner->fail(lane->comm, ncclRemoteError, "the peer violates the protocol: does it use another version of the plugin?");
			lane->ended = true;
		}
	}
}

struct stripe *lane_take(struct lane *lane, struct frame *f)
{
	struct stripe *s = lane->queue.first;
	const struct request *r = s->request;
	list_remove(s);
	if (!lane->sent.first)
		lane->progress = engine.now;
	list_add(&lane->sent, s);
	*f = (struct frame){
		.type = FRAME_DATA,
		.version = WIRE_VERSION,
		.index = (uint16_t)r->index,
		.length = s->length,
		.group = r->group,
		.offset = s->offset,
		.total = r->size,
		.stripe = settings.stripe,
	};
	if (lane->plane < MAX_LANES)
		lane->comm->sender.plane_bytes[lane->plane] += s->length;
	return s;
}

/* begin takes the next stripe of the queue. */
static void begin(struct lane *lane)
{
	struct stripe *s = lane_take(lane, &lane->head);
	lane->head.id = (uint64_t)s->generation << 32 | s->number;
	lane->stripe = s;
	lane->payload = s->request->data + s->offset;
	lane->head_at = lane->payload_at = 0;
	lane->writing = true;
}

/* wrote accounts for sent bytes, in the order of lane_write. */
static void wrote(struct lane *lane, size_t n, size_t control)
{
	size_t part = n < control ? n : control;
	lane->out_at += part;
	n -= part;
	if (lane->out_at == lane->out_end)
		lane->out_at = lane->out_end = 0;
	if (!lane->writing)
		return;
	size_t left = sizeof lane->head - lane->head_at;
	part = n < left ? n : left;
	lane->head_at += (uint32_t)part;
	lane->payload_at += (uint32_t)(n - part);
	if (lane->head_at == sizeof lane->head && lane->payload_at == lane->head.length) {
		lane->writing = false;
		lane->stripe = NULL;
	}
}

void lane_write(struct lane *lane)
{
	for (int turn = 0; lane->writable && !lane->ended && turn < TURNS; turn++) {
		if (!lane->writing && lane->queue.first && lane->state == LANE_READY && !lane->comm->verbs)
			begin(lane);
		struct iovec parts[3];
		int n = 0;
		size_t control = 0;
		if (!lane->writing || !lane->head_at) {
			control = lane->out_end - lane->out_at;
			if (control)
				parts[n++] = (struct iovec){lane->out + lane->out_at, control};
		}
		if (lane->writing) {
			if (lane->head_at < sizeof lane->head)
				parts[n++] = (struct iovec){(char *)&lane->head + lane->head_at, sizeof lane->head - lane->head_at};
			size_t left = lane->head.length - lane->payload_at;
			if (left && lane->stripe)
				parts[n++] = (struct iovec){(void *)(uintptr_t)(lane->payload + lane->payload_at), left};
			else if (left)
				parts[n++] = (struct iovec){(void *)(uintptr_t)zeros, left < sizeof zeros ? left : sizeof zeros};
		}
		if (!n)
			break;
		struct msghdr m = {.msg_iov = parts, .msg_iovlen = (size_t)n};
		ssize_t sent = sendmsg(lane->fd, &m, MSG_NOSIGNAL);
		if (sent < 0 && errno == EINTR)
			continue;
		if (sent < 0) {
			lane->writable = false;
			lane->ended = errno != EAGAIN;
			break;
		}
		wrote(lane, (size_t)sent, control);
	}
}

/* Communicators: messages, stripes and groups of receives. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"

#define LINGER (2000 * MILLISECOND)       /* from the close of a communicator until its lanes are closed at the latest */
#define FIRST_LANES (200 * MILLISECOND)   /* that a communicator waits for its other lanes once one is ready */
#define CONNECT_TIME (3000 * MILLISECOND) /* until an attempt is given up */

struct comm *comm_new(const struct device *d, bool sends, const struct lane_owner *owner)
{
	struct comm *c = calloc(1, sizeof *c);
	if (!c)
		return NULL;
	c->request_count = sends ? MAX_SENDS : NCCL_NET_MAX_REQUESTS;
	c->requests = calloc(c->request_count, sizeof *c->requests);
	if (!c->requests) {
		free(c);
		return NULL;
	}
	for (uint32_t i = 0; i < c->request_count; i++)
		c->requests[i].comm = c;
	c->sends = sends;
	c->owner = owner;
	c->device = d;
	c->source = d->source;
	c->pairs.next = 1;
	return c;
}

/* close_lane frees a lane; stripes on it are assigned again. */
static void close_lane(struct lane *lane)
{
	shares_release(lane);
	qpair_release(lane);
	lane_close(lane);
}

void comm_free(struct comm *c)
{
	qpair_drop_all(c);
	while (c->lane_count)
		close_lane(c->lanes[0]);
	sender_free(c);
	for (uint32_t i = 0; i < c->request_count; i++) {
		for (int k = 0; k < MAX_PARTS; k++)
			free(c->requests[i].parts[k].have);
	}
	free(c->pairs.fenced);
	free(c->requests);
	if (atomic_load(&c->closing))
		atomic_fetch_sub(&engine.closing, 1);
	free(c);
}

void comm_fail(struct comm *c, ncclResult_t error, const char *reason)
{
	if (atomic_load(&c->error))
		return;
	if (!c->closed_at) {
		/* The reason comes first: a program may end as soon as it sees the error. */
		char peer[46] = "";
		fared_address_text(&c->sender.destination, peer, sizeof peer);
		WARN("%s %s: %s", c->sends ? "sending to" : "receiving", c->sends ? peer : "", reason);
	}
	atomic_store(&c->error, error);
}

/* expects returns whether an answer of the peer is outstanding: a buffer or an acknowledgement for a sender, a message
 * for a receiver. */
static bool expects(const struct comm *c)
{
	return c->sends ? c->sender.outstanding || c->sender.waiting : c->receiver.first_group != c->receiver.next_group;
}

static void take_submissions(struct comm *c)
{
	uint32_t end = atomic_load_explicit(&c->submitted, memory_order_acquire);
	if (c->taken != end && !expects(c) && c->lane_count)
		c->alive = c->asked = engine.now; /* the engine may have slept */
	for (; c->taken != end; c->taken++) {
		struct request *r = c->ring[c->taken % MAX_SENDS];
		if (c->sends)
			sender_submit(c, r);
		else
			receiver_submit(c, r);
	}
}

static void hello(struct lane *lane)
{
	if (lane->state == LANE_CONNECTING && lane->writable && !lane->ended) {
		lane->state = LANE_GREETING;
		lane_control(lane, &(struct frame){.type = FRAME_HELLO, .length = sizeof lane->comm->hello}, &lane->comm->hello);
	}
}

/* abandon ends all use of the memory of messages. */
static void abandon(struct comm *c)
{
	c->abandoned = true;
	qpair_drop_all(c);
	sender_abandon(c);
}

void comm_bye(struct lane *lane)
{
	lane_control(lane, &(struct frame){.type = FRAME_BYE, .group = lane->comm->receiver.first_group}, NULL);
}

void comm_closed_by_peer(struct comm *c, uint64_t groups)
{
	if (!c->peer_closed)
		c->receiver.bye_at = engine.now;
	c->peer_closed = true;
	if (!c->sends) {
		receiver_closed(c);
		return;
	}
	qpair_drop_all(c);
	sender_closed(c, groups);
}

static void close_comm(struct comm *c)
{
	c->closed_at = engine.now;
	abandon(c);
	for (int i = 0; i < c->lane_count; i++)
		comm_bye(c->lanes[i]);
	atomic_store(&c->released, true);
}

static void close_ended(struct comm *c)
{
	for (int i = 0; i < c->lane_count;) {
		struct lane *l = c->lanes[i];
		bool empty = !l->writing && l->out_at == l->out_end;
		if (c->closed_at && empty && !l->shut) {
			shutdown(l->fd, SHUT_WR);
			l->shut = true;
		}
		if (l->ended || (l->retired && empty && !l->queue.first && !l->sent.first && c->lane_count > 1))
			close_lane(l);
		else
			i++;
	}
	if (!c->ready) {
		int ready = 0;
		for (int i = 0; i < c->lane_count; i++)
			ready += shares_carries(c->lanes[i]);
		if (ready && (ready == c->lane_count || engine.now - c->since > FIRST_LANES)) {
			c->ready = true;
			atomic_store(&c->state, COMM_READY);
		}
	}
}

/* comm_run does what can be done without waiting. It returns true if more is left. */
bool comm_run(struct comm *c)
{
	take_submissions(c);
	bool defer = engine.lazy && !c->deferred;
	c->deferred = false;
	for (int i = 0; i < c->lane_count; i++) {
		struct lane *l = c->lanes[i];
		hello(l);
		if (l->readable)
			lane_read(l);
		c->deferred |= defer && l->ack_count;
		if (!defer)
			lane_acknowledge(l);
	}
	bool more = c->deferred;
	if (c->verbs)
		more |= qpair_poll(c);
	qpair_follow(c);
	if (atomic_load(&c->closing) && !c->closed_at)
		close_comm(c);
	else if (atomic_load(&c->error) && !c->abandoned)
		abandon(c);
	if (c->sends && !c->abandoned)
		sender_run(c);
	for (int i = 0; i < c->lane_count; i++) {
		struct lane *l = c->lanes[i];
		if (c->verbs)
			qpair_write(l);
		lane_write(l);
		more |= !l->ended && (l->readable || (l->writable && (l->writing || (l->queue.first && !c->verbs))));
	}
	close_ended(c);
	more |= c->sends && !c->abandoned && sender_has_work(c);
	c->gone = c->closed_at && (!c->lane_count || engine.now - c->closed_at > LINGER);
	return more && !c->gone;
}

static void watch_lane(struct comm *c, struct lane *l)
{
	if (l->state != LANE_READY) {
		l->ended |= engine.now - l->since > CONNECT_TIME;
		return;
	}
	if (!l->sent.first || c->lane_count == 1 || engine.now - l->progress <= (settings.stall_ms * MILLISECOND) << l->stalls)
		return;
	/* While all lanes are suspect their stripes stay: there is no better lane. */
	if (!l->suspect || !c->sender.all_suspect)
		shares_release(l);
	l->suspect = true;
}

/* watch_peer notes when the peer was last heard of, and asks a silent one for an answer: the end of a process does not
 * arrive when no plane carries its packets. A peer of which nothing is expected has only to keep a lane. It returns the
 * number of lanes in use. */
static int watch_peer(struct comm *c)
{
	int ready = 0;
	for (int i = 0; i < c->lane_count; i++) {
		const struct lane *l = c->lanes[i];
		if (l->state != LANE_READY || l->ended)
			continue;
		ready++;
		uint64_t heard = expects(c) ? l->received : engine.now;
		if (heard > c->alive)
			c->alive = heard;
	}
	uint64_t period = settings.patience_ms * MILLISECOND / 4;
	if (!expects(c) || engine.now - c->alive <= period || engine.now - c->asked <= period)
		return ready;
	c->asked = engine.now;
	for (int i = 0; i < c->lane_count; i++) {
		if (c->lanes[i]->state == LANE_READY && !c->lanes[i]->ended)
			lane_control(c->lanes[i], &(struct frame){.type = FRAME_PING}, NULL);
	}
	return ready;
}

/* comm_tick does what depends on time. */
void comm_tick(struct comm *c)
{
	if (atomic_load(&c->error) || c->closed_at)
		return;
	for (int i = 0; i < c->lane_count; i++)
		watch_lane(c, c->lanes[i]);
	int ready = watch_peer(c);
	if (c->sends)
		sender_tick(c);
	else
		receiver_tick(c, ready);
}

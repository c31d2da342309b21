/* The receiver of a communicator: it posts the buffers of each receive to the sender, and completes receives in
 * order. */
#include <string.h>

#include "comm.h"

#define POST_DELAY (20 * MILLISECOND)    /* until an unconfirmed POST is repeated on another lane, doubling up to a second */
#define BYE_TIME (1000 * MILLISECOND)    /* from the close of a sender until its last SEND is complete at the receiver */
#define RETURN_TIME (5000 * MILLISECOND) /* in which a sender must open a lane after the last one has ended */

void receiver_complete(struct comm *c)
{
	while (c->receiver.first_group != c->receiver.next_group) {
		struct request *r = c->receiver.groups[c->receiver.first_group % MAX_GROUPS];
		for (int i = 0; i < r->n; i++) {
			if (!r->parts[i].known || r->parts[i].received != r->parts[i].total)
				return;
		}
		c->receiver.groups[c->receiver.first_group++ % MAX_GROUPS] = NULL;
		atomic_store_explicit(&r->state, REQUEST_DONE, memory_order_release);
	}
}

static void post(struct comm *c, uint64_t group, struct lane *lane)
{
	const struct request *r = c->receiver.groups[group % MAX_GROUPS];
	struct buffer buffers[MAX_PARTS];
	memset(buffers, 0, sizeof buffers);
	for (int i = 0; i < r->n; i++) {
		const struct part *p = &r->parts[i];
		buffers[i] = (struct buffer){.tag = p->tag, .size = p->capacity};
		if (c->verbs)
			memory_announce(p->memory, p->data, &buffers[i]);
	}
	lane_control(
		lane, &(struct frame){.type = FRAME_POST, .index = (uint16_t)r->n, .length = (uint32_t)(r->n * sizeof buffers[0]), .group = group}, buffers);
}

void receiver_confirmed(struct comm *c, uint64_t groups)
{
	if (groups <= c->receiver.confirmed)
		return;
	c->receiver.confirmed = groups;
	c->receiver.post_delay = 0;
}

/* control_lane returns the lane on which a frame arrived last, or with the number of a lane that is not to be used
 * another one; -1 if there is none. */
static int control_lane(const struct comm *c, int avoid)
{
	int best = -1;
	for (int k = 0; k < c->lane_count; k++) {
		int i = (avoid + 1 + k) % c->lane_count;
		if (c->lanes[i]->ended || (i == avoid && c->lane_count > 1))
			continue;
		if (best < 0 || (avoid < 0 && c->lanes[i]->received > c->lanes[best]->received))
			best = i;
	}
	return best;
}

void receiver_submit(struct comm *c, struct request *r)
{
	r->group = c->receiver.next_group++;
	c->receiver.groups[r->group % MAX_GROUPS] = r;
	if (c->peer_closed)
		c->owner->fail(c, ncclRemoteError, "the sender has closed the communicator");
	int i = control_lane(c, -1);
	if (i < 0)
		return; /* receiver_tick posts it */
	c->receiver.post_lane = i;
	c->receiver.posted_at = engine.now;
	post(c, r->group, c->lanes[i]);
}

void receiver_closed(struct comm *c)
{
	if (!c->verbs && c->receiver.first_group != c->receiver.next_group) /* over verbs receiver_tick looks whether the messages are complete in time */
		c->owner->fail(c, ncclRemoteError, "the sender has closed the communicator");
}

void receiver_tick(struct comm *c, bool reachable)
{
	struct receiver *in = &c->receiver;
	bool expects = in->first_group != in->next_group;
	if (c->verbs && c->peer_closed && expects && engine.now - in->bye_at > BYE_TIME)
		c->owner->fail(c, ncclRemoteError, "the sender has closed the communicator");
	if (!c->peer_closed && expects && engine.now - c->alive > (reachable ? settings.patience_ms * MILLISECOND : RETURN_TIME))
		c->owner->fail(c, ncclRemoteError, reachable ? "the sender does not answer on any plane" : "the sender's process has ended");
	uint64_t delay = in->post_delay ? in->post_delay : POST_DELAY;
	if (in->confirmed >= in->next_group || engine.now - in->posted_at <= delay)
		return;
	int i = c->lane_count ? control_lane(c, in->post_lane % c->lane_count) : -1;
	if (i < 0)
		return;
	in->post_lane = i;
	in->posted_at = engine.now;
	in->post_delay = delay * 2 < 1000 * MILLISECOND ? delay * 2 : 1000 * MILLISECOND;
	uint64_t first = in->confirmed > in->first_group ? in->confirmed : in->first_group;
	for (uint64_t g = first; g < in->next_group; g++)
		post(c, g, c->lanes[i]);
}

/* Tests the communication management alone, in virtual time: cm_unit SEED ROUNDS LOSS. Two devices exchange messages on a wire that loses (LOSS of 1000),
 * duplicates, delays and, in the last part, changes them. */
#include "cm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(x) ((x) ? (void)0 : (printf("%s:%d: %s (round %d)\n", __FILE__, __LINE__, #x, round_number), exit(1)))

enum { CLIENT, SERVER, FLYING = 256, SECOND = 1000000000, SERVICE = 77 };

struct message {
	uint64_t at;
	int to;
	struct in6_addr from, target;
	uint8_t data[SD_MAD_SIZE];
	size_t size;
};

/* The events that an end of a connection has seen. */
struct end {
	struct sd_cm_conn *c;
	int response, accepted, rejected, unreachable, disconnected, over, status, requests;
	uint8_t private_data[SD_CM_MAX_PRIVATE];
};

static struct sd_cm cm[2];
static struct end ends[2];
static struct in6_addr addresses[2];
static struct message wire[FLYING];
static int flying, round_number, sent_by_type[2][256];
static uint64_t now, seed;
static uint32_t loss, copies;
static bool cut, listening, later, mutate, calm; /* calm: no message takes longer than a timer */

static uint32_t rnd(uint32_t n)
{
	seed = seed * 6364136223846793005u + 1442695040888963407u;
	return n ? (uint32_t)(seed >> 33) % n : 0;
}

static void put_on_wire(int to, const struct in6_addr *from, const struct in6_addr *target, const uint8_t *m)
{
	if (cut || rnd(1000) < loss || flying == FLYING)
		return;
	struct message *w = &wire[flying++];
	*w = (struct message){.at = now + 10000 + rnd(calm || rnd(10) ? 100000 : 3u * SECOND), .to = to, .from = *from, .target = *target, .size = SD_MAD_SIZE};
	memcpy(w->data, m, SD_MAD_SIZE);
	if (mutate && rnd(3) == 0) {
		for (uint32_t i = 0; i <= rnd(3); i++)
			w->data[rnd(2) ? rnd(SD_MAD_SIZE) : rnd(64)] = (uint8_t)(rnd(4) ? rnd(256) : rnd(2) * 255);
		w->size = rnd(20) ? SD_MAD_SIZE : rnd(SD_MAD_SIZE + 40);
	}
}

static void send_message(struct sd_cm *from, const struct in6_addr *source, const struct in6_addr *destination, const uint8_t *m)
{
	int sender = from == &cm[SERVER];
	CHECK(memcmp(source, &addresses[sender], 16) == 0);
	if (!mutate)
		CHECK(memcmp(destination, &addresses[!sender], 16) == 0);
	sent_by_type[sender][m[17]]++;
	for (uint32_t n = rnd(1000) < copies ? 2 : 1; n > 0; n--)
		put_on_wire(!sender, source, destination, m);
}

static int request(struct sd_cm *at, struct sd_cm_conn *c)
{
	struct end *e = &ends[SERVER];
	struct sd_cm_ip ip;
	(void)at;
	if (!listening || c->service != SERVICE)
		return later ? SD_CM_LATER : SD_CM_UNKNOWN_SERVICE;
	if (!sd_cm_get_ip_header(c->private_data, &ip) || e->c)
		return SD_CM_BY_CONSUMER;
	e->c = c;
	e->requests++;
	memcpy(e->private_data, c->private_data, SD_CM_REQ_PRIVATE);
	c->user = e;
	return 0;
}

static void event(struct sd_cm *at, struct sd_cm_conn *c, enum sd_cm_event type, int status, const uint8_t *private_data, size_t size)
{
	struct end *e = c->user;
	(void)at;
	CHECK(e->c == c && size <= sizeof e->private_data);
	e->status = status;
	if (size)
		memcpy(e->private_data, private_data, size);
	int *count[] = {&e->response, &e->accepted, &e->rejected, &e->unreachable, &e->disconnected, &e->over};
	++*count[type];
	CHECK(*count[type] == 1); /* no event happens twice */
}

/* run delivers messages and runs timers for a time. */
static void run(uint64_t duration)
{
	uint64_t until = now + duration;
	for (;;) {
		uint64_t at = until;
		int first = -1;
		for (int i = 0; i < flying; i++)
			if (wire[i].at <= at)
				at = wire[i].at, first = i;
		for (int i = 0; i < 2; i++)
			if (cm[i].next_timer <= at)
				at = cm[i].next_timer, first = FLYING + i;
		if (first < 0)
			break;
		now = at > now ? at : now;
		cm[CLIENT].now = cm[SERVER].now = now;
		if (first >= FLYING) {
			sd_cm_timers(&cm[first - FLYING]);
			continue;
		}
		struct message m = wire[first];
		wire[first] = wire[--flying];
		uint8_t *exact = malloc(m.size ? m.size : 1); /* so that the address sanitizer finds each read beyond */
		CHECK(exact);
		memcpy(exact, m.data, m.size < SD_MAD_SIZE ? m.size : SD_MAD_SIZE);
		if (m.size > SD_MAD_SIZE)
			memset(exact + SD_MAD_SIZE, 0, m.size - SD_MAD_SIZE);
		sd_cm_input(&cm[m.to], &m.from, &m.target, exact, m.size);
		free(exact);
	}
	now = until;
	cm[CLIENT].now = cm[SERVER].now = now;
}

static void begin(void)
{
	static int n;
	for (int i = 0; i < 2; i++) {
		CHECK(cm[i].all == NULL);
		ends[i] = (struct end){0};
	}
	listening = true;
	cut = false;
	round_number = n++;
}

/* finish releases both ends, after which the devices must be free of connections, however much is lost. The server's program is gone: a late REQ finds no
 * listener that would have to release its connection. */
static void finish(void)
{
	listening = false;
	for (int i = 0; i < 2; i++)
		if (ends[i].c)
			sd_cm_release(ends[i].c);
	run(2000ull * SECOND);
	CHECK(cm[CLIENT].all == NULL && cm[SERVER].all == NULL && cm[CLIENT].connections == 0);
	CHECK(flying == 0 && cm[CLIENT].next_timer == UINT64_MAX);
}

static void dial(void)
{
	uint8_t p[SD_CM_REQ_PRIVATE];
	struct sd_cm_conn *c = ends[CLIENT].c = sd_cm_open(&cm[CLIENT], &ends[CLIENT]);
	for (size_t i = 0; i < sizeof p; i++)
		p[i] = (uint8_t)(i * 7);
	sd_cm_put_ip_header(p, &(struct sd_cm_ip){addresses[CLIENT], addresses[SERVER], 4321});
	c->local = addresses[CLIENT];
	c->remote = addresses[SERVER];
	c->service = SERVICE;
	c->mtu = 3;
	c->ack_timeout = 17;
	c->traffic_class = 0x68;
	c->here = (struct sd_cm_end){
		.qpn = 0x123456, .psn = 0xabcdef, .responder_resources = 5, .initiator_depth = 6, .retry_count = 7, .rnr_retry = 3, .srq = true};
	CHECK(sd_cm_connect(c, p, sizeof p) == 0);
	CHECK(sd_cm_connect(c, p, sizeof p) != 0);
}

static void accept_call(void)
{
	uint8_t p[SD_CM_REP_PRIVATE];
	struct sd_cm_conn *c = ends[SERVER].c;
	for (size_t i = 0; i < sizeof p; i++)
		p[i] = (uint8_t)(i * 11);
	c->here = (struct sd_cm_end){.qpn = 0x654321, .psn = 0xfedcba, .responder_resources = 9, .initiator_depth = 8, .rnr_retry = 2, .flow_control = true};
	CHECK(sd_cm_accept(c, p, sizeof p) == 0);
}

/* connect_both ends with a connection, or with an end that has been informed of the failure. Returns true for a connection. */
static bool connect_both(void)
{
	struct end *client = &ends[CLIENT], *server = &ends[SERVER];
	struct sd_cm_ip ip;
	dial();
	for (int i = 0; i < 400 && !server->c; i++)
		run(SECOND / 10);
	if (!server->c) {
		CHECK(loss > 0);
		run(60ull * SECOND);
		CHECK(client->unreachable || server->c);
		return false;
	}
	const struct sd_cm_conn *c = server->c;
	CHECK(c->there.qpn == 0x123456 && c->there.psn == 0xabcdef && c->there.responder_resources == 5 && c->there.initiator_depth == 6 &&
		c->there.retry_count == 7);
	CHECK(c->there.rnr_retry == 3 && c->there.srq && !c->there.flow_control && c->mtu == 3 && c->ack_timeout == 17 && c->traffic_class == 0x68);
	CHECK(sd_cm_get_ip_header(server->private_data, &ip) && ip.source_port == 4321 && memcmp(&ip.source, &addresses[CLIENT], 16) == 0);
	CHECK(memcmp(&ip.destination, &addresses[SERVER], 16) == 0);
	for (size_t i = SD_CM_IP_HEADER; i < SD_CM_REQ_PRIVATE; i++)
		CHECK(server->private_data[i] == (uint8_t)(i * 7));
	if (rnd(3) == 0)
		run(rnd(40) * (uint64_t)SECOND); /* a slow program: MRAs keep the client waiting */
	if (server->c->state != SD_CM_REQ_RECEIVED)
		return false;
	accept_call();
	for (int i = 0; i < 2000 && !client->response && !client->unreachable; i++)
		run(SECOND / 10);
	if (!client->response) {
		CHECK(loss > 0);
		return false;
	}
	CHECK(client->c->there.qpn == 0x654321 && client->c->there.psn == 0xfedcba && client->c->there.responder_resources == 9 &&
		client->c->there.initiator_depth == 8);
	CHECK(client->c->there.rnr_retry == 2 && client->c->there.flow_control && !client->c->there.srq);
	for (size_t i = 0; i < SD_CM_REP_PRIVATE; i++)
		CHECK(client->private_data[i] == (uint8_t)(i * 11));
	if (rnd(3) == 0)
		run(rnd(20) * (uint64_t)SECOND);
	if (client->c->state != SD_CM_REP_RECEIVED)
		return false;
	CHECK(sd_cm_ready(client->c) == 0);
	for (int i = 0; i < 2000 && !server->accepted && !server->unreachable; i++)
		run(SECOND / 10);
	CHECK(server->accepted || loss > 0);
	return server->accepted;
}

static void connections(int rounds)
{
	int established = 0;
	for (int i = 0; i < rounds; i++) {
		begin();
		if (connect_both()) {
			established++;
			CHECK(ends[SERVER].requests == 1);
			int who = (int)rnd(2);
			cut = rnd(10) == 0;
			CHECK(sd_cm_disconnect(ends[who].c) == 0);
			if (rnd(2) && !cut)
				CHECK(sd_cm_disconnect(ends[!who].c) == 0);
			run(100ull * SECOND);
			CHECK(ends[who].disconnected && ends[who].over);
			if (!cut && loss == 0)
				CHECK(ends[!who].disconnected && ends[!who].over);
		}
		finish();
	}
	CHECK(established * 10 > rounds * (loss > 100 ? 5 : 9));
	printf("%d of %d connections\n", established, rounds);
}

static void failures(void)
{
	struct end *client = &ends[CLIENT], *server = &ends[SERVER];
	begin(); /* no listener */
	listening = false;
	dial();
	run(10ull * SECOND);
	CHECK(client->rejected && client->status == SD_CM_UNKNOWN_SERVICE);
	finish();
	begin(); /* a listener that comes, and one that does not, while the request waits */
	listening = false;
	later = true;
	dial();
	for (int i = 0; i < 100 && !cm[SERVER].all; i++)
		run(SECOND / 20);
	CHECK(!client->rejected && !server->c);
	listening = true;
	sd_cm_offer(&cm[SERVER]);
	CHECK(server->c && server->requests == 1);
	accept_call();
	run(10ull * SECOND);
	CHECK(client->response);
	finish();
	begin();
	listening = false;
	dial();
	run(10ull * SECOND);
	CHECK(client->rejected && client->status == SD_CM_UNKNOWN_SERVICE);
	later = false;
	finish();
	begin(); /* the program rejects */
	dial();
	run(10ull * SECOND);
	CHECK(sd_cm_reject(server->c, SD_CM_BY_CONSUMER, "no", 3) == 0);
	run(10ull * SECOND);
	CHECK(client->rejected && client->status == SD_CM_BY_CONSUMER && strcmp((char *)client->private_data, "no") == 0);
	finish();
	begin(); /* no network */
	cut = true;
	memset(sent_by_type, 0, sizeof sent_by_type);
	dial();
	run(60ull * SECOND);
	CHECK(client->unreachable && client->status < 0 && sent_by_type[CLIENT][0x10] == 16 && sent_by_type[CLIENT][0x12] == 1);
	finish();
	begin(); /* the client gives up before the answer: the server is informed although it has not sent its identifier */
	dial();
	run(10ull * SECOND);
	sd_cm_release(client->c);
	client->c = NULL;
	run(10ull * SECOND);
	CHECK(server->rejected && server->status == SD_CM_TIMEOUT);
	finish();
	begin(); /* the server's program ends without an answer */
	dial();
	run(10ull * SECOND);
	sd_cm_release(server->c);
	server->c = NULL;
	run(10ull * SECOND);
	CHECK(client->rejected && client->status == SD_CM_BY_CONSUMER);
	finish();
	begin(); /* the network fails after the REQ: the server sends its REP 16 times */
	dial();
	run(10ull * SECOND);
	cut = true;
	memset(sent_by_type, 0, sizeof sent_by_type);
	accept_call();
	run(60ull * SECOND);
	CHECK(server->unreachable && sent_by_type[SERVER][0x13] == 16);
	finish();
	begin(); /* the peer restarts and reuses its queue pair: the old connection ends, the new REQ is stale */
	CHECK(connect_both());
	sd_cm_close(&cm[CLIENT]);
	*client = (struct end){0};
	dial();
	run(10ull * SECOND);
	CHECK(client->rejected && client->status == SD_CM_STALE && server->disconnected && server->requests == 1);
	finish();
	begin(); /* a release ends the connection at the peer */
	CHECK(connect_both());
	sd_cm_release(server->c);
	server->c = NULL;
	run(10ull * SECOND);
	CHECK(client->disconnected);
	finish();
}

/* lies plays with changed messages: whatever arrives, nothing is read or written out of place, and every connection ends. */
static void lies(int rounds)
{
	uint64_t malformed = 0;
	mutate = true;
	for (int i = 0; i < rounds; i++) {
		begin();
		dial();
		for (int steps = 0; steps < 12; steps++) {
			run(rnd(2) ? SECOND / 20 : 2ull * SECOND);
			struct end *e = &ends[rnd(2)];
			if (!e->c)
				continue;
			uint8_t p[16] = {0};
			switch (rnd(6)) {
			case 0:
				e->c->here.qpn = 0x654321;
				sd_cm_accept(e->c, p, sizeof p);
				break;
			case 1:
			case 2:
				sd_cm_ready(e->c);
				break;
			case 3:
				if (rnd(4) == 0)
					sd_cm_disconnect(e->c);
				break;
			case 4:
				if (rnd(8) == 0)
					sd_cm_reject(e->c, SD_CM_BY_CONSUMER, p, sizeof p);
				break;
			default:
				break;
			}
		}
		finish();
	}
	for (int i = 0; i < 2; i++)
		malformed += cm[i].counters.malformed + cm[i].counters.unknown + cm[i].counters.rejected;
	CHECK(malformed > (uint64_t)rounds / 4);
	printf("%d rounds with changed messages, %lu of them dropped or rejected\n", rounds, malformed);
	mutate = false;
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	seed = strtoull(argv[1], NULL, 10);
	int rounds = atoi(argv[2]);
	printf("seed %s\n", argv[1]);
	for (int i = 0; i < 2; i++) {
		addresses[i] = (struct in6_addr){{{[10] = 0xff, [11] = 0xff, 10, 0, 0, (uint8_t)(i + 1)}}};
		cm[i] = (struct sd_cm){.next_timer = UINT64_MAX,
			.guid = 0x1000u + (unsigned)i,
			.next_id = 0xfffffffe,
			.send = send_message,
			.request = request,
			.event = event};
	}
	calm = true;
	failures();
	calm = false;
	loss = (uint32_t)atoi(argv[3]);
	copies = loss;
	connections(rounds);
	lies(rounds);
	return 0;
}

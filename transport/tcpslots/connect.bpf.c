//go:build ignore

// The programs that give TCP connections the source ports of slots. They run in connect() of the processes of a cgroup,
// before the kernel chooses a source port: (source, destination) -> ports of the slots and vector; vector -> the bin,
// which is a sub-port or a sprayed plane, of each connection in turn; bin -> its slots, of which the first one with a
// free port is used.

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/socket.h>
#include <stdbool.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define AF_INET 2
#define AF_INET6 10
#define SOCK_STREAM 1
#define SOL_SOCKET 1
#define SO_REUSEADDR 2
#define EADDRINUSE 98
#define EADDRNOTAVAIL 99

#define SLOTS 128
#define PLANES 64
#define TURNS 1024

// The greatest time in ns between the choice of a port and the kernel's entry of the connection: both happen in one
// system call.
#define CLAIM_TIME 1000000000

// The counters: connections placed on each plane, then those left unchanged, by reason.
enum left {
	LEFT_BOUND = PLANES, // the program has chosen the source port or the device
	LEFT_UNKNOWN,        // no pair of the slot table, or no slot with a share
	LEFT_TAKEN,          // every port of the plane's slots is in use
	LEFT_ADDRESS,        // the host, or the network namespace, does not have the loopback
	LEFT_REFUSED,        // the kernel refuses the port for another reason
	COUNTERS,
	PLACED = COUNTERS,
};

// An IPv4 address is mapped into IPv6 (RFC 4291, Section 2.5.5.2).
struct address {
	__u32 word[4];
};

struct pair {
	struct address source;
	struct address destination;
};

struct ports {
	__u32 vector;
	__u16 port[SLOTS];
};

// A part of deal.slot: the slots of a bin or of a plane.
struct range {
	__u8 first;
	__u8 count;
};

struct bin {
	struct range own;
	struct range all; // of the bin's plane, its own included
	__u8 plane;
};

// The slots of a vector whose share is not 0, and their bins in the order of connections.
struct deal {
	__u16 turns;      // in a period; 0: no slot has a share
	__u8 turn[TURNS]; // the bin
	struct bin bin[SLOTS];
	__u8 slot[SLOTS]; // in the order of planes and bins
};

// A connection that is about to be entered by the kernel.
struct claim {
	struct pair pair;
	__u16 source_port;
	__u16 destination_port;
};

#define MAP(NAME, TYPE, KEY, VALUE, ENTRIES, FLAGS) \
	struct {                                    \
		__uint(type, BPF_MAP_TYPE_##TYPE);  \
		__uint(max_entries, ENTRIES);       \
		__uint(map_flags, FLAGS);           \
		__type(key, KEY);                   \
		__type(value, VALUE);               \
	} NAME SEC(".maps")

MAP(fared_first, ARRAY, __u32, struct address, 2, 0); // the loopback of unbound sockets, of IPv4 and IPv6; zeros: none
MAP(fared_pairs, HASH, struct pair, struct ports, 1, BPF_F_NO_PREALLOC);
MAP(fared_deals, HASH, __u32, struct deal, 1, BPF_F_NO_PREALLOC);
MAP(fared_turns, LRU_HASH, struct pair, __u32, 16384, 0);
MAP(fared_start, ARRAY, __u32, __u32, 1, 0); // the turn with which the next pair begins
MAP(fared_claims, LRU_HASH, struct claim, __u64, 4096, 0);
MAP(fared_counts, PERCPU_ARRAY, __u32, __u64, COUNTERS, 0);

static __always_inline int count(__u32 what)
{
	__u64 *n = bpf_map_lookup_elem(&fared_counts, &what);
	if (n)
		(*n)++;
	return 1; // the connection goes on
}

static __always_inline bool is_zero(const struct address *a)
{
	return !(a->word[0] | a->word[1] | a->word[2] | a->word[3]);
}

static __always_inline bool is_v4(const struct address *a)
{
	return !a->word[0] && !a->word[1] && a->word[2] == bpf_htonl(0xffff);
}

// turn_of returns the turn of a connection. A pair begins where the pair before it began, plus one: the first
// connections to many destinations are dealt like many connections to one.
static __always_inline __u32 turn_of(const struct pair *pair)
{
	__u32 zero = 0, *n = bpf_map_lookup_elem(&fared_turns, pair);
	if (!n) {
		__u32 *start = bpf_map_lookup_elem(&fared_start, &zero);
		if (!start)
			return 0; // an array of one: cannot be
		__u32 first = __sync_fetch_and_add(start, 1);
		bpf_map_update_elem(&fared_turns, pair, &first, BPF_NOEXIST); // fails if another processor was faster
		n = bpf_map_lookup_elem(&fared_turns, pair);
		if (!n)
			return first;
	}
	return __sync_fetch_and_add(n, 1);
}

// claims reports whether the caller alone may use a connection's addresses and ports. Several sockets may be bound to
// one port while their destinations differ, so the kernel notices equal connections only when it enters them, and
// connect() would fail.
static __always_inline bool claims(const struct claim *c)
{
	__u64 now = bpf_ktime_get_ns();
	if (!bpf_map_update_elem(&fared_claims, c, &now, BPF_NOEXIST))
		return true;
	__u64 *held = bpf_map_lookup_elem(&fared_claims, c);
	if (!held)
		return false;
	__u64 since = *held;
	return now - since > CLAIM_TIME && __sync_val_compare_and_swap(held, since, now) == since;
}

// in_use reports whether the kernel has the connection, in any state. An answer to it would have the opposite addresses
// and ports.
static __always_inline bool in_use(struct bpf_sock_addr *ctx, const struct claim *c)
{
	struct bpf_sock_tuple tuple = {};
	__u32 size = sizeof(tuple.ipv6);
	if (is_v4(&c->pair.destination)) {
		size = sizeof(tuple.ipv4);
		tuple.ipv4.saddr = c->pair.destination.word[3];
		tuple.ipv4.daddr = c->pair.source.word[3];
		tuple.ipv4.sport = bpf_htons(c->destination_port);
		tuple.ipv4.dport = bpf_htons(c->source_port);
	} else {
		__builtin_memcpy(tuple.ipv6.saddr, &c->pair.destination, sizeof(tuple.ipv6.saddr));
		__builtin_memcpy(tuple.ipv6.daddr, &c->pair.source, sizeof(tuple.ipv6.daddr));
		tuple.ipv6.sport = bpf_htons(c->destination_port);
		tuple.ipv6.dport = bpf_htons(c->source_port);
	}
	struct bpf_sock *sk = bpf_skc_lookup_tcp(ctx, &tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return false;
	bpf_sk_release(sk);
	return true;
}

static __always_inline long bind(struct bpf_sock_addr *ctx, bool v6, const struct address *a, __u16 port)
{
	if (v6) {
		struct sockaddr_in6 to = {.sin6_family = AF_INET6, .sin6_port = bpf_htons(port)};
		__builtin_memcpy(&to.sin6_addr, a, sizeof(to.sin6_addr));
		return bpf_bind(ctx, (struct sockaddr *)&to, sizeof(to));
	}
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = bpf_htons(port), .sin_addr.s_addr = a->word[3]};
	return bpf_bind(ctx, (struct sockaddr *)&to, sizeof(to));
}

// The search for a free port: among the slots of a bin, then among those of its plane.
struct search {
	struct bpf_sock_addr *ctx;
	const struct ports *ports;
	const struct deal *deal;
	struct claim claim;
	struct bin bin;
	__u32 random;
	__u32 result;
	bool v6;
};

// try binds the socket to the port of a slot, and ends the search if that succeeds or can never succeed.
static long try(__u64 i, struct search *s)
{
	const struct range *of = i < s->bin.own.count ? &s->bin.own : &s->bin.all;
	if (!of->count)
		return 1; // the deal is being replaced
	__u32 slot = s->deal->slot[(of->first + (s->random + (__u32)i) % of->count) & (SLOTS - 1)] & (SLOTS - 1);
	s->claim.source_port = s->ports->port[slot];
	if (!claims(&s->claim) || in_use(s->ctx, &s->claim))
		return 0;
	long error = bind(s->ctx, s->v6, &s->claim.pair.source, s->claim.source_port);
	if (error == -EADDRINUSE)
		return 0;
	if (error)
		s->result = error == -EADDRNOTAVAIL ? LEFT_ADDRESS : LEFT_REFUSED;
	else
		s->result = PLACED;
	return 1;
}

// place binds the socket to the first free port of a bin's slots, or else of its plane's, beginning with a random one.
// It returns the counter of the result.
static __always_inline __u32 place(struct search *s)
{
	__u32 turn = turn_of(&s->claim.pair) % s->deal->turns;
	s->bin = s->deal->bin[s->deal->turn[turn & (TURNS - 1)] & (SLOTS - 1)];
	s->random = bpf_get_prandom_u32();
	s->result = LEFT_TAKEN;
	bpf_loop(s->bin.own.count + s->bin.all.count, try, s, 0);
	return s->result == PLACED ? s->bin.plane & (PLANES - 1) : s->result;
}

static __always_inline int connect(struct bpf_sock_addr *ctx, bool v6, const struct address *bound, const struct address *destination)
{
	struct search s = {.ctx = ctx, .v6 = v6, .claim.pair.source = *bound, .claim.pair.destination = *destination};
	s.claim.destination_port = bpf_ntohs(ctx->user_port);
	struct bpf_sock *sk = ctx->sk;
	if (!sk || sk->src_port || sk->bound_dev_if)
		return count(LEFT_BOUND);
	bool free = is_zero(bound);
	if (free) {
		__u32 family = !is_v4(destination);
		struct address *first = bpf_map_lookup_elem(&fared_first, &family);
		if (first)
			s.claim.pair.source = *first;
	}
	struct ports *ports = bpf_map_lookup_elem(&fared_pairs, &s.claim.pair);
	if (!ports)
		return count(LEFT_UNKNOWN);
	struct deal *deal = bpf_map_lookup_elem(&fared_deals, &ports->vector);
	if (!deal || !deal->turns)
		return count(LEFT_UNKNOWN);
	s.ports = ports;
	s.deal = deal;
	// Sockets of connections to several destinations share a port only if all of them have this option.
	int before = 0, yes = 1;
	bpf_getsockopt(ctx, SOL_SOCKET, SO_REUSEADDR, &before, sizeof(before));
	bpf_setsockopt(ctx, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
	__u32 result = place(&s);
	if (result >= PLANES) {
		bpf_setsockopt(ctx, SOL_SOCKET, SO_REUSEADDR, &before, sizeof(before));
		if (!free) // a failed bind has removed the address
			bind(ctx, v6, bound, 0);
	}
	return count(result);
}

SEC("cgroup/connect4")
int fared_connect4(struct bpf_sock_addr *ctx)
{
	struct address bound = {}, destination = {};
	if (ctx->type != SOCK_STREAM || ctx->protocol != IPPROTO_TCP)
		return 1;
	struct bpf_sock *sk = ctx->sk;
	if (sk && sk->src_ip4) {
		bound.word[2] = bpf_htonl(0xffff);
		bound.word[3] = sk->src_ip4;
	}
	destination.word[2] = bpf_htonl(0xffff);
	destination.word[3] = ctx->user_ip4;
	return connect(ctx, false, &bound, &destination);
}

SEC("cgroup/connect6")
int fared_connect6(struct bpf_sock_addr *ctx)
{
	struct address bound = {}, destination = {};
	if (ctx->type != SOCK_STREAM || ctx->protocol != IPPROTO_TCP)
		return 1;
	struct bpf_sock *sk = ctx->sk;
	if (sk) {
		bound.word[0] = sk->src_ip6[0];
		bound.word[1] = sk->src_ip6[1];
		bound.word[2] = sk->src_ip6[2];
		bound.word[3] = sk->src_ip6[3];
	}
	destination.word[0] = ctx->user_ip6[0];
	destination.word[1] = ctx->user_ip6[1];
	destination.word[2] = ctx->user_ip6[2];
	destination.word[3] = ctx->user_ip6[3];
	return connect(ctx, true, &bound, &destination);
}

char _license[] SEC("license") = "Dual MIT/GPL";

//go:build ignore

// The steering program: it sits on the way out of the anchor device, to which rules and routes bring the flows to
// steer, and sends each packet on over the sub-port of its queue pair slot.
//
// Two more programs run where the kernel sets and clears a device's carrier, and keep its places out of the steering
// without waiting for the agent, also while no agent runs. Where the kernel refuses them, another one does so when the
// kernel sends the event to the agent.
//
// source -> source group; source group, destination -> group; (source, destination) + source port -> slot; group + slot
// -> place; place -> device, next hop. A place is a sub-port's number within its source group, 0 to 63, so that "which
// are usable" is one word, and losing any set of them one write for each source group that they serve.

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>
#include <stdbool.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

// Kernel types, of which only these members are read (CO-RE).
#define KERNEL_TYPE __attribute__((preserve_access_index))

struct net {
	__u64 net_cookie;
} KERNEL_TYPE;

typedef struct {
	struct net *net;
} KERNEL_TYPE possible_net_t;

struct net_device {
	int ifindex;
	possible_net_t nd_net;
} KERNEL_TYPE;

#define AF_INET 2
#define AF_INET6 10

#define SOURCES 32 // source groups
#define PLACES 64  // of a source group, as planes
#define PLANES 64
#define SLOTS 128
#define SEGMENTS 128
#define TURNS 4096

// What fragments say of themselves.
#define FRAGMENT_OFFSET 0x1fff

#define DYNAMIC_PORTS 49152 // the first of 16,384, RFC 6335, Section 6
#define DYNAMIC_MASK 16383
#define LABEL_MASK 4095

#define PORT_WORDS 1024 // 64 ports each

// How a packet was not sent; the index of its counter.
enum drop {
	DROP_MALFORMED,   // headers that end too soon
	DROP_PROTOCOL,    // neither IP nor SUNH
	DROP_PORT,        // a destination port of UDP or TCP that is not steered
	DROP_DESTINATION, // not programmed
	DROP_UNREACHABLE, // no usable member in the group
	DROP_UNRESOLVED,  // SUNH: the next hop's MAC address is not known yet
	DROP_LOOP,        // the place is the anchor itself
	DROPS,
};

// An IPv4 address is mapped into IPv6 (RFC 4291, Section 2.5.5.2).
struct address {
	__u32 word[4];
};

struct settings {
	struct address sunh_prefix; // the last 16 bits are the host part
	__u16 sunh_type;            // network byte order; 0: no SUNH
	__u16 per_packet;
	__u32 first_source; // the source group of sources that are no loopback
	__u64 netns;        // SO_NETNS_COOKIE of the agent
};

// The number of a source group; for whoever adopts the maps.
struct source {
	struct address name; // its first loopback; zeros where Forwarding has no source groups
	__u32 used;
};

// The usable places of a source group: of each family, because an IPv4 next hop carries no IPv6.
struct live {
	__u64 v4;
	__u64 v6;
};

// A device of a network namespace, and its places in each source group.
struct device {
	__u64 netns; // SO_NETNS_COOKIE
	__u32 ifindex;
	__u32 reserved;
};

struct device_places {
	__u64 mask[SOURCES];
};

#define PLACE_NEXT_HOP4 1
#define PLACE_NEXT_HOP6 2
#define PLACE_RESOLVED 4 // MACs are known
#define PLACE_DOWN 8     // the control plane said so; for whoever adopts the map

struct place {
	__u32 ifindex;
	__u32 flags;
	__u32 next_hop4;
	__u32 next_hop6[4];
	__u8 macs[12]; // next hop's, own: as they stand in a frame
	__u64 plane;
	__u8 device[16];
};

struct plane {
	__u64 name; // a hash of it; for whoever adopts the map
	__u64 places;
};

struct run {
	__u32 first;
	__u32 width; // 0: none
};

#define SLOT_NONE 0xff
#define SLOT_PLANE 0x80

struct group {
	__u32 id;
	__u32 count;  // of sub-ports of the source group, 0 without a member
	__u32 source; // group, whose places and planes these are
	__u32 reserved;
	__u64 members;
	__u8 slot[SLOTS]; // a place, SLOT_PLANE | plane, or SLOT_NONE
	// All flows are numbers of 32 bits. Segment i is those up to upto[i].
	__u32 upto[SEGMENTS];
	__u8 place[SEGMENTS];
	// The run of a plane, where its segments stand together.
	struct run run[PLANES];
	// The places of all sub-ports of the source group in order, and their widths and weights, 0 for those that are no
	// members: what is picked from when places are down.
	__u32 width[PLACES];
	__u8 member[PLACES];
	__u32 weight[PLACES];
	// The rest is for whoever adopts the map: of slots the share and whether to drain before a move.
	__u32 share[SLOTS];
	__u64 drain[SLOTS / 64];
};

struct target {
	struct address destination;
	__u32 source; // group
};

struct destination {
	__u32 group;
};

struct pair {
	struct address source;
	struct address destination;
};

#define PINS_TABLE 0xffff
#define NOT_COUNTED 0xffffffff

// The source ports of a pair, UDP's and TCP's: 49152 + (first + slot * stride) mod 16384 for slot < count, or a table
// of their own.
struct pins {
	__u16 first;
	__u16 inverse; // of the stride, modulo 16384
	__u16 count;   // PINS_TABLE: look there
	__u16 reserved;
	__u32 counters; // of slot 0, or NOT_COUNTED
	__u32 slots;    // how many are counted
	__u32 group;    // the destination's, so that one look is enough
};

// Ports in the order of (port mod 4096, port div 4096), so that a flow label finds them too.
struct table {
	__u16 key[SLOTS]; // port mod 4096 * 16 + port div 4096
	__u8 slot[SLOTS];
	__u32 count;
};

struct slot_counter {
	__u64 packets;
	__u64 bytes;
	__u64 diverted;
	__u64 reserved; // two to a cache line
};

struct counter {
	__u64 packets;
	__u64 bytes;
};

#define MAP(NAME, TYPE, KEY, VALUE, ENTRIES, FLAGS) \
	struct {                                    \
		__uint(type, BPF_MAP_TYPE_##TYPE);  \
		__uint(max_entries, ENTRIES);       \
		__uint(map_flags, FLAGS);           \
		__type(key, KEY);                   \
		__type(value, VALUE);               \
	} NAME SEC(".maps")

// The sizes of those that grow are settings; here they are the least. clang-format would format the products as
// pointers.
// clang-format off
MAP(fared_settings, ARRAY, __u32, struct settings, 1, 0);
MAP(fared_ports, ARRAY, __u32, __u64, 2 * PORT_WORDS, 0); // a bit for each UDP destination port, then for each TCP one
MAP(fared_names, ARRAY, __u32, struct source, SOURCES, 0);
MAP(fared_sources, HASH, struct address, __u32, 1024, BPF_F_NO_PREALLOC); // loopbacks
MAP(fared_live, ARRAY, __u32, struct live, SOURCES, 0);
MAP(fared_dark, ARRAY, __u32, __u64, SOURCES, 0); // places without a carrier, as the kernel knows at this moment
// Interface indexes of sub-ports whose carrier has changed, for the agent that has loaded the programs. It is neither
// pinned nor adopted.
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096); // or a page
} fared_carriers SEC(".maps");
MAP(fared_devices, HASH, struct device, struct device_places, SOURCES * PLACES, BPF_F_NO_PREALLOC);
MAP(fared_places, ARRAY, __u32, struct place, SOURCES * PLACES, 0);
MAP(fared_planes, ARRAY, __u32, struct plane, SOURCES * PLANES, 0);
MAP(fared_groups, HASH, __u32, struct group, 1, BPF_F_NO_PREALLOC);
MAP(fared_dests, HASH, struct target, struct destination, 1, BPF_F_NO_PREALLOC);
MAP(fared_pins, HASH, struct pair, struct pins, 1, BPF_F_NO_PREALLOC);
MAP(fared_tables, HASH, struct pair, struct table, 1, BPF_F_NO_PREALLOC);
MAP(fared_slots, ARRAY, __u32, struct slot_counter, 1, 0);
MAP(fared_sent, PERCPU_ARRAY, __u32, struct counter, SOURCES * PLACES, 0);
MAP(fared_drops, PERCPU_ARRAY, __u32, __u64, DROPS, 0);
MAP(fared_turns, PERCPU_ARRAY, __u32, __u32, TURNS, 0);
// clang-format on

// A packet, as far as it matters here.
struct packet {
	struct pair pair;
	__u32 ports; // both, as far as they are known: what a flow is told apart by
	__u16 port;  // source port, or SUNH's flow label
	bool flow;   // port is known
	bool tcp;
	bool sunh;
	bool v6;
};

static __always_inline int drop(__u32 why)
{
	__u64 *n = bpf_map_lookup_elem(&fared_drops, &why);
	if (n)
		(*n)++;
	return TC_ACT_SHOT;
}

// mix is a round of MurmurHash3 with its finish, by Austin Appleby, in the public domain.
static __always_inline __u32 mix(__u32 h, __u32 k)
{
	k *= 0xcc9e2d51;
	k = k << 15 | k >> 17;
	h ^= k * 0x1b873593;
	h = h << 13 | h >> 19;
	return h * 5 + 0xe6546b64;
}

static __always_inline __u32 finish(__u32 h)
{
	h ^= h >> 16;
	h *= 0x85ebca6b;
	h ^= h >> 13;
	h *= 0xc2b2ae35;
	return h ^ h >> 16;
}

static __always_inline __u32 hash(const struct packet *p)
{
	__u32 h = 0;
#pragma unroll
	for (int i = 0; i < 4; i++)
		h = mix(h, p->pair.source.word[i]);
#pragma unroll
	for (int i = 0; i < 4; i++)
		h = mix(h, p->pair.destination.word[i]);
	return finish(mix(h, p->ports));
}

// less is a < b as 0 or 1, without a branch: the verifier walks every path. The compiler must not see through it.
static __always_inline __u32 less(__u64 a, __u64 b)
{
	__u64 difference = a - b;
	asm volatile("" : "+r"(difference));
	return difference >> 63;
}

static __always_inline bool steered(bool tcp, __u16 port)
{
	__u32 word = (port >> 6) + tcp * PORT_WORDS;
	__u64 *bits = bpf_map_lookup_elem(&fared_ports, &word);
	return bits && *bits >> (port & 63) & 1;
}

// transport reads the ports, which UDP and TCP have at the same place. A negative return is no error: what is neither,
// a fragment or an extension header, has none to read.
static __always_inline int transport(struct __sk_buff *skb, struct packet *p, __u8 protocol, __u32 at)
{
	__be16 both[2];
	if (protocol != IPPROTO_UDP && protocol != IPPROTO_TCP)
		return -1;
	p->tcp = protocol == IPPROTO_TCP;
	if (bpf_skb_load_bytes(skb, at, both, sizeof(both)))
		return DROP_MALFORMED;
	if (!steered(p->tcp, bpf_ntohs(both[1])))
		return DROP_PORT;
	p->port = bpf_ntohs(both[0]);
	p->flow = true;
	p->ports = (__u32)p->port << 16 | bpf_ntohs(both[1]);
	return -1;
}

// parse fills p, or says why it cannot. It copies what it reads, so that headers need not be linear.
static __always_inline int parse(struct __sk_buff *skb, struct packet *p, const struct settings *set)
{
	__be16 type = skb->protocol;
	if (type == bpf_htons(ETH_P_IP)) {
		__u32 ip[5];
		if (bpf_skb_load_bytes(skb, ETH_HLEN, ip, sizeof(ip)))
			return DROP_MALFORMED;
		p->pair.source.word[2] = p->pair.destination.word[2] = bpf_htonl(0xffff);
		p->pair.source.word[3] = ip[3];
		p->pair.destination.word[3] = ip[4];
		__u32 first = bpf_ntohl(ip[0]), second = bpf_ntohl(ip[1]), third = bpf_ntohl(ip[2]);
		if (!(second & FRAGMENT_OFFSET))
			return transport(skb, p, third >> 16, ETH_HLEN + (first >> 24 & 15) * 4);
	} else if (type == bpf_htons(ETH_P_IPV6)) {
		__u32 ip[10];
		if (bpf_skb_load_bytes(skb, ETH_HLEN, ip, sizeof(ip)))
			return DROP_MALFORMED;
#pragma unroll
		for (int i = 0; i < 4; i++) {
			p->pair.source.word[i] = ip[2 + i];
			p->pair.destination.word[i] = ip[6 + i];
		}
		p->v6 = true;
		return transport(skb, p, bpf_ntohl(ip[1]) >> 8, ETH_HLEN + sizeof(ip));
	} else if (type == set->sunh_type && type) {
		__u32 sunh[2];
		if (bpf_skb_load_bytes(skb, ETH_HLEN, sunh, sizeof(sunh)))
			return DROP_MALFORMED;
		p->pair.source = p->pair.destination = set->sunh_prefix;
		__u32 hosts = bpf_ntohl(sunh[1]);
		p->pair.source.word[3] |= bpf_htonl(hosts >> 16);
		p->pair.destination.word[3] |= bpf_htonl(hosts & 0xffff);
		p->port = bpf_ntohl(sunh[0]) & LABEL_MASK;
		p->flow = p->sunh = true;
		p->ports = p->port;
	} else {
		return DROP_PROTOCOL;
	}
	return -1;
}

// slot_of finds the slot whose port the packet has, SLOTS when there is none.
static __always_inline __u32 slot_of(const struct packet *p, const struct pins *pins)
{
	if (pins->count != PINS_TABLE) {
		__u32 mask = p->sunh ? LABEL_MASK : DYNAMIC_MASK;
		if (!p->sunh && p->port < DYNAMIC_PORTS)
			return SLOTS;
		// The port less 49152, or 4096 times anything: both are the same modulo the mask.
		__u32 slot = ((__u32)p->port - pins->first) * pins->inverse & mask;
		return slot < pins->count && slot < SLOTS ? slot : SLOTS;
	}
	struct table *t = bpf_map_lookup_elem(&fared_tables, &p->pair);
	if (!t)
		return SLOTS;
	__u32 key = (p->port & LABEL_MASK) << 4;
	if (!p->sunh)
		key |= p->port >> 12;
	__u32 at = 0;
#pragma unroll
	for (__u32 step = SLOTS / 2; step; step /= 2)
		at += less(t->key[(at + step - 1) & (SLOTS - 1)], key) * step;
	at &= SLOTS - 1;
	__u32 found = t->key[at];
	if (p->sunh)
		found &= LABEL_MASK << 4;
	return at < t->count && found == key && t->slot[at] < SLOTS ? t->slot[at] : SLOTS;
}

// segment is the place of a number.
static __always_inline __u32 segment(const struct group *g, __u32 number)
{
	__u32 at = 0;
#pragma unroll
	for (__u32 step = SEGMENTS / 2; step; step /= 2)
		at += less(g->upto[(at + step - 1) & (SEGMENTS - 1)], number) * step;
	return g->place[at & (SEGMENTS - 1)] & (PLACES - 1);
}

// weigh picks among the usable members by weight, PLACES when there is none. It is not static, so that the verifier
// walks it once.
__noinline __u32 weigh(const struct group *g, __u32 number, __u64 usable)
{
	__u64 sum = 0;
	if (!g)
		return PLACES;
	for (__u32 i = 0; i < PLACES; i++)
		sum += (__u64)g->width[i] & -(usable >> (g->member[i] & (PLACES - 1)) & 1);
	if (!sum)
		return PLACES;
	__u64 target = (number * sum) >> 32, so_far = 0;
	__u32 passed = 0;
	for (__u32 i = 0; i < PLACES; i++) {
		so_far += (__u64)g->width[i] & -(usable >> (g->member[i] & (PLACES - 1)) & 1);
		passed += less(so_far, target + 1);
	}
	return g->member[passed & (PLACES - 1)] & (PLACES - 1);
}

// pick is the usable place of a number. A number whose place is down gets others in turn, so that flows which were
// moved stay where they are when still another place fails; who finds none that way is dealt over those that are left.
static __always_inline __u32 pick(const struct group *g, __u32 number, __u64 usable)
{
#pragma unroll
	for (int i = 0; i < 4; i++) {
		__u32 place = segment(g, number);
		if (usable >> place & 1)
			return place;
		number = finish(number + 0x9e3779b9);
	}
	return weigh(g, number, usable);
}

// A walk along the sub-ports of a group as it is without those that are down.
struct walk {
	const struct group *group;
	__u64 usable, weights;
	__u64 before;       // weights of earlier sub-ports
	__u64 from, begin;  // ends of their homes and widths
	__u64 at, released; // in homes, then in what they release
	__u32 place;
	__u32 releasing;
};

// pass is one step of a walk. First it finds the home of a number: its sub-port keeps the end of it, up to its width.
// What it releases is received by those whose widths exceed their homes, in order. That is homes in group.go.
static long pass(__u32 i, struct walk *w)
{
	const struct group *g = w->group;
	i &= PLACES - 1;
	__u32 place = g->member[i] & (PLACES - 1);
	__u64 upto = (((__u64)i + 1) << 32) / g->count, home = upto - w->from;
	w->before += (__u64)g->weight[i] & -(w->usable >> place & 1);
	__u64 end = (w->before << 32) / w->weights, width = end - w->begin;
	__u64 spare = home > width ? home - width : 0, room = width > home ? width - home : 0;
	w->begin = end;
	if (!w->releasing) {
		if (w->at < room) {
			w->place = place;
			return 1;
		}
		w->at -= room;
	} else if (w->at < upto) {
		__u64 offset = w->at - w->from;
		if (offset >= spare) {
			w->place = place;
			return 1;
		}
		w->at = w->released + offset;
		w->releasing = 0;
		return 1;
	}
	w->released += spare;
	w->from = upto;
	return 0;
}

// settle is the place of a number in the group without the members that are down, PLACES when none is left: the place
// in the group that the agent writes next, so that a flow moves once. It is not static, so that the verifier walks it
// once.
__noinline __u32 settle(const struct group *g, __u32 number, __u64 usable)
{
	struct walk w = {.usable = usable, .at = number, .place = PLACES, .releasing = 1};
	if (!g)
		return PLACES;
	for (__u32 i = 0; i < PLACES; i++)
		w.weights += (__u64)g->weight[i] & -(usable >> (g->member[i] & (PLACES - 1)) & 1);
	if (!w.weights)
		return PLACES;
	w.group = g;
	bpf_loop(g->count, pass, &w, 0);
	if (w.place == PLACES) {
		w.before = w.from = w.begin = 0;
		bpf_loop(g->count, pass, &w, 0);
	}
	return w.place;
}

// turn is the next number of a sequence that is spread evenly: multiples of the golden ratio. Flows have sequences of
// their own, as far as there are enough, and each begins elsewhere.
static __always_inline __u32 turn(__u32 hash)
{
	__u32 i = hash & (TURNS - 1);
	__u32 *n = bpf_map_lookup_elem(&fared_turns, &i);
	if (!n)
		return hash;
	return (*n)++ * 0x9e3779b9 + i * (__u32)(0x100000000 / TURNS);
}

// source_of is the source group of a packet.
static __always_inline __u32 source_of(const struct packet *p, const struct settings *set)
{
	__u32 *number = bpf_map_lookup_elem(&fared_sources, &p->pair.source);
	return number ? *number : set->first_source;
}

// choose_among is the place of a packet among the usable ones of its group, PLACES when there is none.
static __always_inline __u32 choose_among(const struct packet *p, const struct group *g, __u32 slot, const struct settings *set, __u64 usable, bool *diverted)
{
	__u32 own = slot < SLOTS ? g->slot[slot & (SLOTS - 1)] : SLOT_NONE;
	if (own < PLACES) {
		if (usable >> own & 1)
			return own;
		*diverted = true;
	}
	__u32 number = hash(p);
	// TCP takes reordering for loss (RFC 5681, Section 3.2), so a flow of it is not sprayed: its hash chooses for all
	// of it.
	if (set->per_packet && !p->tcp)
		number = turn(number);
	if (own != SLOT_NONE && own & SLOT_PLANE) {
		__u32 i = own & (PLANES - 1);
		const struct run *run = &g->run[i];
		if (run->width) {
			__u32 place = segment(g, run->first + (__u32)((__u64)number * run->width >> 32));
			if (usable >> place & 1)
				return place;
		}
		i += (g->source & (SOURCES - 1)) * PLANES;
		struct plane *plane = bpf_map_lookup_elem(&fared_planes, &i);
		if (plane && plane->places & usable)
			return weigh(g, finish(number), plane->places & usable);
		*diverted = true;
	}
	if (!(g->members & ~usable))
		return segment(g, number);
	if (set->per_packet)
		return pick(g, number, usable);
	__u32 place = settle(g, number, usable);
	return place < PLACES ? place : weigh(g, number, usable); // the agent writes the group at this moment
}

// choose is the place of a packet, counted over all source groups.
static __always_inline __u32 choose(const struct packet *p, const struct group *g, __u32 slot, const struct settings *set, bool *diverted)
{
	__u32 source = g->source & (SOURCES - 1);
	struct live *live = bpf_map_lookup_elem(&fared_live, &source);
	__u64 *dark = bpf_map_lookup_elem(&fared_dark, &source);
	if (!live || !dark)
		return SOURCES * PLACES; // cannot be
	__u64 usable = (p->sunh ? live->v4 | live->v6 : p->v6 ? live->v6 : live->v4) & ~*dark & g->members;
	__u32 place = choose_among(p, g, slot, set, usable, diverted);
	return place < PLACES ? source * PLACES + place : SOURCES * PLACES;
}

static __always_inline void count(struct __sk_buff *skb, __u32 place, __u32 counters, bool diverted)
{
	__u64 packets = skb->gso_segs ? skb->gso_segs : 1, bytes = skb->wire_len;
	struct counter *sent = bpf_map_lookup_elem(&fared_sent, &place);
	if (sent) {
		sent->packets += packets;
		sent->bytes += bytes;
	}
	if (counters == NOT_COUNTED)
		return;
	struct slot_counter *of = bpf_map_lookup_elem(&fared_slots, &counters);
	if (!of)
		return;
	__sync_fetch_and_add(&of->packets, packets);
	__sync_fetch_and_add(&of->bytes, bytes);
	if (diverted)
		__sync_fetch_and_add(&of->diverted, packets);
}

static __always_inline int send(struct __sk_buff *skb, const struct packet *p, const struct place *to)
{
	if (p->sunh) {
		if (bpf_skb_store_bytes(skb, 0, to->macs, sizeof(to->macs), 0))
			return drop(DROP_MALFORMED);
		return bpf_redirect(to->ifindex, 0);
	}
	struct bpf_redir_neigh hop = {};
	if (!p->v6 && to->flags & PLACE_NEXT_HOP4) {
		hop.nh_family = AF_INET;
		hop.ipv4_nh = to->next_hop4;
	} else {
		hop.nh_family = AF_INET6;
		__builtin_memcpy(hop.ipv6_nh, to->next_hop6, sizeof(hop.ipv6_nh));
	}
	return bpf_redirect_neigh(to->ifindex, &hop, sizeof(hop), 0);
}

SEC("tcx/egress")
int fared_steer(struct __sk_buff *skb)
{
	struct packet p = {};
	__u32 zero = 0, counters = NOT_COUNTED, slot = SLOTS;
	bool diverted = false;

	struct settings *set = bpf_map_lookup_elem(&fared_settings, &zero);
	if (!set)
		return TC_ACT_SHOT; // an array of one: cannot be
	int why = parse(skb, &p, set);
	if (why >= 0)
		return drop(why);
	__u32 id;
	struct pins *pins = p.flow ? bpf_map_lookup_elem(&fared_pins, &p.pair) : 0;
	if (pins) {
		id = pins->group;
		slot = slot_of(&p, pins);
		if (slot < pins->slots && pins->counters != NOT_COUNTED)
			counters = pins->counters + slot;
	} else {
		struct target key = {.destination = p.pair.destination, .source = source_of(&p, set)};
		struct destination *to = bpf_map_lookup_elem(&fared_dests, &key);
		if (!to)
			return drop(DROP_DESTINATION);
		id = to->group;
	}
	struct group *g = bpf_map_lookup_elem(&fared_groups, &id);
	if (!g)
		return drop(DROP_UNREACHABLE);
	__u32 number = choose(&p, g, slot, set, &diverted);
	// The memory of a group that was just replaced may serve another one by now, with other places.
	if (g->id != id) {
		g = bpf_map_lookup_elem(&fared_groups, &id);
		if (!g)
			return drop(DROP_UNREACHABLE);
		diverted = false;
		number = choose(&p, g, slot, set, &diverted);
	}
	struct place *place = bpf_map_lookup_elem(&fared_places, &number);
	if (!place)
		return drop(DROP_UNREACHABLE);
	if (place->ifindex == skb->ifindex)
		return drop(DROP_LOOP);
	if (p.sunh && !(place->flags & PLACE_RESOLVED))
		return drop(DROP_UNRESOLVED);
	count(skb, number, counters, diverted);
	return send(skb, &p, place);
}

// mark marks the places of a device as dark, or removes the mark. It returns false for a device that is no sub-port.
static __always_inline bool mark(__u64 netns, __u32 ifindex, bool on)
{
	struct device key = {.netns = netns, .ifindex = ifindex};
	struct device_places *places = bpf_map_lookup_elem(&fared_devices, &key);
	if (!places)
		return false;
#pragma unroll
	for (int i = 0; i < SOURCES; i++) {
		__u32 source = i;
		__u64 mask = places->mask[i];
		__u64 *dark = mask ? bpf_map_lookup_elem(&fared_dark, &source) : 0;
		if (!dark)
			continue;
		if (on)
			__sync_fetch_and_and(dark, ~mask);
		else
			__sync_fetch_and_or(dark, mask);
	}
	return true;
}

// carrier marks the places of a device, and wakes the agent. It runs after the kernel's change, which the agent would
// otherwise not see. A full ring has a record that wakes the agent.
static __always_inline int carrier(const struct net_device *dev, bool on)
{
	__u32 ifindex = dev->ifindex;
	if (mark(dev->nd_net.net->net_cookie, ifindex, on))
		bpf_ringbuf_output(&fared_carriers, &ifindex, sizeof(ifindex), 0);
	return 0;
}

SEC("fexit/netif_carrier_off")
int fared_carrier_off(unsigned long long *arguments)
{
	return carrier((const struct net_device *)arguments[0], false);
}

SEC("fexit/netif_carrier_on")
int fared_carrier_on(unsigned long long *arguments)
{
	return carrier((const struct net_device *)arguments[0], true);
}

// What the kernel announces of a device: the headers of a netlink message.
struct announcement {
	__u32 length;
	__u16 type;
	__u16 flags;
	__u32 sequence;
	__u32 port;
	__u8 family;
	__u8 reserved;
	__u16 kind;
	__u32 ifindex;
	__u32 state;
};

#define RTM_NEWLINK 16
#define IFF_UP 1
#define IFF_LOWER_UP (1 << 16)

// fared_announced marks the places of a device when the kernel sends the agent its event, before the agent runs.
SEC("socket")
int fared_announced(struct __sk_buff *skb)
{
	struct announcement a;
	__u32 zero = 0, up = IFF_UP | IFF_LOWER_UP;
	struct settings *set = bpf_map_lookup_elem(&fared_settings, &zero);
	if (set && !bpf_skb_load_bytes(skb, 0, &a, sizeof(a)) && a.type == RTM_NEWLINK)
		mark(set->netns, a.ifindex, (a.state & up) == up);
	return -1; // all of the message
}

char _license[] SEC("license") = "Dual MIT/GPL";

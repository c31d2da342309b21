//go:build ignore

// The framing program writes into each data segment of a flow its place in its message, and reports the options of
// received segments to user space (option.go draws the option).
//
// User space frames its stream in pieces that fit into a segment: before it writes a piece, it marks the piece's
// sequence numbers, place and CRC. A segment is looked up by its sequence number, so the option of a retransmitted
// segment is correct too.

#include <linux/bpf.h>
#include <linux/tcp.h>
#include <stdbool.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define AF_INET 2
#define AF_INET6 10

#define FLOWS 256
#define MARKS 2048

#define KIND 253    // RFC 4727: for experiments
#define EXID 0xfb54 // RFC 6994: the experiment
#define VERSION 1
#define TIMESTAMP 0x20
#define MORE 0x10
#define RTR 0x08
#define RTR_ACK 0x04

// Lengths of the option: without timestamps and immediate data, with immediate data, with timestamps, with both.
#define PLAIN 16
#define PLAIN_IMMEDIATE 20
#define STAMPED 24
#define STAMPED_IMMEDIATE 28
#define OPTIONS 40 // space for all options of a segment

// InfiniBand's opcodes of messages with data: SEND and WRITE to LAST_DATA, READ responses from FIRST_ANSWER to
// LAST_ANSWER.
#define LAST_DATA 0x0b
#define FIRST_ANSWER 0x0d
#define LAST_ANSWER 0x10

// A piece of a message.
struct mark {
	__u32 start; // the sequence number of its first byte
	__u32 icrc;
	__u32 immediate;
	__u32 mbo_seg;
	__u16 length;
	__u16 msn;
	__u8 opcode;
	__u8 flags; // MORE
	__u8 extra; // bytes of immediate data: 0 or 4
	__u8 reserved;
};

// The latest pieces of a stream.
struct stream {
	__u32 head; // the number of marks; the latest is marks[(head - 1) % MARKS]
	__u32 reserved;
	struct mark marks[MARKS];
};

// Bits of flow.ready.
#define HEARD 1 // the peer has sent rtr: it can place segments by the option
#define OWED 2  // the peer's latest option has rtr: the next option answers it with rtr_ack
#define ACKED 4 // the peer has sent rtr_ack: this end need not repeat rtr

// The state of a socket.
struct flow {
	__u32 sent; // the sequence number of the first byte of the outgoing stream, and of the incoming one
	__u32 received;
	__u32 use; // user space marks its pieces
	__u32 stream;
	__u32 base; // bytes of timestamps that the kernel puts into each segment
	__u32 echo; // the peer's timestamp to echo
	__u32 ready;
};

// A received segment with the option.
struct segment {
	__u32 remote[4]; // an IPv4 address is in the first word
	__u32 family;
	__u32 remote_port;
	__u32 local_port;
	__u32 offset; // of its first byte in the stream
	__u32 length; // bytes of the stream
	__u8 option[STAMPED_IMMEDIATE];
};

struct settings {
	__u32 local[4];
	__u32 family;
	__u32 port;
	__u32 segments; // user space wants the received segments
};

enum count {
	COUNT_WRITTEN,
	COUNT_NO_ROOM,  // SACK blocks take the room
	COUNT_BATCH,    // it leaves the host as a batch, whose segments would all have the same option
	COUNT_UNMARKED, // not in a piece that is still marked
	COUNT_CUT,      // a part of a piece, whose CRC is not known
	COUNT_EARLY,    // of a message with data, before the peer's rtr
	COUNT_RECEIVED,
	COUNT_FOREIGN, // received with another version of the option
	COUNT_LOST,    // user space is too slow for the received segments
	COUNTS,
};

const volatile struct settings scope;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, FLOWS);
	__type(key, __u32);
	__type(value, struct stream);
} streams SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct flow);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} arrived SEC(".maps");

// Only so that Go has the type.
const struct segment *unused_segment __attribute__((unused));

struct option {
	__u8 kind, length;
	__u16 exid;
	__u8 flags, opcode;
	__u16 msn;
	__u32 mbo_seg;
	__u32 icrc;
	__u32 rest[(OPTIONS - PLAIN) / 4]; // timestamp and timestamp_echo with TIMESTAMP; then the immediate data, if any
} __attribute__((packed));

static __always_inline void add(__u32 i)
{
	__u64 *n = bpf_map_lookup_elem(&counts, &i);
	if (n)
		(*n)++;
}

// The verifier takes no pointer into the context that has been computed, as by a choice of which field to read. So each
// is read.
#define READ(v, field)      \
	__u32 v = s->field; \
	asm volatile("" : "+r"(v))

static __always_inline bool ours(struct bpf_sock_ops *s)
{
	READ(local, local_port);
	READ(remote, remote_port);
	READ(ip4, local_ip4);
	READ(a, local_ip6[0]);
	READ(b, local_ip6[1]);
	READ(c, local_ip6[2]);
	READ(d, local_ip6[3]);
	if (s->family != scope.family || (local != scope.port && bpf_ntohl(remote) != scope.port))
		return false;
	if (scope.family == AF_INET)
		return ip4 == scope.local[0];
	return a == scope.local[0] && b == scope.local[1] && c == scope.local[2] && d == scope.local[3];
}

static __always_inline void established(struct bpf_sock_ops *s)
{
	struct bpf_sock *sk = s->sk;
	if (!sk || !ours(s))
		return;
	struct flow *f = bpf_sk_storage_get(&flows, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!f)
		return;
	f->sent = s->snd_nxt;
	f->received = s->rcv_nxt;
	bpf_sock_ops_cb_flags_set(s, s->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG | BPF_SOCK_OPS_PARSE_UNKNOWN_HDR_OPT_CB_FLAG);
}

static __always_inline struct flow *flow_of(struct bpf_sock_ops *s)
{
	struct bpf_sock *sk = s->sk;
	if (!sk)
		return NULL;
	return bpf_sk_storage_get(&flows, sk, 0, 0);
}

// reserve takes the room of the longest option that fits: SACK blocks come first. The sequence number, and so the need
// for immediate data, is not known yet. Segments without data have no option, but the room counts when TCP asks for the
// size of its options.
static __always_inline void reserve(struct bpf_sock_ops *s)
{
	if (!s->skb_len && s->args[0] != BPF_WRITE_HDR_TCP_CURRENT_MSS)
		return;
	struct flow *f = flow_of(s);
	if (!f || !f->use)
		return;
	if (!f->base && !bpf_reserve_hdr_opt(s, STAMPED_IMMEDIATE, 0))
		return;
	if (bpf_reserve_hdr_opt(s, PLAIN_IMMEDIATE, 0) && bpf_reserve_hdr_opt(s, PLAIN, 0) && s->skb_len)
		add(COUNT_NO_ROOM);
}

// find copies the mark of the piece with a sequence number. It does not look at marks that may be being overwritten.
static __always_inline bool find(struct stream *st, __u32 seq, struct mark *m)
{
	__u32 head = *(volatile __u32 *)&st->head;
	__u32 n = head < MARKS - 1 ? head : MARKS - 1;
	__u32 low = head - n, at = 0;
	if (!n)
		return false;
		// Without branches: the verifier walks each combination of them.
#pragma unroll
	for (__u32 step = MARKS / 2; step; step /= 2) {
		__s32 behind = seq - st->marks[(low + at + step) & (MARKS - 1)].start, within = at + step - n;
		__u32 mask = ~(behind >> 31) & (within >> 31);
		asm volatile("" : "+r"(mask));
		at += step & mask;
	}
	*m = st->marks[(low + at) & (MARKS - 1)];
	if (*(volatile __u32 *)&st->head - (low + at) >= MARKS)
		return false; // overwritten since
	return seq - m->start < m->length;
}

static __always_inline void write(struct bpf_sock_ops *s)
{
	struct tcphdr *th = s->skb_data;
	struct flow *f = flow_of(s);
	if (!f || !f->use || (void *)(th + 1) > s->skb_data_end)
		return;
	__u32 header = th->doff * 4, seq = bpf_ntohl(th->seq);
	if (s->skb_len <= header)
		return;
	__u32 data = s->skb_len - header, options = header - sizeof(*th);
	if (data + options - f->base > s->mss_cache) {
		add(COUNT_BATCH);
		return;
	}
	__u32 index = f->stream;
	struct stream *st = bpf_map_lookup_elem(&streams, &index);
	struct mark m;
	if (!st || !find(st, seq, &m)) {
		add(COUNT_UNMARKED);
		return;
	}
	if (seq != m.start || data != m.length) {
		add(COUNT_CUT);
		return;
	}
	bool placed = m.opcode <= LAST_DATA || (m.opcode >= FIRST_ANSWER && m.opcode <= LAST_ANSWER);
	if (placed && !(f->ready & HEARD)) {
		add(COUNT_EARLY);
		return;
	}
	struct option o = {.kind = KIND,
		.exid = bpf_htons(EXID),
		.flags = VERSION << 6 | (m.flags & MORE),
		.opcode = m.opcode,
		.msn = bpf_htons(m.msn),
		.mbo_seg = bpf_htonl(m.mbo_seg),
		.icrc = bpf_htonl(m.icrc)};
	if (!(f->ready & ACKED))
		o.flags |= RTR;
	if (f->ready & OWED)
		o.flags |= RTR_ACK;
	__u32 extra = m.extra & 4;
	if (!f->base) {
		o.length = STAMPED | extra;
		o.flags |= TIMESTAMP;
		o.rest[0] = bpf_htonl((__u32)(bpf_ktime_get_ns() / 1000000));
		o.rest[1] = f->echo;
		o.rest[2] = bpf_htonl(m.immediate);
		if (!bpf_store_hdr_opt(s, &o, STAMPED | extra, 0)) {
			add(COUNT_WRITTEN);
			return;
		}
		o.flags &= ~TIMESTAMP;
	}
	o.length = PLAIN | extra;
	o.rest[0] = bpf_htonl(m.immediate);
	add(bpf_store_hdr_opt(s, &o, PLAIN | extra, 0) ? COUNT_NO_ROOM : COUNT_WRITTEN);
}

static __always_inline void parse(struct bpf_sock_ops *s)
{
	struct option o = {.kind = KIND, .length = 4, .exid = bpf_htons(EXID)};
	struct tcphdr *th = s->skb_data;
	struct flow *f = flow_of(s);
	if (!f || (void *)(th + 1) > s->skb_data_end)
		return;
	__u32 header = th->doff * 4, seq = bpf_ntohl(th->seq);
	if (s->skb_len <= header || bpf_load_hdr_opt(s, &o, sizeof(o), 0) < PLAIN)
		return;
	if (o.flags >> 6 != VERSION) {
		add(COUNT_FOREIGN);
		return;
	}
	add(COUNT_RECEIVED);
	// Flags repeat until they are acknowledged, so a lost segment delays the agreement and cannot prevent it.
	if (o.flags & RTR)
		f->ready |= HEARD | OWED;
	else
		f->ready &= ~OWED;
	if (o.flags & RTR_ACK)
		f->ready |= ACKED;
	// RFC 7323, Section 4.3: the timestamp of a segment behind a gap, and an older one, are not echoed.
	if ((o.flags & TIMESTAMP) && o.length >= STAMPED && (__s32)(seq - s->rcv_nxt) <= 0 &&
		(!f->echo || (__s32)(bpf_ntohl(o.rest[0]) - bpf_ntohl(f->echo)) >= 0))
		f->echo = o.rest[0];
	if (!scope.segments)
		return;
	struct segment *r = bpf_ringbuf_reserve(&arrived, sizeof(*r), 0);
	if (!r) {
		add(COUNT_LOST);
		return;
	}
	READ(ip4, remote_ip4);
	READ(a, remote_ip6[0]);
	READ(b, remote_ip6[1]);
	READ(c, remote_ip6[2]);
	READ(d, remote_ip6[3]);
	bool v4 = scope.family == AF_INET;
	r->family = scope.family;
	r->remote[0] = v4 ? ip4 : a;
	r->remote[1] = v4 ? 0 : b;
	r->remote[2] = v4 ? 0 : c;
	r->remote[3] = v4 ? 0 : d;
	r->remote_port = bpf_ntohl(s->remote_port);
	r->local_port = s->local_port;
	r->offset = seq - f->received;
	r->length = s->skb_len - header;
	__builtin_memcpy(r->option, &o, sizeof(r->option));
	bpf_ringbuf_submit(r, 0);
}

SEC("sockops")
int fared_framing(struct bpf_sock_ops *s)
{
	switch (s->op) {
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		established(s);
		break;
	case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
		reserve(s);
		break;
	case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
		write(s);
		break;
	case BPF_SOCK_OPS_PARSE_HDR_OPT_CB:
		parse(s);
		break;
	}
	return 1;
}

char _license[] SEC("license") = "Dual MIT/GPL";

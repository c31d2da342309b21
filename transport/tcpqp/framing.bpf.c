//go:build ignore

// The framing program: it writes into each data segment of a flow which part of which message it carries, and tells user space
// what segments that came in say (option.go draws the option).
//
// User space frames its stream: before it writes a message it marks where that begins and ends. A segment is looked up by its
// sequence number, so one that is sent again, or cut anew, says the right thing too.

#include <linux/bpf.h>
#include <linux/tcp.h>
#include <stdbool.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define AF_INET 2
#define AF_INET6 10

#define FLOWS 256
#define MARKS 512

#define KIND 253     // RFC 4727: for experiments
#define EXID 0xfb54  // RFC 6994: whose
#define SHORT 28     // the option's length without timestamps: with the kernel's own all 40 bytes are taken
#define LONG 36
#define TIMESTAMP 0x20
#define MORE 0x10

// A message of the stream.
struct mark {
	__u64 address;
	__u32 key;
	__u32 start;     // the sequence number of its first byte
	__u32 length;    // bytes, with its frame's header
	__u32 icrc;      // of a message that is one segment; 0: none
	__u16 msn;
	__u16 piece;     // how long its segments are, but for the last
	__u8 opcode[4];  // of a first, middle, last and only segment
};

// The last messages of a stream.
struct stream {
	__u32 head;      // how many have been marked; the last is marks[(head - 1) % MARKS]
	__u32 reserved;
	struct mark marks[MARKS];
};

// What is known of a socket.
struct flow {
	__u32 sent;      // the sequence number of the first byte of the stream out, and in
	__u32 received;
	__u32 use;       // user space marks its messages
	__u32 stream;
	__u32 base;      // bytes of options that the kernel puts into each segment
	__u32 echo;      // the peer's last timestamp
};

// A segment that came in with the option.
struct segment {
	__u32 remote[4]; // an IPv4 address is in the first word
	__u32 family;
	__u32 remote_port;
	__u32 local_port;
	__u32 offset;    // of its first byte in the stream
	__u32 length;    // bytes of the stream that it carries
	__u8 option[LONG];
};

struct settings {
	__u32 local[4];
	__u32 family;
	__u32 port;
	__u32 segments;  // user space wants to know of those that come in
};

enum count {
	COUNT_WRITTEN,
	COUNT_NO_ROOM,   // SACK blocks take it
	COUNT_BATCH,     // it leaves the host as a batch, whose segments would all say the same
	COUNT_UNMARKED,  // not in a message that is still marked, or in two
	COUNT_RECEIVED,
	COUNT_LOST,      // user space is too slow for what comes in
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
	union {
		struct {
			__u64 address;
			__u32 key;
		} __attribute__((packed)) bare;
		struct {
			__u32 timestamp, echo;
			__u64 address;
			__u32 key;
		} __attribute__((packed)) stamped;
	};
} __attribute__((packed));

static __always_inline void add(__u32 i)
{
	__u64 *n = bpf_map_lookup_elem(&counts, &i);
	if (n)
		(*n)++;
}

// The verifier takes no pointer into the context that has been computed, as by a choice of which field to read. So each is read.
#define READ(v, field)                            \
	__u32 v = s->field;                       \
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
	bpf_sock_ops_cb_flags_set(s, s->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG |
				  BPF_SOCK_OPS_PARSE_UNKNOWN_HDR_OPT_CB_FLAG);
}

static __always_inline struct flow *flow_of(struct bpf_sock_ops *s)
{
	struct bpf_sock *sk = s->sk;
	if (!sk)
		return NULL;
	return bpf_sk_storage_get(&flows, sk, 0, 0);
}

// Segments without data say nothing, but the room counts when TCP asks how much fits beside the options.
static __always_inline void reserve(struct bpf_sock_ops *s)
{
	if (!s->skb_len && s->args[0] != BPF_WRITE_HDR_TCP_CURRENT_MSS)
		return;
	struct flow *f = flow_of(s);
	if (!f || !f->use)
		return;
	if (bpf_reserve_hdr_opt(s, LONG, 0) && bpf_reserve_hdr_opt(s, SHORT, 0) && s->skb_len)
		add(COUNT_NO_ROOM);
}

// find copies the mark of the message that a sequence number is in. Marks are never looked at that may be being overwritten.
static __always_inline bool find(struct stream *st, __u32 seq, struct mark *m)
{
	__u32 head = *(volatile __u32 *)&st->head;
	__u32 n = head < MARKS - 1 ? head : MARKS - 1;
	__u32 low = head - n, at = 0;
	if (!n)
		return false;
#pragma unroll
	for (__u32 step = MARKS / 2; step; step /= 2) {
		if (at + step < n && (__s32)(seq - st->marks[(low + at + step) & (MARKS - 1)].start) >= 0)
			at += step;
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
	__u32 offset = seq - m.start, left = m.length - offset;
	if (data > left) {
		add(COUNT_UNMARKED);
		return;
	}
	struct option o = { .kind = KIND, .length = LONG, .exid = bpf_htons(EXID), .flags = TIMESTAMP, .msn = bpf_htons(m.msn) };
	if (data < left)
		o.flags |= MORE;
	o.opcode = m.opcode[offset ? (data < left ? 1 : 2) : (data < left ? 0 : 3)];
	o.mbo_seg = bpf_htonl(offset << 8 | ((m.piece ? offset / m.piece : 0) & 0xff));
	if (data == m.length)
		o.icrc = bpf_htonl(m.icrc);
	o.stamped.timestamp = bpf_htonl((__u32)(bpf_ktime_get_ns() / 1000000));
	o.stamped.echo = f->echo;
	o.stamped.address = bpf_cpu_to_be64(m.address);
	o.stamped.key = bpf_htonl(m.key);
	if (!bpf_store_hdr_opt(s, &o, LONG, 0)) {
		add(COUNT_WRITTEN);
		return;
	}
	o.length = SHORT;
	o.flags &= ~TIMESTAMP;
	o.bare.address = bpf_cpu_to_be64(m.address);
	o.bare.key = bpf_htonl(m.key);
	if (!bpf_store_hdr_opt(s, &o, SHORT, 0))
		add(COUNT_WRITTEN);
}

static __always_inline void parse(struct bpf_sock_ops *s)
{
	struct option o = { .kind = KIND, .length = 4, .exid = bpf_htons(EXID) };
	struct tcphdr *th = s->skb_data;
	struct flow *f = flow_of(s);
	if (!f || (void *)(th + 1) > s->skb_data_end)
		return;
	__u32 header = th->doff * 4, seq = bpf_ntohl(th->seq);
	if (s->skb_len <= header || bpf_load_hdr_opt(s, &o, sizeof(o), 0) < SHORT)
		return;
	add(COUNT_RECEIVED);
	if ((o.flags & TIMESTAMP) && o.length == LONG)
		f->echo = o.stamped.timestamp;
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
	__builtin_memcpy(r->option, &o, LONG);
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

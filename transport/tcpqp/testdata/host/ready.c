/* Runs the framing program for one segment a line, each with the given bits of flow.ready:
 *   write READY OPCODE   the flags of the option that a segment of the opcode gets, or "none"
 *   parse READY FLAGS    the bits of flow.ready after a segment whose option has the flags, with the version in their bits 6 and 7
 * All numbers are hexadecimal. */
#include "../../framing.bpf.c"

#include <stdio.h>

unsigned char host_option[40];
int host_length;
static struct flow flow;
static struct stream stream;
static __u64 count;

void *host_lookup(void *map)
{
	if (map == (void *)&flows)
		return &flow;
	return map == (void *)&streams ? (void *)&stream : (void *)&count;
}

int main(void)
{
	enum { DATA = 100 };
	char what[8];
	unsigned ready, value;
	while (scanf("%7s %x %x", what, &ready, &value) == 3) {
		struct tcphdr header = {.doff = sizeof header / 4, .seq = bpf_htonl(1000)};
		struct bpf_sock_ops s = {.sk = (void *)&flow,
			.skb_data = &header,
			.skb_data_end = &header + 1,
			.skb_len = sizeof header + DATA,
			.mss_cache = 1400,
			.rcv_nxt = 1000};
		flow = (struct flow){.use = 1, .ready = ready};
		memset(host_option, 0, sizeof host_option);
		if (strcmp(what, "write") == 0) {
			stream.head = 1;
			stream.marks[0] = (struct mark){.start = 1000, .length = DATA, .opcode = (__u8)value};
			host_length = 0;
			s.op = BPF_SOCK_OPS_WRITE_HDR_OPT_CB;
			fared_framing(&s);
			if (host_length == 0)
				puts("none");
			else
				printf("%x\n", ((struct option *)host_option)->flags);
		} else {
			struct option o = {.kind = KIND, .length = STAMPED, .exid = bpf_htons(EXID), .flags = (__u8)value};
			memcpy(host_option, &o, sizeof o);
			host_length = STAMPED;
			s.op = BPF_SOCK_OPS_PARSE_HDR_OPT_CB;
			fared_framing(&s);
			printf("%x\n", flow.ready);
		}
	}
	return 0;
}

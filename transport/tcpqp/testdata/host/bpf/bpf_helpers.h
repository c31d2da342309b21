/* The kernel's helpers for a framing program that runs as part of a process: one flow, one stream, and one option. */
#include <stddef.h>
#include <string.h>

#define SEC(name) __attribute__((unused))
#undef __always_inline
#define __always_inline inline __attribute__((always_inline))
#define __uint(name, value) int(*name)[value]
#define __type(name, value) __typeof__(value) *name

extern unsigned char host_option[40]; /* received, or written */
extern int host_length;               /* of it; 0: none */
void *host_lookup(void *map);

static inline void *bpf_map_lookup_elem(void *map, const void *key)
{
	return (void)key, host_lookup(map);
}
static inline void *bpf_sk_storage_get(void *map, void *sk, void *value, unsigned long long flags)
{
	return (void)sk, (void)value, (void)flags, host_lookup(map);
}
static inline long bpf_sock_ops_cb_flags_set(void *s, int flags)
{
	return (void)s, (void)flags, 0;
}
static inline long bpf_reserve_hdr_opt(void *s, unsigned length, unsigned long long flags)
{
	return (void)s, (void)length, (void)flags, 0;
}
static inline unsigned long long bpf_ktime_get_ns(void)
{
	return 0;
}
static inline void *bpf_ringbuf_reserve(void *map, unsigned long long size, unsigned long long flags)
{
	return (void)map, (void)size, (void)flags, NULL;
}
static inline void bpf_ringbuf_submit(void *data, unsigned long long flags)
{
	(void)data, (void)flags;
}

static inline long bpf_store_hdr_opt(void *s, const void *from, unsigned length, unsigned long long flags)
{
	(void)s, (void)flags;
	memcpy(host_option, from, length);
	host_length = (int)length;
	return 0;
}

static inline long bpf_load_hdr_opt(void *s, void *to, unsigned length, unsigned long long flags)
{
	(void)s, (void)flags;
	memcpy(to, host_option, length < sizeof host_option ? length : sizeof host_option);
	return host_length;
}

#include "core/icrc.c"
#include <stdio.h>
#include <stdlib.h>
#include <arpa/inet.h>
/* bitwise is the definition of the CRC, one bit at a time. */
static uint32_t bitwise(uint32_t r, const uint8_t *p, size_t n)
{
	while (n--) {
		r ^= *p++;
		for (int i = 0; i < 8; i++)
			r = r >> 1 ^ (r & 1 ? 0xedb88320u : 0);
	}
	return r;
}
/* Each way to compute the CRC that this processor has, and the least number of bytes that it takes. */
static struct {
	uint32_t (*crc)(uint32_t, const uint8_t *, size_t);
	size_t least;
} ways[4];

static int find_ways(void)
{
	int n = 0;
	ways[n].crc = crc_words, ways[n++].least = 0;
#if defined(__x86_64__)
	if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"))
		ways[n].crc = crc_folded, ways[n++].least = 16;
	if (__builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2"))
		ways[n].crc = crc_folded_128, ways[n++].least = 144;
	if (__builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f"))
		ways[n].crc = crc_folded_256, ways[n++].least = 272;
#endif
	return n;
}
int main(void)
{
	int all = find_ways();
	static uint8_t b[9000];
	for (size_t i = 0; i < sizeof b; i++)
		b[i] = (uint8_t)rand();
	if (~sd_crc(~0u, "123456789", 9) != 0xcbf43926u) {
		printf("check value\n");
		return 1;
	}
	for (size_t n = 0; n < 5000; n += n < 300 ? 1 : 37)
		for (size_t o = 0; o < 3; o++)
			for (int i = 0; i < all; i++) {
				uint32_t from = 0x12345678u + (uint32_t)n;
				if (n >= ways[i].least && ways[i].crc(from, b + o, n) != bitwise(from, b + o, n)) {
					printf("way %d: crc of %zu bytes\n", i, n);
					return 1;
				}
			}
	struct sd_flow f = {.source_port = 50000, .destination_port = 4791};
	inet_pton(AF_INET6, "::ffff:10.1.2.3", &f.source);
	inet_pton(AF_INET6, "::ffff:10.1.2.4", &f.destination);
	for (int i = 0; i < 20000; i++) {
		size_t n = 16 + 4 * (size_t)(rand() % 1030);
		uint16_t id = (uint16_t)rand(), got;
		for (size_t k = 0; k < n; k++)
			b[k] = (uint8_t)rand();
		uint32_t crc = sd_icrc(&f, b, n, id);
		memcpy(b + n - 4, &crc, 4);
		got = i % 2 ? id : (uint16_t)rand();
		if (!sd_icrc_check(&f, b, n, &got) || got != id) {
			printf("id %u %u\n", id, got);
			return 1;
		}
		if (sd_icrc_check(&f, b, n, &got)) {
			b[5 + rand() % (int)(n - 5)] ^= 1 << (rand() & 7);
			if (sd_icrc_check(&f, b, n, &got) && i < 100)
				printf("flip accepted\n");
		}
	}
	puts("ok");
	return 0;
}

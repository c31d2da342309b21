#include "core/wire.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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
int main(void)
{
	static uint8_t b[9000];
	for (size_t i = 0; i < sizeof b; i++)
		b[i] = (uint8_t)rand();
	if (~sd_crc(~0u, "123456789", 9) != 0xcbf43926u) {
		printf("check value\n");
		return 1;
	}
	for (size_t n = 0; n < 5000; n += n < 300 ? 1 : 37)
		for (size_t o = 0; o < 3; o++)
			if (sd_crc(0x12345678u + (uint32_t)n, b + o, n) != bitwise(0x12345678u + (uint32_t)n, b + o, n)) {
				printf("crc %zu\n", n);
				return 1;
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

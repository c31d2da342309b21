#include "wire.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* The CRC-32 of Ethernet, in the reflected form: bit 31 of the register is the coefficient of x^0. */
#define POLYNOMIAL 0xedb88320u

/* times_x multiplies a register by x modulo the polynomial. */
static uint32_t times_x(uint32_t a)
{
	return a >> 1 ^ (a & 1 ? POLYNOMIAL : 0);
}

/* crc_table[k][b] is the register after byte b and k zero bytes, from a register of 0. */
static uint32_t crc_table[8][256];

__attribute__((constructor)) static void make_tables(void)
{
	for (uint32_t b = 0; b < 256; b++) {
		uint32_t r = b;
		for (int i = 0; i < 8; i++)
			r = times_x(r);
		crc_table[0][b] = r;
	}
	for (int k = 1; k < 8; k++)
		for (int b = 0; b < 256; b++)
			crc_table[k][b] = crc_table[k - 1][b] >> 8 ^ crc_table[0][crc_table[k - 1][b] & 0xff];
}

static uint32_t crc_words(uint32_t state, const uint8_t *p, size_t n)
{
	for (; n >= 8; p += 8, n -= 8) {
		uint64_t w;
		memcpy(&w, p, 8);
		w ^= state; /* little-endian machines: see the assertion below */
		state = crc_table[7][w & 0xff] ^ crc_table[6][w >> 8 & 0xff] ^ crc_table[5][w >> 16 & 0xff] ^ crc_table[4][w >> 24 & 0xff] ^
			crc_table[3][w >> 32 & 0xff] ^ crc_table[2][w >> 40 & 0xff] ^ crc_table[1][w >> 48 & 0xff] ^ crc_table[0][w >> 56];
	}
	for (; n > 0; p++, n--)
		state = state >> 8 ^ crc_table[0][(state ^ *p) & 0xff];
	return state;
}
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "crc_words reads words of little-endian machines");

/* multiply returns the product of two registers modulo the polynomial. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
	uint32_t product = 0;
	for (uint32_t bit = 1u << 31; bit; bit >>= 1, b = times_x(b))
		if (a & bit)
			product ^= b;
	return product;
}

#if defined(__x86_64__)
/* fold multiplies the two halves of a by the constants of k and adds b: it moves a forward by the distance that k
 * stands for. */
__attribute__((target("pclmul,sse4.1"))) static inline __m128i fold(__m128i a, __m128i k, __m128i b)
{
	return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(a, k, 0x00), _mm_clmulepi64_si128(a, k, 0x11)), b);
}

/* power returns the register of x^n, shifted left by one as folding needs it: the reflected product of 64-bit operands
 * is off by one bit. */
static uint64_t power(unsigned n)
{
	uint32_t r = 1u << 31;
	while (n-- > 0)
		r = times_x(r);
	return (uint64_t)r << 1;
}

static uint64_t by256[2], by128[2], by64[2], by32[2], by16[2];
/* For the last steps: x^64, and the quotient of x^64 and the polynomial with the polynomial. */
static uint64_t by8, barrett[2];

static void make_power(uint64_t k[2], unsigned bytes)
{
	k[0] = power(8 * bytes + 32);
	k[1] = power(8 * bytes - 32);
}

__attribute__((constructor)) static void make_powers(void)
{
	make_power(by256, 256);
	make_power(by128, 128);
	make_power(by64, 64);
	make_power(by32, 32);
	make_power(by16, 16);
	by8 = power(64);
	uint32_t r = 1u << 31;
	for (int i = 1; i <= 64; i++, r = times_x(r))
		if (r & 1)
			barrett[0] |= 1ull << (i - 32);
	barrett[1] = (uint64_t)POLYNOMIAL << 1 | 1;
}

/* begin_folds starts with the register and the first bytes of n, of which a multiple of 16 remains: it advances p to
 * after the returned block, which has zeros before the first bytes. n is at least 16. */
__attribute__((target("pclmul,sse4.1"))) static inline __m128i begin_folds(uint32_t state, const uint8_t **p, size_t *n)
{
	static const uint8_t shift[32] = {
		128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
	size_t odd = *n % 16;
	__m128i a = _mm_xor_si128(_mm_loadu_si128((const __m128i *)*p), _mm_cvtsi32_si128((int)state));
	a = _mm_shuffle_epi8(a, _mm_loadu_si128((const __m128i *)(shift + odd)));
	__m128i b = _mm_xor_si128(_mm_loadu_si128((const __m128i *)(*p + odd)), _mm_cvtsi32_si128(odd < 4 ? (int)(state >> 8 * odd) : 0));
	*p += odd + 16;
	*n -= odd + 16;
	return fold(a, _mm_loadu_si128((const __m128i *)by16), b);
}

/* end_folds folds the rest of the data, and reduces the result to a register (Barrett). */
__attribute__((target("pclmul,sse4.1"))) static inline uint32_t end_folds(__m128i a, const uint8_t *p, size_t n)
{
	__m128i k = _mm_loadu_si128((const __m128i *)by16), low = _mm_setr_epi32(-1, 0, 0, 0), q = _mm_loadu_si128((const __m128i *)barrett);
	for (; n > 0; p += 16, n -= 16)
		a = fold(a, k, _mm_loadu_si128((const __m128i *)p));
	a = _mm_xor_si128(_mm_clmulepi64_si128(a, k, 0x10), _mm_srli_si128(a, 8));
	a = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), _mm_cvtsi64_si128((int64_t)by8), 0x00), _mm_srli_si128(a, 4));
	__m128i t = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), q, 0x00), low);
	return (uint32_t)_mm_extract_epi32(_mm_xor_si128(_mm_clmulepi64_si128(t, q, 0x10), a), 1);
}

/* crc_folded folds 64 bytes at a time by carry-less multiplication (Gopal et al., Fast CRC Computation Using PCLMULQDQ,
 * 2009). n is at least 16. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc_folded(uint32_t state, const uint8_t *p, size_t n)
{
	__m128i a = begin_folds(state, &p, &n);
	if (n < 48)
		return end_folds(a, p, n);
	const __m128i *q = (const __m128i *)p;
	__m128i k = _mm_loadu_si128((const __m128i *)by64);
	__m128i b = _mm_loadu_si128(q), c = _mm_loadu_si128(q + 1), d = _mm_loadu_si128(q + 2);
	for (q += 3, n -= 48; n >= 64; q += 4, n -= 64) {
		a = fold(a, k, _mm_loadu_si128(q));
		b = fold(b, k, _mm_loadu_si128(q + 1));
		c = fold(c, k, _mm_loadu_si128(q + 2));
		d = fold(d, k, _mm_loadu_si128(q + 3));
	}
	k = _mm_loadu_si128((const __m128i *)by16);
	a = fold(fold(fold(a, k, b), k, c), k, d);
	return end_folds(a, (const uint8_t *)q, n);
}

/* fold2 is fold for each of two elements. */
__attribute__((target("vpclmulqdq,avx2"))) static inline __m256i fold2(__m256i a, __m256i k, __m256i b)
{
	return _mm256_xor_si256(_mm256_xor_si256(_mm256_clmulepi64_epi128(a, k, 0x00), _mm256_clmulepi64_epi128(a, k, 0x11)), b);
}

/* crc_folded_128 folds 128 bytes at a time. n is at least 144. */
__attribute__((target("vpclmulqdq,avx2,pclmul,sse4.1"))) static uint32_t crc_folded_128(uint32_t state, const uint8_t *p, size_t n)
{
	__m256i k = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)by128));
	__m128i first = begin_folds(state, &p, &n);
	const __m256i *q = (const __m256i *)(p - 16);
	__m256i a = _mm256_inserti128_si256(_mm256_loadu_si256(q), first, 0);
	__m256i b = _mm256_loadu_si256(q + 1), c = _mm256_loadu_si256(q + 2), d = _mm256_loadu_si256(q + 3);
	for (q += 4, n -= 112; n >= 128; q += 4, n -= 128) {
		a = fold2(a, k, _mm256_loadu_si256(q));
		b = fold2(b, k, _mm256_loadu_si256(q + 1));
		c = fold2(c, k, _mm256_loadu_si256(q + 2));
		d = fold2(d, k, _mm256_loadu_si256(q + 3));
	}
	k = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)by32));
	a = fold2(fold2(fold2(a, k, b), k, c), k, d);
	for (; n >= 32; q++, n -= 32)
		a = fold2(a, k, _mm256_loadu_si256(q));
	__m128i x = fold(_mm256_castsi256_si128(a), _mm_loadu_si128((const __m128i *)by16), _mm256_extracti128_si256(a, 1));
	return end_folds(x, (const uint8_t *)q, n);
}

/* fold4 is fold for each of four elements. */
__attribute__((target("vpclmulqdq,avx512f"))) static inline __m512i fold4(__m512i a, __m512i k, __m512i b)
{
	return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(a, k, 0x00), _mm512_clmulepi64_epi128(a, k, 0x11), b, 0x96);
}

/* crc_folded_256 folds 256 bytes at a time. n is at least 272. */
__attribute__((target("vpclmulqdq,avx512f,pclmul,sse4.1"))) static uint32_t crc_folded_256(uint32_t state, const uint8_t *p, size_t n)
{
	__m512i k = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)by256));
	__m128i first = begin_folds(state, &p, &n);
	__m512i a = _mm512_inserti32x4(_mm512_loadu_si512(p - 16), first, 0);
	__m512i b = _mm512_loadu_si512(p + 48), c = _mm512_loadu_si512(p + 112), d = _mm512_loadu_si512(p + 176);
	for (p += 240, n -= 240; n >= 256; p += 256, n -= 256) {
		a = fold4(a, k, _mm512_loadu_si512(p));
		b = fold4(b, k, _mm512_loadu_si512(p + 64));
		c = fold4(c, k, _mm512_loadu_si512(p + 128));
		d = fold4(d, k, _mm512_loadu_si512(p + 192));
	}
	k = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)by64));
	a = fold4(fold4(fold4(a, k, b), k, c), k, d);
	for (; n >= 64; p += 64, n -= 64)
		a = fold4(a, k, _mm512_loadu_si512(p));
	__m128i k16 = _mm_loadu_si128((const __m128i *)by16), x = _mm512_extracti32x4_epi32(a, 0);
	x = fold(x, k16, _mm512_extracti32x4_epi32(a, 1));
	x = fold(x, k16, _mm512_extracti32x4_epi32(a, 2));
	x = fold(x, k16, _mm512_extracti32x4_epi32(a, 3));
	return end_folds(x, p, n);
}
#endif

uint32_t sd_crc(uint32_t state, const void *data, size_t n)
{
#if defined(__x86_64__)
	if (n >= 272 && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f"))
		return crc_folded_256(state, data, n);
	if (n >= 144 && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2"))
		return crc_folded_128(state, data, n);
	if (n >= 16 && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"))
		return crc_folded(state, data, n);
#endif
	return crc_words(state, data, n);
}

/* pseudo_header writes the covered bytes before the BTH, at most 56, with an identification of 0, and returns their
 * number. */
static size_t pseudo_header(const struct sd_flow *flow, size_t n, uint8_t *b)
{
	uint16_t udp_length = (uint16_t)(8 + n);
	size_t size = 8;
	memset(b, 0xff, 56);
	if (sd_is_ipv4(&flow->source)) {
		uint8_t *ip = b + 8;
		uint16_t total = (uint16_t)(20 + udp_length);
		ip[0] = 0x45;
		ip[2] = (uint8_t)(total >> 8), ip[3] = (uint8_t)total;
		ip[4] = ip[5] = 0;
		ip[6] = 0x40, ip[7] = 0;
		ip[9] = IPPROTO_UDP;
		memcpy(ip + 12, &flow->source.s6_addr[12], 4);
		memcpy(ip + 16, &flow->destination.s6_addr[12], 4);
		size += 20;
	} else {
		uint8_t *ip = b + 8;
		ip[0] = 0x6f;
		ip[4] = (uint8_t)(udp_length >> 8), ip[5] = (uint8_t)udp_length;
		ip[6] = IPPROTO_UDP;
		memcpy(ip + 8, &flow->source, 16);
		memcpy(ip + 24, &flow->destination, 16);
		size += 40;
	}
	uint8_t *udp = b + size;
	udp[0] = (uint8_t)(flow->source_port >> 8), udp[1] = (uint8_t)flow->source_port;
	udp[2] = (uint8_t)(flow->destination_port >> 8), udp[3] = (uint8_t)flow->destination_port;
	udp[4] = (uint8_t)(udp_length >> 8), udp[5] = (uint8_t)udp_length;
	return size + 8;
}

/* Bytes from the identification to the BTH: flags to destination address, UDP header. */
enum { AFTER_ID = 14 + 8 };

/* id_table[k][b] is the register at the BTH for byte b of the identification, from a register of 0. */
static uint32_t id_table[2][256];

__attribute__((constructor)) static void make_id_table(void)
{
	for (int k = 0; k < 2; k++)
		for (unsigned b = 0; b < 256; b++) {
			uint32_t r = b;
			for (int i = 0; i < 8 * (AFTER_ID + 2 - k); i++)
				r = times_x(r);
			id_table[k][b] = r;
		}
}

/* icrc_begin returns the register at the BTH. Packets of a flow and length differ in the identification alone. */
static uint32_t icrc_begin(const struct sd_flow *flow, size_t n, uint16_t id)
{
	enum { KEPT = 16 };
	static _Thread_local struct {
		struct sd_flow flow;
		size_t n;
		uint32_t state;
	} kept[KEPT], *k;
	k = &kept[n / 4 % KEPT];
	if (k->n != n || memcmp(&k->flow, flow, sizeof *flow) != 0) {
		uint8_t b[56];
		k->state = sd_crc(~0u, b, pseudo_header(flow, n, b));
		k->flow = *flow;
		k->n = n;
	}
	return k->state ^ id_table[0][id >> 8] ^ id_table[1][id & 0xff];
}

uint32_t sd_icrc(const struct sd_flow *flow, uint8_t *p, size_t n, uint16_t id)
{
	uint8_t bits = p[4];
	p[4] = 0xff; /* FECN, BECN and reserved bits */
	uint32_t crc = ~sd_crc(icrc_begin(flow, n, id), p, n - SD_ICRC_SIZE);
	p[4] = bits;
	return crc;
}

/* inverse_power returns the register of x^-bits, bits being a multiple of 8. The caller's cache holds the results for
 * UDP payloads by their number of words. */
static uint32_t inverse_power(size_t bytes)
{
	uint32_t r = 1u << 31;
	for (size_t i = 0; i < 8 * bytes; i++)
		r = r & (1u << 31) ? (r ^ POLYNOMIAL) << 1 | 1 : r << 1;
	return r;
}

bool sd_icrc_check(const struct sd_flow *flow, uint8_t *p, size_t n, uint16_t *id)
{
	static _Thread_local uint32_t inverses[SD_MAX_DATAGRAM / 4 + 1];
	size_t covered = n - SD_ICRC_SIZE;
	uint16_t guess = sd_is_ipv4(&flow->source) ? *id : 0;
	uint32_t want;
	memcpy(&want, p + covered, 4);
	uint32_t difference = sd_icrc(flow, p, n, guess) ^ want;
	if (difference == 0)
		return true;
	if (!sd_is_ipv4(&flow->source))
		return false;
	uint32_t *inverse = &inverses[n / 4];
	if (*inverse == 0)
		*inverse = inverse_power(2 + AFTER_ID + covered);
	/* The difference, moved back to before the identification, is that of the identification and the guess if it is no
	 * longer than 16 bits. */
	uint32_t at = multiply(difference, *inverse);
	*id = (uint16_t)(((at & 0xff) << 8 | at >> 8) ^ guess);
	return at >> 16 == 0;
}

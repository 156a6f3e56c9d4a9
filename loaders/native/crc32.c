/* CRC-32 as zlib's: the reflected polynomial 0xEDB88320, inverted before and after.
 *
 * On x86-64 with carry-less multiplication, by folding (Gopal et al. 2009, "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction", Intel): four times 16 bytes at a time, several times as fast as tables. Elsewhere, and for
 * the rest, by tables for eight bytes at a time (Kounavis and Berry 2005, "slicing by 8").
 */
#include "core.h"

#include <string.h>

#define POLYNOMIAL 0xEDB88320u

typedef struct {
    uint32_t of[8][256]; /* of[k][b]: the CRC of byte b followed by k zeros */
} tables;

static tables make_tables(void)
{
    tables made;
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ POLYNOMIAL : crc >> 1;
        made.of[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++)
            made.of[k][byte] = made.of[k - 1][byte] >> 8 ^ made.of[0][made.of[k - 1][byte] & 255];
    return made;
}

/* Continue a CRC that is not inverted. The tables are made anew: 8 KB, a few microseconds. */
static uint32_t by_tables(uint32_t crc, const uint8_t *data, size_t size)
{
    const tables t = make_tables();
    for (; size >= 8; data += 8, size -= 8) {
        crc ^= (uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24;
        crc = t.of[7][crc & 255] ^ t.of[6][crc >> 8 & 255] ^ t.of[5][crc >> 16 & 255] ^ t.of[4][crc >> 24] ^
              t.of[3][data[4]] ^ t.of[2][data[5]] ^ t.of[1][data[6]] ^ t.of[0][data[7]];
    }
    for (; size > 0; data++, size--)
        crc = crc >> 8 ^ t.of[0][(crc ^ *data) & 255];
    return crc;
}

static uint32_t by_bits(uint32_t crc, const uint8_t *data, size_t size)
{
    for (; size > 0; data++, size--) {
        crc ^= *data;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ POLYNOMIAL : crc >> 1;
    }
    return crc;
}

#if defined(__x86_64__) && !defined(DT_NO_CLONES)
#include <immintrin.h>

/* Fold 16 bytes further: `k` has the remainders of the two powers of x that they move by. */
__attribute__((target("pclmul,sse4.1"))) static inline __m128i fold(__m128i x, __m128i k, __m128i next)
{
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next);
}

/* The same for a `size` that is a multiple of 16, and at least 64. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t by_folding(uint32_t crc, const uint8_t *data, size_t size)
{
    /* x^(512+32), x^(512-32); x^(128+32), x^(128-32); x^64; the polynomial, and its Barrett constant: all reflected. */
    const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by_8 = _mm_set_epi64x(0, 0x0163cd6124), barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low_32 = _mm_setr_epi32(~0, 0, ~0, 0);
    const __m128i *from = (const __m128i *)data;
    __m128i x[4];
    for (int k = 0; k < 4; k++)
        x[k] = _mm_loadu_si128(from + k);
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)crc));
    for (from += 4, size -= 64; size >= 64; from += 4, size -= 64)
        for (int k = 0; k < 4; k++)
            x[k] = fold(x[k], by_64, _mm_loadu_si128(from + k));
    for (int k = 1; k < 4; k++)
        x[k] = fold(x[k - 1], by_16, x[k]);
    __m128i sum = x[3];
    for (; size >= 16; from++, size -= 16)
        sum = fold(sum, by_16, _mm_loadu_si128(from));
    /* 128 bits to 64, to 32 (Barrett). */
    sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by_16, 0x10));
    sum = _mm_xor_si128(_mm_srli_si128(sum, 4), _mm_clmulepi64_si128(_mm_and_si128(sum, low_32), by_8, 0x00));
    __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(sum, low_32), barrett, 0x10);
    quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_32), barrett, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(sum, quotient), 1);
}

static int folds(void) { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }
#else
static uint32_t by_folding(uint32_t crc, const uint8_t *data, size_t size) { return by_tables(crc, data, size); }
static int folds(void) { return 0; }
#endif

DT_API uint32_t dt_crc32(uint32_t crc, const uint8_t *data, size_t size)
{
    crc = ~crc;
    if (size >= 64 && folds()) {
        size_t whole = size / 16 * 16;
        crc = by_folding(crc, data, whole);
        data += whole;
        size -= whole;
    }
    crc = size < 512 ? by_bits(crc, data, size) : by_tables(crc, data, size);
    return ~crc;
}

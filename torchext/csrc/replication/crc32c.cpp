// With AVX-512 and its carry-less multiplication: four registers of 64 bytes, each multiplied by the power of x that
// brings it to the place of the 64 bytes 256 further on, until what is left is short ("Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction", Intel, 2009). Else three independent streams keep the processor's CRC
// instruction busy (it has a latency of three and a throughput of one); their checksums are joined by multiplying with
// x^(8 n) modulo the polynomial, read from tables. Without the instruction: eight table look-ups for eight bytes.
#include "crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define TORCHEXT_CRC_X86 1
#endif

namespace torchext::replication {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

Table make_table() {
    Table table{};
    for (std::uint32_t n = 0; n < 256; ++n) {
        std::uint32_t crc = n;
        for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) ? (crc >> 1) ^ kPolynomial : crc >> 1;
        table[0][n] = crc;
    }
    for (std::uint32_t n = 0; n < 256; ++n) {
        for (std::size_t k = 1; k < 8; ++k) table[k][n] = table[0][table[k - 1][n] & 0xff] ^ (table[k - 1][n] >> 8);
    }
    return table;
}

std::uint32_t software(std::uint32_t crc, const unsigned char* p, std::size_t size) {
    static const Table table = make_table();
    for (; size >= 8; size -= 8, p += 8) {
        std::uint32_t low = crc ^ (p[0] | p[1] << 8 | p[2] << 16 | static_cast<std::uint32_t>(p[3]) << 24);
        crc = table[7][low & 0xff] ^ table[6][(low >> 8) & 0xff] ^ table[5][(low >> 16) & 0xff] ^ table[4][low >> 24] ^
              table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^ table[0][p[7]];
    }
    for (; size > 0; --size, ++p) crc = table[0][(crc ^ *p) & 0xff] ^ (crc >> 8);
    return crc;
}

#if defined(TORCHEXT_CRC_X86)

constexpr std::size_t kLong = 8192;
constexpr std::size_t kShort = 256;

// Shift tables: what a checksum becomes when `length` zero bytes follow.
using Shift = std::array<std::array<std::uint32_t, 256>, 4>;

Shift make_shift(std::size_t length) {
    // Linear over GF(2): shift the 32 unit vectors, then combine them for each byte at each place.
    const std::array<unsigned char, 64> zeros{};
    std::array<std::uint32_t, 32> unit{};
    for (std::size_t bit = 0; bit < 32; ++bit) {
        std::uint32_t crc = std::uint32_t{1} << bit;
        for (std::size_t done = 0; done < length; done += zeros.size()) crc = software(crc, zeros.data(), zeros.size());
        unit[bit] = crc;
    }
    Shift shift{};
    for (std::size_t place = 0; place < 4; ++place) {
        for (std::size_t value = 0; value < 256; ++value) {
            for (std::size_t bit = 0; bit < 8; ++bit) {
                if (value >> bit & 1) shift[place][value] ^= unit[8 * place + bit];
            }
        }
    }
    return shift;
}

std::uint64_t apply(const Shift& shift, std::uint64_t crc) {
    return shift[0][crc & 0xff] ^ shift[1][(crc >> 8) & 0xff] ^ shift[2][(crc >> 16) & 0xff] ^
           shift[3][(crc >> 24) & 0xff];
}

std::uint64_t load(const unsigned char* p) {
    std::uint64_t value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

template <std::size_t Length>
__attribute__((target("sse4.2"))) std::uint64_t three_ways(std::uint64_t crc, const unsigned char*& p,
                                                           std::size_t& size, const Shift& shift) {
    while (size >= 3 * Length) {
        std::uint64_t second = 0, third = 0;
        for (const unsigned char* end = p + Length; p < end; p += 8) {
            crc = _mm_crc32_u64(crc, load(p));
            second = _mm_crc32_u64(second, load(p + Length));
            third = _mm_crc32_u64(third, load(p + 2 * Length));
        }
        crc = apply(shift, crc) ^ second;
        crc = apply(shift, crc) ^ third;
        p += 2 * Length;
        size -= 3 * Length;
    }
    return crc;
}

__attribute__((target("sse4.2"))) std::uint32_t hardware(std::uint32_t start, const unsigned char* p,
                                                         std::size_t size) {
    static const Shift long_shift = make_shift(kLong);
    static const Shift short_shift = make_shift(kShort);
    std::uint64_t crc = start;
    crc = three_ways<kLong>(crc, p, size, long_shift);
    crc = three_ways<kShort>(crc, p, size, short_shift);
    for (; size >= 8; size -= 8, p += 8) crc = _mm_crc32_u64(crc, load(p));
    for (; size > 0; --size, ++p) crc = _mm_crc32_u8(static_cast<std::uint32_t>(crc), *p);
    return static_cast<std::uint32_t>(crc);
}

// x^n modulo the polynomial, reflected, and doubled as the product of two reflected numbers lacks a bit.
std::uint64_t power(unsigned n) {
    std::uint32_t value = std::uint32_t{1} << 31;
    for (; n > 0; --n) value = (value & 1) ? (value >> 1) ^ kPolynomial : value >> 1;
    return std::uint64_t{value} << 1;
}

bool has_instruction() {
    static const bool found = __builtin_cpu_supports("sse4.2");
    return found;
}

bool is_wide() {
    static const bool found = has_instruction() && __builtin_cpu_supports("pclmul") &&
                              __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
    return found;
}

constexpr std::size_t kWide = 1024;  // from here on it is worth it
constexpr std::size_t kAhead = 2048;  // bytes that are fetched ahead; one stream alone waits for memory otherwise

#define TORCHEXT_CRC_WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))

// Brings each 16 bytes of `value` over a distance, whose two powers `by` has, onto `onto`.
TORCHEXT_CRC_WIDE inline __m512i fold(__m512i value, __m512i by, __m512i onto) {
    const __m512i low = _mm512_clmulepi64_epi128(value, by, 0x00), high = _mm512_clmulepi64_epi128(value, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, onto, 0x96);  // the exclusive or of all three
}

TORCHEXT_CRC_WIDE std::uint32_t wide(std::uint32_t start, const unsigned char* p, std::size_t size) {
    struct Powers {
        explicit Powers(unsigned bits) : low(power(bits + 32)), high(power(bits - 32)) {}
        std::uint64_t low, high;
    };
    static const Powers over_256(2048), over_64(512), over_16(128);
    const auto a = static_cast<long long>(over_256.low), b = static_cast<long long>(over_256.high);
    const auto c = static_cast<long long>(over_64.low), d = static_cast<long long>(over_64.high);
    const __m512i by_256 = _mm512_set4_epi64(b, a, b, a), by_64 = _mm512_set4_epi64(d, c, d, c);
    __m512i parts[4];
    for (int i = 0; i < 4; ++i) parts[i] = _mm512_loadu_si512(p + 64 * i);
    parts[0] = _mm512_xor_si512(parts[0], _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, start));
    p += 256;
    size -= 256;
    for (; size >= 256; size -= 256, p += 256) {
        for (int i = 0; i < 4; ++i) {
            _mm_prefetch(reinterpret_cast<const char*>(p + 64 * i + kAhead), _MM_HINT_T0);
            parts[i] = fold(parts[i], by_256, _mm512_loadu_si512(p + 64 * i));
        }
    }
    __m512i rest = parts[0];
    for (int i = 1; i < 4; ++i) rest = fold(rest, by_64, parts[i]);
    for (; size >= 64; size -= 64, p += 64) rest = fold(rest, by_64, _mm512_loadu_si512(p));
    std::uint64_t words[8];
    _mm512_storeu_si512(words, rest);
    const __m128i by_16 = _mm_set_epi64x(static_cast<long long>(over_16.high), static_cast<long long>(over_16.low));
    for (int i = 2; i < 8; i += 2) {
        const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(words + i - 2));
        auto* onto = reinterpret_cast<__m128i*>(words + i);
        const __m128i low = _mm_clmulepi64_si128(value, by_16, 0x00), high = _mm_clmulepi64_si128(value, by_16, 0x11);
        _mm_storeu_si128(onto, _mm_xor_si128(_mm_xor_si128(low, high), _mm_loadu_si128(onto)));
    }
    std::uint64_t crc = _mm_crc32_u64(_mm_crc32_u64(0, words[6]), words[7]);  // which is that of all so far
    for (; size >= 8; size -= 8, p += 8) crc = _mm_crc32_u64(crc, load(p));
    for (; size > 0; --size, ++p) crc = _mm_crc32_u8(static_cast<std::uint32_t>(crc), *p);
    return static_cast<std::uint32_t>(crc);
}

#endif

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size) {
    const auto* p = static_cast<const unsigned char*>(data);
#if defined(TORCHEXT_CRC_X86)
    if (is_wide() && size >= kWide) return ~wide(~crc, p, size);
    if (has_instruction()) return ~hardware(~crc, p, size);
#endif
    return ~software(~crc, p, size);
}

std::vector<std::uint32_t> crc32c_each_way(std::uint32_t crc, const void* data, std::size_t size) {
    const auto* p = static_cast<const unsigned char*>(data);
    std::vector<std::uint32_t> found{~software(~crc, p, size)};
#if defined(TORCHEXT_CRC_X86)
    if (has_instruction()) found.push_back(~hardware(~crc, p, size));
    if (is_wide() && size >= kWide) found.push_back(~wide(~crc, p, size));
#endif
    return found;
}

}  // namespace torchext::replication

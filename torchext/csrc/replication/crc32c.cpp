// Three independent streams keep the processor's CRC instruction busy (it has a latency of three and a throughput of
// one); their checksums are joined by multiplying with x^(8 n) modulo the polynomial, read from tables. Without the
// instruction: eight table look-ups for eight bytes.
#include "crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <nmmintrin.h>
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

#endif

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size) {
    const auto* p = static_cast<const unsigned char*>(data);
#if defined(TORCHEXT_CRC_X86)
    static const bool has_instruction = __builtin_cpu_supports("sse4.2");
    if (has_instruction) return ~hardware(~crc, p, size);
#endif
    return ~software(~crc, p, size);
}

}  // namespace torchext::replication

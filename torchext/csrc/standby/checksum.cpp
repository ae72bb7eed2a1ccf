#include "checksum.hpp"

#include <algorithm>
#include <cstring>

// Compiled for two sets of instructions, chosen when the library is loaded; needs the loader of glibc.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define TORCHEXT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define TORCHEXT_CLONES
#endif

namespace torchext::standby {
namespace {

constexpr std::size_t kWord = sizeof(std::uint64_t);
constexpr std::uint64_t kKeyStep = 0x9E37'79B9'7F4A'7C15;

inline std::uint64_t mix(std::uint64_t word, std::uint64_t key) {
    // As the accumulators of XXH3: the product of the halves of the keyed word; the word itself is added because a
    // product forgets one half where the other is zero. 32-bit factors, which SIMD units multiply.
    const std::uint64_t keyed = word ^ key;
    return (keyed & 0xffff'ffffU) * (keyed >> 32) + ((word << 32) | (word >> 32));
}

inline std::uint64_t load(const std::byte* at) {
    std::uint64_t word;
    std::memcpy(&word, at, kWord);
    return word;
}

inline std::uint64_t load_part(const std::byte* at, std::size_t size) {
    std::uint64_t word = 0;
    std::memcpy(&word, at, size);
    return word;
}

inline std::uint64_t key_at(std::size_t word) { return (static_cast<std::uint64_t>(word) + 1) * kKeyStep; }

// Rows of a sparse gradient lie anywhere, where no hardware sees them coming: asked for so many ranges ahead, and so much
// of each, their cache lines come side by side instead of one after the other.
constexpr std::size_t kRangesAhead = 8;
constexpr std::size_t kPrefetchedBytes = 1024;
constexpr std::size_t kCacheLine = 64;

template <int write>
void prefetch(const std::byte* at, std::size_t size) {
    for (std::size_t i = 0; i < std::min(size, kPrefetchedBytes); i += kCacheLine) __builtin_prefetch(at + i, write);
}

// `first`: the position of the first word in its entry.
TORCHEXT_CLONES std::uint64_t sum_words(const std::byte* data, std::size_t words, std::size_t first) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < words; ++i) sum += mix(load(data + i * kWord), key_at(first + i));
    return sum;
}

TORCHEXT_CLONES std::uint64_t copy_words(std::byte* to, const std::byte* from, std::size_t words) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < words; ++i) {
        const std::uint64_t word = load(from + i * kWord);
        std::memcpy(to + i * kWord, &word, kWord);
        sum += mix(word, key_at(i));
    }
    return sum;
}

// Of the words that [offset, offset + size) touches, in an entry that ends at `end`.
std::uint64_t sum_around(const std::byte* entry, std::size_t offset, std::size_t size, std::size_t end) {
    const std::size_t first = offset / kWord;
    const std::size_t stop = std::min((offset + size + kWord - 1) / kWord * kWord, end);
    const std::size_t whole = (stop - first * kWord) / kWord;
    std::uint64_t sum = sum_words(entry + first * kWord, whole, first);
    const std::size_t rest = first * kWord + whole * kWord;
    if (rest < stop) sum += mix(load_part(entry + rest, stop - rest), key_at(first + whole));
    return sum;
}

}  // namespace

std::uint64_t checksum(const std::byte* data, std::size_t size) { return sum_around(data, 0, size, size); }

std::uint64_t copy_and_sum(std::byte* to, const std::byte* from, std::size_t size) {
    const std::size_t words = size / kWord;
    std::uint64_t sum = copy_words(to, from, words);
    if (const std::size_t rest = size % kWord; rest != 0) {
        const std::uint64_t word = load_part(from + words * kWord, rest);
        std::memcpy(to + words * kWord, &word, rest);
        sum += mix(word, key_at(words));
    }
    return sum;
}

std::uint64_t copy_ranges(std::byte* to, const std::byte* from, std::size_t size, const std::int64_t* offsets,
                          const std::int64_t* sizes, std::size_t count, bool packed) {
    std::uint64_t change = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const auto offset = static_cast<std::size_t>(offsets[i]);
        const auto length = static_cast<std::size_t>(sizes[i]);
        if (i + kRangesAhead < count) {
            const auto offset_ahead = static_cast<std::size_t>(offsets[i + kRangesAhead]);
            const auto length_ahead = static_cast<std::size_t>(sizes[i + kRangesAhead]);
            prefetch<1>(to + offset_ahead, length_ahead);
            if (!packed) prefetch<0>(from + offset_ahead, length_ahead);
        }
        change -= sum_around(to, offset, length, size);
        std::memcpy(to + offset, packed ? from : from + offset, length);
        if (packed) from += length;
        change += sum_around(to, offset, length, size);
    }
    return change;
}

bool update(std::byte* to, const std::byte* from, std::size_t size) {
    if (std::memcmp(to, from, size) == 0) return false;
    std::memcpy(to, from, size);
    return true;
}

}  // namespace torchext::standby

// A checksum that can be kept up to date when parts of the data change, and copies that compute it on the way.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torchext::standby {

// The sum over all 64-bit words (the last one padded with zeros) of a mix of the word and its position, modulo 2^64.
// A sum, so that the words of a changed range can be taken out of it and put in again; keyed by position, so that
// words which change places show. For faults, not against an adversary.
std::uint64_t checksum(const std::byte* data, std::size_t size);

// Copies and returns the checksum of what was copied: each word is read once, so the two belong together even while
// somebody writes to the source.
std::uint64_t copy_and_sum(std::byte* to, const std::byte* from, std::size_t size);

// Copies `count` ranges at the same offsets of two entries of `size` bytes, and returns the change of the
// destination's checksum. With `packed`, the source is not an entry but the ranges alone, one behind the other.
std::uint64_t copy_ranges(std::byte* to, const std::byte* from, std::size_t size, const std::int64_t* offsets,
                          const std::int64_t* sizes, std::size_t count, bool packed);

// Makes `to` equal to `from`; whether it was not so before.
bool update(std::byte* to, const std::byte* from, std::size_t size);

}  // namespace torchext::standby

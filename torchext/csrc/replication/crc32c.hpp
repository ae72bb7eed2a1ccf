// CRC-32C (Castagnoli) of RFC 3720, the checksum of frames.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torchext::replication {

// Continues `crc`, which is 0 at the start of a message; crc32c(crc32c(0, a), b) is the checksum of a followed by b.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size);

// The same, in each way that this processor is able to; for tests.
std::vector<std::uint32_t> crc32c_each_way(std::uint32_t crc, const void* data, std::size_t size);

}  // namespace torchext::replication

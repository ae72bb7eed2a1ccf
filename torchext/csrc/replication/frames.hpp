// Frames: what goes over the wire and, byte for byte, into the log.
//
// A message is cut into frames. The checksum of a frame goes on from that of the frame before it in the stream, so a
// frame is accepted in one place only: directly after its predecessor. Integers are little-endian.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "crc32c.hpp"

namespace torchext::replication {

static_assert(std::endian::native == std::endian::little, "frames are written as the processor holds them");

constexpr std::uint32_t kMagic = 0x4d525453;  // "STRM"
constexpr std::uint32_t kMaxPayload = 1 << 20;
constexpr std::uint16_t kLast = 1;     // the message ends here
constexpr std::uint16_t kAborted = 2;  // ... and was given up by its sender: nobody is to see it

struct FrameHeader {
    std::uint32_t magic;
    std::uint32_t length;  // of the payload that follows
    std::uint64_t seq;     // of the message; the first of a stream is 1
    std::uint64_t offset;  // of this payload in the message
    std::uint16_t flags;
    std::uint16_t kind;  // of the message; see message.py
    std::uint32_t checksum;  // of the frame before, this header up to here, and the payload
};
static_assert(sizeof(FrameHeader) == 32);

// A place in a stream: `seq` messages are complete, `offset` bytes of the next one follow.
struct Place {
    std::uint64_t seq;
    std::uint64_t offset;
    std::uint32_t checksum;  // of the last frame before this place
};

enum class Verdict : int {
    incomplete = 0,  // all is well; the bytes end within a frame or at its edge
    blank = 1,       // zeros where a header is expected: the end of what was written to a log
    no_frame = 2,    // something else where a header is expected
    too_long = 3,    // a length beyond what frames or messages may have
    out_of_place = 4,
    corrupt = 5,  // the checksum does not fit
};

inline std::uint32_t frame_checksum(std::uint32_t before, const FrameHeader& header, const void* payload) {
    const std::uint32_t crc = crc32c(before, &header, offsetof(FrameHeader, checksum));
    return crc32c(crc, payload, header.length);
}

// Copies the payload while it is in the cache for the checksum. Returns the checksum of the frame.
inline std::uint32_t write_frame(unsigned char* to, const unsigned char* payload, std::uint32_t length,
                                 std::uint64_t seq, std::uint64_t offset, std::uint16_t flags, std::uint16_t kind,
                                 std::uint32_t before) {
    FrameHeader header{kMagic, length, seq, offset, flags, kind, 0};
    std::uint32_t crc = crc32c(before, &header, offsetof(FrameHeader, checksum));
    constexpr std::uint32_t kBlock = 3 * 8192;
    for (std::uint32_t done = 0; done < length;) {
        const std::uint32_t size = length - done < kBlock ? length - done : kBlock;
        if (payload != to + sizeof header) std::memcpy(to + sizeof header + done, payload + done, size);
        crc = crc32c(crc, to + sizeof header + done, size);
        done += size;
    }
    header.checksum = crc;
    std::memcpy(to, &header, sizeof header);
    return crc;
}

// Follows the frames in [data + position, data + size) as far as they are whole and right; moves position and place.
inline Verdict scan(const unsigned char* data, std::size_t& position, std::size_t size, Place& place,
                    std::uint64_t max_message) {
    while (size - position >= sizeof(FrameHeader)) {
        FrameHeader header;
        std::memcpy(&header, data + position, sizeof header);
        if (header.magic != kMagic) return header.magic == 0 && header.length == 0 ? Verdict::blank : Verdict::no_frame;
        if (header.length > kMaxPayload) return Verdict::too_long;
        if (header.seq != place.seq + 1 || header.offset != place.offset) return Verdict::out_of_place;
        if (header.length > max_message - place.offset) return Verdict::too_long;
        if (size - position - sizeof header < header.length) return Verdict::incomplete;
        const std::uint32_t checksum = frame_checksum(place.checksum, header, data + position + sizeof header);
        if (checksum != header.checksum) return Verdict::corrupt;
        place.checksum = checksum;
        place.offset += header.length;
        if (header.flags & kLast) {
            place.seq += 1;
            place.offset = 0;
        }
        position += sizeof header + header.length;
    }
    return Verdict::incomplete;
}

// Walks over frames that were scanned before to the one at (seq, offset): moves position there and returns the checksum
// of the frame before it, or `before` if it is the first. False if there is none.
inline bool find(const unsigned char* data, std::size_t& position, std::size_t size, std::uint64_t seq,
                 std::uint64_t offset, std::uint32_t& before) {
    while (size - position >= sizeof(FrameHeader)) {
        FrameHeader header;
        std::memcpy(&header, data + position, sizeof header);
        if (header.magic != kMagic || header.length > size - position - sizeof header) return false;
        if (header.seq == seq && header.offset == offset) return true;
        before = header.checksum;
        position += sizeof header + header.length;
    }
    return false;
}

}  // namespace torchext::replication

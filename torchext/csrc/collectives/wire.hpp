// The records that travel through the rings.
#pragma once

#include <cstddef>
#include <cstdint>

#include "record_tail.hpp"
#include "ring.hpp"
#include "signature.hpp"

namespace torchext::collectives {

enum class RecordKind : std::uint8_t { pad = 0, join, data, grant, fail, verdict };

// "I have issued this collective", with what the receiver needs of my input where it is small. Then follow the tag
// and, from the next multiple of 16 on, the payload.
struct JoinRecord {
    RecordHeader header;
    OpKind kind;
    ReduceOp reduce_op;
    std::uint8_t dtype;
    std::uint8_t num_dims;
    std::uint8_t staged;       // some part of it is too large for the rings
    std::uint8_t has_payload;  // otherwise it comes in a DataRecord once the receiver has joined
    std::uint16_t tag_bytes;
    std::int32_t root;
    std::int32_t peer;
    std::uint64_t group;
    std::uint64_t key;
    std::uint64_t id;          // how to address the sender's call from now on
    std::uint64_t send_bytes;  // that the receiver gets from the sender
    std::uint64_t recv_bytes;  // that the sender wants of the receiver
    std::int64_t dims[kDims];
};
static_assert(sizeof(JoinRecord) % 16 == 0);

struct DataRecord {  // then follows the payload
    RecordHeader header;
    std::uint64_t id;  // the receiver's call
    std::uint64_t bytes;
    std::uint64_t unused;
};
static_assert(sizeof(DataRecord) % 16 == 0);

// The staging memory for a collective that every member has joined; its first member gives it.
struct GrantRecord {
    RecordHeader header;
    std::uint64_t id;      // the receiver's call
    std::uint64_t offset;  // in the sender's pool
    std::uint32_t member;  // the receiver's place among the members: enough to decline if the call is gone
    std::uint32_t num_members;
};
static_assert(sizeof(GrantRecord) % 16 == 0);

struct FailRecord {  // then follow text and the world ranks that are the cause
    RecordHeader header;
    std::uint64_t id;  // the sender's call
    std::uint32_t code;
    std::uint32_t text_bytes;
    std::uint32_t num_culprits;
    std::uint32_t cause;  // a Code: why the sender's own call failed
};
static_assert(sizeof(FailRecord) % 16 == 0);

// Tells a rank that it is in a deadlock; then follow text and the world ranks in it.
struct VerdictRecord {
    RecordHeader header;
    std::uint64_t version;  // of the report of the receiver that it is about; it holds for no other
    std::uint64_t num_members;
    std::uint32_t code;     // a Code: how the calls fail, or none: those that can are deferred
    std::uint32_t text_bytes;
};
static_assert(sizeof(VerdictRecord) % 16 == 0);

inline const std::byte* payload_of(const JoinRecord& record) {
    return reinterpret_cast<const std::byte*>(&record) + sizeof(JoinRecord) + round_up(record.tag_bytes, 16);
}

}  // namespace torchext::collectives

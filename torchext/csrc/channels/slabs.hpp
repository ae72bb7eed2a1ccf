// What lies in the shared memory of a queue; see queue.hpp for what is done with it.
#pragma once

#include "../transport/segment.hpp"

namespace torchext::channels {

using namespace transport;

enum class Policy : std::uint32_t { block = 0, drop_oldest = 1, drop_newest = 2, error = 3 };
// `returned` is what no receiver looks at any more, and nobody has freed yet.
enum class SlabState : std::uint32_t { free = 0, writing = 1, open = 2, queued = 3, reading = 4, returned = 5 };
// What is open takes rows; or was cut short, and waits for rows that are being written; or is ready, and waits for what was
// begun before.
enum class Ending : std::uint32_t { open = 0, cut = 1, ready = 2 };
enum class RowState : std::uint32_t { empty = 0, writing = 1, done = 2 };

struct Row {
    std::atomic<std::uint32_t> state;
    std::uint32_t owner;
    std::int64_t version;
};

struct alignas(kLine) Slab {
    std::atomic<std::uint32_t> state;
    std::uint32_t owner;  // the peer that writes or reads it
    std::uint64_t seq;    // order in the queue; of what is open, order in which it was begun
    std::int64_t version;
    std::uint64_t header_bytes;
    std::uint64_t bytes;    // in use, from the slab's beginning
    std::uint64_t touched;  // what has memory behind it
    std::uint32_t rows;     // there is room for; 0: one message, not a batch
    std::uint32_t given;    // rows that were handed out, from the first
    std::uint32_t done;
    std::uint32_t ending;   // of what is open: Ending
};

// A cache line for each side, so that it stays with whoever sends, or receives, alone.
struct Counters {
    alignas(kLine) std::atomic<std::uint64_t> sent, bytes_sent, dropped_oldest, dropped_newest, refused, torn, send_wait_ns;
    alignas(kLine) std::atomic<std::uint64_t> received, stale, staleness_sum, staleness_max, copied, receive_wait_ns;
};

// What one side waits for.
struct alignas(kLine) Bell {
    std::atomic<std::uint32_t> word;  // a futex, raised for those who sleep
    std::atomic<std::uint32_t> news;  // for who looks on without sleeping: changes with what is queued, or taken
};

struct QueueHeader {
    SegmentHeader segment;
    // Constant.
    std::uint64_t slots, slot_bytes, num_slabs, stride, data_offset, num_senders;
    std::uint32_t policy, poison;
    std::atomic<std::uint32_t> scarce;  // some sender has found no free slab: whoever returns one wakes it; rarely changes
    Bell bells[2];                      // of senders, which wait for room, and of receivers
    // Guarded by the lock; `head` and `tail` are looked at without, too.
    alignas(kLine) std::uint64_t next_seq;
    std::uint32_t batch_rows;  // what new messages are put together to; 0: nothing
    std::uint32_t open_slab;   // the batch that still has rows to give, plus one
    std::uint64_t recent_bytes;  // about the largest of the latest messages
    // Rebuilt by repair.
    std::atomic<std::uint64_t> head, tail;  // of the ring
    std::uint32_t num_free, num_open;
    std::uint32_t num_reading;  // with those that were returned
    std::uint32_t holes;
    std::uint32_t waiting[2];  // those asleep, or about to be
    Counters counters;
};

enum Side { kSend = 0, kReceive = 1 };

// Where a sender writes.
struct Ticket {
    std::uint32_t slab = 0;
    std::uint32_t row = 0;
    bool batched = false;
};

struct Batch {
    std::uint32_t slab = 0;
    std::uint32_t rows = 0;   // 0: one message
    bool crowded = false;     // receivers hold so many slabs that this one should be copied out
};

}  // namespace torchext::channels

// A byte ring from one rank to another: one writer, one reader, whole records, never a lock.
//
// A record is contiguous and a multiple of 16 bytes long; what does not fit before the end of the ring starts again at
// its beginning, after a record of kind `pad`. Both ends keep their own copy of the other's counter, so that a cache
// line moves between cores only when there is news.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "arena.hpp"

namespace torchext::collectives {

struct RecordHeader {
    std::uint32_t bytes;  // of the whole record, header and padding included
    std::uint8_t kind;    // wire.hpp; 0 is padding
    std::uint8_t unused[3];
};

class RingWriter {
public:
    RingWriter() = default;
    RingWriter(RingControl& control, std::byte* data, std::size_t capacity)
        : control_(&control), data_(data), capacity_(capacity) {}

    static std::size_t record_bytes(std::size_t bytes) { return round_up(bytes, 16); }

    // Room for a record, or nullptr while the reader is behind. Nothing is seen by the reader before `publish`.
    std::byte* reserve(std::size_t record) {
        const std::size_t position = tail_ % capacity_;
        const std::size_t pad = position + record > capacity_ ? capacity_ - position : 0;
        if (tail_ + pad + record - head_ > capacity_) {
            // acquire: the reader has finished with the bytes that are about to be overwritten
            head_ = control_->head.load(std::memory_order_acquire);
        }
        if (tail_ + pad + record - head_ > capacity_) {
            // seq_cst, as in `pop` and `room_wanted`: this look sees what was popped, or the reader sees the wish (Dekker)
            control_->room_wanted.store(1, std::memory_order_seq_cst);
            head_ = control_->head.load(std::memory_order_seq_cst);
            if (tail_ + pad + record - head_ > capacity_) return nullptr;
        }
        if (pad != 0) {
            *reinterpret_cast<RecordHeader*>(data_ + position) = {static_cast<std::uint32_t>(pad), 0, {}};
            tail_ += pad;
        }
        std::byte* room = data_ + tail_ % capacity_;
        tail_ += record;
        return room;
    }

    // release: the record's bytes are there before the reader sees the new tail
    void publish() { control_->tail.store(tail_, std::memory_order_release); }

private:
    RingControl* control_ = nullptr;
    std::byte* data_ = nullptr;
    std::size_t capacity_ = 1;
    std::uint64_t tail_ = 0;
    std::uint64_t head_ = 0;
};

class RingReader {
public:
    RingReader() = default;
    RingReader(RingControl& control, const std::byte* data, std::size_t capacity)
        : control_(&control), data_(data), capacity_(capacity) {}

    // The next record, or nullptr. It stays valid until `pop`.
    const RecordHeader* front() {
        while (true) {
            if (head_ == tail_) {
                // acquire: pairs with publish()
                tail_ = control_->tail.load(std::memory_order_acquire);
                if (head_ == tail_) return nullptr;
            }
            const auto* record = reinterpret_cast<const RecordHeader*>(data_ + head_ % capacity_);
            if (record->kind != 0) return record;
            head_ += record->bytes;
        }
    }

    void pop(std::size_t record) {
        head_ += record;
        // seq_cst: see RingWriter::reserve; and the record has been read before the writer may overwrite it
        control_->head.store(head_, std::memory_order_seq_cst);
    }

    // Whether the writer has found no room since the last call: who pops then wakes it, lest it sleep beside the room.
    bool room_wanted() {
        // The exchange loses no wish that comes meanwhile, and shows all that the writer did before it.
        return control_->room_wanted.load(std::memory_order_seq_cst) != 0 &&
               control_->room_wanted.exchange(0, std::memory_order_seq_cst) != 0;
    }

private:
    RingControl* control_ = nullptr;
    const std::byte* data_ = nullptr;
    std::size_t capacity_ = 1;
    std::uint64_t head_ = 0;
    std::uint64_t tail_ = 0;
};

}  // namespace torchext::collectives

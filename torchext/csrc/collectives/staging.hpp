// The memory through which one large collective flows: how a block is laid out, and who gets a block.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <new>
#include <optional>

#include "arena.hpp"

namespace torchext::collectives {

// How data flows between the n members.
enum class Flow : std::uint8_t {
    exchange,  // each sends each other its own part: all_to_all, scatter, gather, send
    spread,    // a source sends all others the same: broadcast, all_gather
    reduce,    // each reduces its own segment of all inputs, then spreads it: all_reduce, reduce, reduce_scatter
};

// A lane is a stream of chunks from one member, through a few slots. Counters are monotonic and each has one writer and
// a cache line of its own. `pair` lanes have one reader, `spread` lanes all other members.
class StageLayout {
public:
    StageLayout() = default;
    StageLayout(Flow flow, int n, std::size_t budget, std::size_t max_chunk) : n_(static_cast<std::size_t>(n)) {
        has_pairs_ = flow != Flow::spread;
        has_spread_ = flow != Flow::exchange;
        const std::size_t lanes = (has_pairs_ ? n_ * n_ : 0) + (has_spread_ ? n_ : 0);
        std::size_t chunk = budget / lanes / kSlots / 4096 * 4096;
        chunk_ = chunk < kMinChunk ? kMinChunk : chunk > max_chunk ? max_chunk : chunk;
        counters_ = n_ + 3 * n_ * n_ + n_;
        data_ = round_up(counters_ * kLine, 4096);
        total_ = data_ + lanes * lane_bytes();
    }

    static constexpr std::size_t kSlots = 4;
    static constexpr std::size_t kMinChunk = 4096;

    std::size_t chunk() const { return chunk_; }
    std::size_t total() const { return total_; }

    using Counter = std::atomic<std::uint64_t>;

    // Set by a member once it will not touch the block again. First in the block, so that it is found without layout.
    static Counter& finished(std::byte* block, int m) { return counter(block, static_cast<std::size_t>(m)); }
    // Chunks that m has written for c, and that c has read of them.
    Counter& pair_written(std::byte* block, int m, int c) const { return counter(block, n_ + pair(m, c)); }
    Counter& pair_read(std::byte* block, int m, int c) const { return counter(block, n_ + n_ * n_ + pair(m, c)); }
    // Chunks that m has written for all, and that c has read of them.
    Counter& spread_written(std::byte* block, int m) const {
        return counter(block, n_ + 3 * n_ * n_ + static_cast<std::size_t>(m));
    }
    Counter& spread_read(std::byte* block, int m, int c) const {
        return counter(block, n_ + 2 * n_ * n_ + pair(m, c));
    }

    std::byte* pair_slot(std::byte* block, int m, int c, std::uint64_t k) const {
        return block + data_ + pair(m, c) * lane_bytes() + k % kSlots * chunk_;
    }
    std::byte* spread_slot(std::byte* block, int m, std::uint64_t k) const {
        const std::size_t before = has_pairs_ ? n_ * n_ : 0;
        return block + data_ + (before + static_cast<std::size_t>(m)) * lane_bytes() + k % kSlots * chunk_;
    }

    // Before the block is granted; the grant's release publishes it.
    void reset(std::byte* block) const {
        for (std::size_t i = 0; i < counters_; ++i) counter(block, i).store(0, std::memory_order_relaxed);
    }

private:
    static Counter& counter(std::byte* block, std::size_t i) { return *reinterpret_cast<Counter*>(block + i * kLine); }
    std::size_t pair(int m, int c) const { return static_cast<std::size_t>(m) * n_ + static_cast<std::size_t>(c); }
    std::size_t lane_bytes() const { return kSlots * chunk_; }

    std::size_t n_ = 0;
    std::size_t chunk_ = 0;
    std::size_t counters_ = 0;
    std::size_t data_ = 0;
    std::size_t total_ = 0;
    bool has_pairs_ = false;
    bool has_spread_ = false;
};

// Blocks of one rank's pool, first fit from the front: recently used, hence cached, pages are used again.
//
// A collective gets all its staging at once, from one pool, and only once every member has joined it. So nothing holds
// staging while it waits for more staging or for a call not yet made, and staging cannot run out into a deadlock.
class StagingPool {
public:
    explicit StagingPool(std::size_t bytes) { free_[0] = bytes; }

    std::optional<std::size_t> take(std::size_t bytes) {
        bytes = round_up(bytes, 4096);
        for (auto it = free_.begin(); it != free_.end(); ++it) {
            if (it->second < bytes) continue;
            const std::size_t offset = it->first;
            const std::size_t left = it->second - bytes;
            free_.erase(it);
            if (left != 0) free_[offset + bytes] = left;
            return offset;
        }
        return std::nullopt;
    }

    void give_back(std::size_t offset, std::size_t bytes) {
        bytes = round_up(bytes, 4096);
        auto after = free_.lower_bound(offset);
        if (after != free_.begin()) {
            auto before = std::prev(after);
            if (before->first + before->second == offset) {
                offset = before->first;
                bytes += before->second;
                free_.erase(before);
            }
        }
        if (after != free_.end() && offset + bytes == after->first) {
            bytes += after->second;
            free_.erase(after);
        }
        free_[offset] = bytes;
    }

private:
    std::map<std::size_t, std::size_t> free_;  // offset -> bytes
};

}  // namespace torchext::collectives

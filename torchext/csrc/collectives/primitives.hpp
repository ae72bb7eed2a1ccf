// The primitives: send, receive, reduce and copy one chunk. Each does what can be done now and says how much that was;
// none waits. A collective that gets nothing done is left as it is: its Context says where to go on.
//
// Memory order, throughout: a writer fills a slot, then raises `written` with release; a reader sees it with acquire,
// uses the slot, then raises `read` with release; the writer sees that with acquire before it fills the slot again.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "op.hpp"

namespace torchext::collectives {

// Remembers whom to wake: those whose counters were raised.
class Touched {
public:
    explicit Touched(int world_size) : flags_(static_cast<std::size_t>(world_size), 0) {}
    void add(int rank) {
        if (std::exchange(flags_[static_cast<std::size_t>(rank)], 1) == 0) ranks_.push_back(rank);
    }
    bool empty() const { return ranks_.empty(); }
    template <class F>
    void drain(F&& f) {
        for (const int rank : ranks_) {
            flags_[static_cast<std::size_t>(rank)] = 0;
            f(rank);
        }
        ranks_.clear();
    }

private:
    std::vector<char> flags_;
    std::vector<int> ranks_;
};

class Primitives {
public:
    Primitives(Op& op, std::size_t eager_bytes, Touched& touched) : op_(op), eager_(eager_bytes), touched_(touched) {}

    // Runs each primitive that can go on; returns how many did. Sets op.stage_done at the end.
    int run() {
        int moved = 0;
        bool finished = copy_local(moved);
        switch (op_.flow) {
            case Flow::exchange:
                for (int i = 1; i < op_.n; ++i) {  // starting next door, so that not all begin with the same member
                    const int to = (op_.me + i) % op_.n;
                    finished &= send_pair(to, op_.send[at(to)], moved);
                    const int from = (op_.me + op_.n - i) % op_.n;
                    finished &= receive_pair(from, moved);
                }
                break;
            case Flow::spread: {
                const int any = op_.me == 0 ? op_.n - 1 : 0;  // a source has the same for every other member
                finished &= spread_own(op_.send[at(any)], moved);
                for (int i = 1; i < op_.n; ++i) {
                    const int from = (op_.me + op_.n - i) % op_.n;
                    finished &= receive_spread(from, op_.recv[at(from)], moved);
                }
                break;
            }
            case Flow::reduce:
                for (int i = 1; i < op_.n; ++i) {
                    const int to = (op_.me + i) % op_.n;
                    finished &= send_pair(to, op_.segments[at(to)], moved);
                }
                finished &= reduce_own(moved);
                if (op_.spread_root == -1 || op_.spread_root == op_.me) {
                    for (int i = 1; i < op_.n; ++i) {
                        const int from = (op_.me + op_.n - i) % op_.n;
                        finished &= receive_spread(from, op_.results[at(from)], moved);
                    }
                }
                break;
        }
        op_.stage_done = finished;
        return moved;
    }

private:
    // Reduced and then copied while it is in the first-level cache; a multiple of all element sizes.
    static constexpr std::size_t kReduceBlock = 8192;

    static std::size_t at(int i) { return static_cast<std::size_t>(i); }
    std::uint64_t chunks(std::size_t bytes) const { return (bytes + op_.layout.chunk() - 1) / op_.layout.chunk(); }
    std::size_t begin(std::uint64_t k) const { return k * op_.layout.chunk(); }
    std::size_t length(std::uint64_t k, std::size_t bytes) const {
        return std::min(op_.layout.chunk(), bytes - begin(k));
    }
    // In the exchange and spread flows, small parts travel through the rings.
    bool by_stage(const Span& span) const { return op_.flow == Flow::reduce ? span.bytes != 0 : span.bytes > eager_; }

    bool copy_local(int& moved) {
        const std::size_t left = op_.local_to.bytes - op_.context.copied;
        if (left == 0) return true;
        const std::size_t bytes = std::min<std::size_t>(left, 1 << 20);
        std::memmove(op_.local_to.data + op_.context.copied, op_.local_from.data + op_.context.copied, bytes);
        op_.context.copied += bytes;
        ++moved;
        return left == bytes;
    }

    bool send_pair(int to, const Span& span, int& moved) {
        if (!by_stage(span)) return true;
        std::uint64_t& k = op_.context.sent[at(to)];
        const std::uint64_t total = chunks(span.bytes);
        if (k == total) return true;
        const std::uint64_t read = op_.layout.pair_read(op_.block, op_.me, to).load(std::memory_order_acquire);
        while (k < total && k - read < StageLayout::kSlots) {
            std::memcpy(op_.layout.pair_slot(op_.block, op_.me, to, k), span.data + begin(k), length(k, span.bytes));
            op_.layout.pair_written(op_.block, op_.me, to).store(++k, std::memory_order_release);
            touched_.add(op_.world_rank(to));
            ++moved;
        }
        return k == total;
    }

    bool receive_pair(int from, int& moved) {
        const Span& span = op_.recv[at(from)];
        if (!by_stage(span)) return true;
        std::uint64_t& k = op_.context.received[at(from)];
        const std::uint64_t total = chunks(span.bytes);
        if (k == total) return true;
        const std::uint64_t written = op_.layout.pair_written(op_.block, from, op_.me).load(std::memory_order_acquire);
        while (k < written) {
            std::memcpy(span.data + begin(k), op_.layout.pair_slot(op_.block, from, op_.me, k), length(k, span.bytes));
            op_.layout.pair_read(op_.block, from, op_.me).store(++k, std::memory_order_release);
            touched_.add(op_.world_rank(from));
            ++moved;
        }
        return k == total;
    }

    template <class F>
    void each_spread_reader(F&& f) const {
        if (op_.flow == Flow::reduce && op_.spread_root >= 0) {
            if (op_.spread_root != op_.me) f(op_.spread_root);
            return;
        }
        for (int c = 0; c < op_.n; ++c) {
            if (c != op_.me) f(c);
        }
    }

    bool spread_slot_free(std::uint64_t k) const {
        bool free = true;
        each_spread_reader([&](int c) {
            free = free && k - op_.layout.spread_read(op_.block, op_.me, c).load(std::memory_order_acquire) <
                               StageLayout::kSlots;
        });
        return free;
    }

    void publish_spread(std::uint64_t written) {
        op_.layout.spread_written(op_.block, op_.me).store(written, std::memory_order_release);
        each_spread_reader([&](int c) { touched_.add(op_.world_rank(c)); });
    }

    bool spread_own(const Span& span, int& moved) {
        if (!by_stage(span)) return true;
        std::uint64_t& k = op_.context.spread_sent;
        const std::uint64_t total = chunks(span.bytes);
        while (k < total && spread_slot_free(k)) {
            std::memcpy(op_.layout.spread_slot(op_.block, op_.me, k), span.data + begin(k), length(k, span.bytes));
            publish_spread(++k);
            ++moved;
        }
        return k == total;
    }

    bool receive_spread(int from, const Span& span, int& moved) {
        if (!by_stage(span)) return true;
        std::uint64_t& k = op_.context.spread_got[at(from)];
        const std::uint64_t total = chunks(span.bytes);
        if (k == total) return true;
        const std::uint64_t written = op_.layout.spread_written(op_.block, from).load(std::memory_order_acquire);
        while (k < written) {
            std::memcpy(span.data + begin(k), op_.layout.spread_slot(op_.block, from, k), length(k, span.bytes));
            op_.layout.spread_read(op_.block, from, op_.me).store(++k, std::memory_order_release);
            touched_.add(op_.world_rank(from));
            ++moved;
        }
        return k == total;
    }

    bool reduce_own(int& moved) {
        const Span& own = op_.segments[at(op_.me)];
        const Span& result = op_.results[at(op_.me)];
        std::uint64_t& k = op_.context.reduced;
        const std::uint64_t total = chunks(own.bytes);
        const bool spreads = op_.spread_root == -1 || (op_.spread_root >= 0 && op_.spread_root != op_.me);
        while (k < total) {
            if (spreads && !spread_slot_free(k)) break;
            sources_.clear();
            bool ready = true;
            for (int m = 0; m < op_.n && ready; ++m) {
                if (m == op_.me) {
                    sources_.push_back(own.data + begin(k));
                    continue;
                }
                ready = op_.layout.pair_written(op_.block, m, op_.me).load(std::memory_order_acquire) > k;
                sources_.push_back(op_.layout.pair_slot(op_.block, m, op_.me, k));
            }
            if (!ready) break;
            const std::size_t bytes = length(k, own.bytes);
            std::byte* slot = spreads ? op_.layout.spread_slot(op_.block, op_.me, k) : nullptr;
            std::byte* into = result.data == nullptr ? slot : result.data + begin(k);
            for (std::size_t done = 0; done < bytes; done += kReduceBlock) {
                const std::size_t m = std::min(kReduceBlock, bytes - done);
                op_.kernel(into + done, sources_.data(), op_.n, m / op_.item_bytes, op_.n);
                if (slot != nullptr && slot != into) std::memcpy(slot + done, into + done, m);
                for (const void*& source : sources_) source = static_cast<const std::byte*>(source) + m;
            }
            for (int m = 0; m < op_.n; ++m) {
                if (m == op_.me) continue;
                op_.layout.pair_read(op_.block, m, op_.me).store(k + 1, std::memory_order_release);
                touched_.add(op_.world_rank(m));
            }
            if (spreads) publish_spread(k + 1);
            ++k;
            ++moved;
        }
        return k == total;
    }

    Op& op_;
    std::size_t eager_;
    Touched& touched_;
    std::vector<const void*> sources_;
};

}  // namespace torchext::collectives

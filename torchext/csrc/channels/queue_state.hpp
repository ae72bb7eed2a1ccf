// The state of a queue in shared memory, and how it changes under the lock.
//
// A message lies in one slab: [header][data], or, where the receiver asked for batches, in one row of a slab:
// [row states][header][data of all rows, leaf by leaf]. What is true of a slab is its `state` and those of its rows, which
// change by single stores, always last. The ring of queued slabs, the stack of free ones and all counts follow from them,
// so that after a death in the critical section they are rebuilt; a message is queued or is not, but never half.
//
// A slab's life: free -> writing (one message) or open (rows) -> queued -> reading -> returned -> free, each step with the
// lock but for that to `returned`. What is ready while a batch that was begun before still lacks rows stays open until that
// is queued: else it would overtake messages of the same sender.
#pragma once

#include <utility>

#include "slabs.hpp"

namespace torchext::channels {

class QueueState : public Segment {
public:
    std::uint64_t stride() const { return q().stride; }
    std::uint64_t slots() const { return q().slots; }
    Policy policy() const { return static_cast<Policy>(q().policy); }
    Counters& counters() const { return q().counters; }
    std::byte* data(std::uint32_t slab) const { return base() + q().data_offset + slab * q().stride; }
    const Slab& slab(std::uint32_t i) const { return slabs_[i]; }
    Row* rows(std::uint32_t slab) const { return reinterpret_cast<Row*>(data(slab)); }
    static std::size_t header_offset(std::uint32_t rows) { return round_up(rows * sizeof(Row), kLine); }

protected:
    explicit QueueState(Mapping mapping) : Segment(std::move(mapping)) {}

    static constexpr std::uint32_t kNone = ~std::uint32_t{0};  // as a slab

    struct Layout {
        std::uint64_t slabs, ring, free, data;
    };
    static Layout lay_out(std::uint64_t num_slabs) {
        Layout l{};
        l.slabs = round_up(sizeof(QueueHeader), 4096);
        l.ring = l.slabs + num_slabs * sizeof(Slab);
        l.free = l.ring + num_slabs * sizeof(std::uint32_t);
        l.data = round_up(l.free + num_slabs * sizeof(std::uint32_t), 2 << 20);
        return l;
    }
    void locate() {
        const auto l = lay_out(q().num_slabs);
        slabs_ = reinterpret_cast<Slab*>(base() + l.slabs);
        ring_ = reinterpret_cast<std::uint32_t*>(base() + l.ring);
        free_ = reinterpret_cast<std::uint32_t*>(base() + l.free);
        ring_size_ = q().num_slabs;
    }

    QueueHeader& q() const { return *reinterpret_cast<QueueHeader*>(base()); }
    std::atomic_ref<std::uint32_t> batch_rows_word() const { return std::atomic_ref(q().batch_rows); }
    std::uint64_t recent() const { return std::atomic_ref(q().recent_bytes).load(std::memory_order_relaxed); }
    static SlabState state_of(const Slab& slab) { return static_cast<SlabState>(slab.state.load(std::memory_order_relaxed)); }
    static RowState state_of(const Row& row) { return static_cast<RowState>(row.state.load(std::memory_order_relaxed)); }
    static void count(std::atomic<std::uint64_t>& counter, std::uint64_t n = 1) {
        counter.fetch_add(n, std::memory_order_relaxed);
    }

    // All of these with the lock.

    std::uint64_t queued() const {  // without the lock: about
        const auto head = q().head.load(std::memory_order_relaxed), tail = q().tail.load(std::memory_order_relaxed);
        return tail > head ? tail - head : 0;
    }
    void push(std::uint32_t i) {
        const auto tail = q().tail.load(std::memory_order_relaxed);
        ring_[tail % ring_size_] = i;
        q().tail.store(tail + 1, std::memory_order_relaxed);
        q().bells[kReceive].news.store(static_cast<std::uint32_t>(tail + 1), std::memory_order_relaxed);
    }
    std::uint32_t pop() {
        const auto head = q().head.load(std::memory_order_relaxed);
        q().head.store(head + 1, std::memory_order_relaxed);
        q().bells[kSend].news.store(static_cast<std::uint32_t>(head + 1), std::memory_order_relaxed);
        return ring_[head % ring_size_];
    }

    // Nobody is left who could receive.
    bool unreachable() const {
        const auto& s = q().segment;
        return closed() || (s.num_present[0] == 0 && s.num_present[1] == 0 && s.num_joined[0] != 0);
    }
    bool all_senders_left() const {
        const auto& s = q().segment;
        return s.num_joined[2] >= q().num_senders && s.num_present[2] == 0;
    }

    // A message from another machine has been accepted there, so that it is too late for an error.
    bool waits(std::uint32_t peer) const {
        return policy() == Policy::block ||
               (policy() == Policy::error && q().segment.peers[peer].role == static_cast<std::uint32_t>(Role::carrier));
    }

    Status turn_away() {
        const bool drop = policy() == Policy::drop_newest;
        count(drop ? q().counters.dropped_newest : q().counters.refused);
        return drop ? Status::dropped : Status::full;
    }

    void enqueue(std::uint32_t i) {
        auto& slab = slabs_[i];
        slab.seq = q().next_seq++;
        const auto decayed = q().recent_bytes - q().recent_bytes / 64;
        std::atomic_ref(q().recent_bytes).store(std::max(slab.bytes, decayed), std::memory_order_relaxed);
        slab.state.store(static_cast<std::uint32_t>(SlabState::queued), std::memory_order_release);
        push(i);
    }

    void put_back(std::uint32_t i) {
        slabs_[i].state.store(static_cast<std::uint32_t>(SlabState::free), std::memory_order_release);
        free_[q().num_free++] = i;
    }

    // Frees a slab that a receiver has returned; false if somebody has meanwhile.
    bool free_returned(std::uint32_t i) {
        // seq_cst, with `scarce`: either we see it here, or who returns it sees that we lack one
        if (slabs_[i].state.load() != static_cast<std::uint32_t>(SlabState::returned)) return false;
        --q().num_reading;
        put_back(i);
        return true;
    }
    void free_all_returned() {
        for (std::uint32_t i = 0; i < q().num_slabs; ++i) free_returned(i);
    }
    bool any_free() {
        if (q().num_free != 0) return true;
        q().scarce.store(1);
        free_all_returned();
        return q().num_free != 0;
    }

    // A free slab, for a message by itself.
    std::uint32_t take_free(std::uint32_t peer, std::uint64_t bytes) {
        const auto i = free_[--q().num_free];
        auto& slab = slabs_[i];
        slab.owner = peer;
        slab.rows = 0;
        slab.bytes = bytes;
        if (bytes > slab.touched) slab.touched = bytes;
        slab.state.store(static_cast<std::uint32_t>(SlabState::writing), std::memory_order_release);
        return i;
    }

    // What was written there comes after all that was begun before.
    void append(std::uint32_t i, std::uint64_t header_bytes, std::int64_t version, bool& wake) {
        auto& slab = slabs_[i];
        slab.header_bytes = header_bytes;
        slab.version = version;
        slab.given = slab.done = 0;
        slab.seq = q().next_seq++;
        set_ending(i, Ending::ready);
        slab.state.store(static_cast<std::uint32_t>(SlabState::open), std::memory_order_release);
        ++q().num_open;
        count(q().counters.sent);
        count(q().counters.bytes_sent, slab.bytes);
        wake = queue_ready(i) || wake;
    }

    void drop_oldest() {
        const auto i = pop();
        count(q().counters.dropped_oldest, slabs_[i].rows != 0 ? slabs_[i].done : 1);
        put_back(i);
    }

    bool same_header(std::uint32_t i, const std::string& header) const {
        const auto& slab = slabs_[i];
        return slab.header_bytes == header.size() &&
               std::memcmp(data(i) + header_offset(slab.rows), header.data(), header.size()) == 0;
    }

    void open_batch(const std::string& header, std::uint64_t data_bytes) {
        const auto i = free_[--q().num_free];
        auto& slab = slabs_[i];
        slab.rows = q().batch_rows;
        slab.given = slab.done = 0;
        set_ending(i, Ending::open);
        slab.seq = q().next_seq++;
        slab.header_bytes = header.size();
        const auto offset = header_offset(slab.rows);
        slab.bytes = offset + round_up(header.size(), kLine) + data_bytes;
        if (slab.bytes > slab.touched) slab.touched = slab.bytes;
        std::memset(data(i), 0, offset);
        std::memcpy(data(i) + offset, header.data(), header.size());
        slab.state.store(static_cast<std::uint32_t>(SlabState::open), std::memory_order_release);
        ++q().num_open;
        q().open_slab = i + 1;
    }

    void give_row(std::uint32_t peer, std::uint32_t i, std::uint32_t r) {
        auto& row = rows(i)[r];
        row.owner = peer;
        row.state.store(static_cast<std::uint32_t>(RowState::writing), std::memory_order_release);
    }

    // A row whose writer gave it back or died. Where it lies before others of this peer, the batch is cut short instead.
    bool fill_hole(std::uint32_t peer, const std::string& header, Ticket& ticket, bool& wake) {
        for (std::uint32_t i = 0; i < q().num_slabs; ++i) {
            if (!is_open(i) || !same_header(i, header)) continue;
            for (std::uint32_t r = 0; r < slabs_[i].given; ++r) {
                if (state_of(rows(i)[r]) != RowState::empty) continue;
                if (comes_after(peer, i, r)) {
                    if (q().open_slab != i + 1) wake = cut(i) || wake;
                    break;
                }
                give_row(peer, i, r);
                --q().holes;
                ticket = {i, r, true};
                return true;
            }
        }
        return false;
    }

    // Whether this peer has something in a row after that, or in what was begun after that batch.
    bool comes_after(std::uint32_t peer, std::uint32_t slab, std::uint32_t row) const {
        for (std::uint32_t i = 0; i < q().num_slabs; ++i) {
            if (state_of(slabs_[i]) != SlabState::open || slabs_[i].seq < slabs_[slab].seq) continue;
            if (slabs_[i].rows == 0 && slabs_[i].owner == peer) return true;
            for (std::uint32_t r = i == slab ? row + 1 : 0; r < slabs_[i].given; ++r) {
                if (state_of(rows(i)[r]) != RowState::empty && rows(i)[r].owner == peer) return true;
            }
        }
        return false;
    }

    // A row whose writer gave it back or died. True if a receiver should be woken.
    bool void_row(std::uint32_t i, std::uint32_t r) {
        if (state_of(slabs_[i]) != SlabState::open) return false;
        rows(i)[r].state.store(static_cast<std::uint32_t>(RowState::empty), std::memory_order_release);
        if (ending_of(i) == Ending::cut) return finish(i);
        ++q().holes;
        return false;
    }

    Ending ending_of(std::uint32_t i) const { return static_cast<Ending>(slabs_[i].ending); }
    void set_ending(std::uint32_t i, Ending ending) { slabs_[i].ending = static_cast<std::uint32_t>(ending); }
    // Whether it may still get rows.
    bool is_open(std::uint32_t i) const { return state_of(slabs_[i]) == SlabState::open && ending_of(i) == Ending::open; }
    bool is_ready(std::uint32_t i) const {
        return ending_of(i) == Ending::ready || (ending_of(i) == Ending::open && slabs_[i].done == slabs_[i].rows);
    }

    // The open slab that was begun first, of all or of those that are ready; kNone: there is none.
    std::uint32_t oldest_open(bool ready) const {
        std::uint32_t best = kNone;
        for (std::uint32_t i = 0; i < q().num_slabs; ++i) {
            if (state_of(slabs_[i]) != SlabState::open || (ready && !is_ready(i))) continue;
            if (best == kNone || slabs_[i].seq < slabs_[best].seq) best = i;
        }
        return best;
    }

    // Queues what is open and ready, in the order in which it was begun, up to the first that is not ready. True if a
    // receiver should be woken. `changed`: the open slab that is why, or kNone.
    bool queue_ready(std::uint32_t changed) {
        if (changed != kNone && !is_ready(changed)) return false;
        bool any = false;
        while (q().num_open != 0) {
            const auto i = q().num_open == 1 && changed != kNone ? changed : oldest_open(false);
            changed = kNone;
            if (!is_ready(i)) break;
            queue_open(i);
            any = true;
        }
        return any && q().waiting[kReceive] != 0;
    }

    void queue_open(std::uint32_t i) {
        --q().num_open;
        enqueue(i);
    }

    // Takes no more rows into the batch that is open; true if a receiver should be woken.
    bool seal_open() {
        if (q().open_slab == 0) return false;
        return cut(std::exchange(q().open_slab, 0U) - 1);
    }

    // Ends the batches that rows of this header cannot fill; true if a receiver should be woken.
    bool end_others(const std::string& header) {
        bool any = false;
        for (std::uint32_t i = 0; i < q().num_slabs; ++i) {
            if (is_open(i) && q().open_slab != i + 1 && !same_header(i, header)) any = cut(i) || any;
        }
        return any;
    }

    // Nothing more will come: what is there is all there will be, and waits no longer for what will not be finished.
    void seal_all() {
        q().open_slab = 0;
        for (std::uint32_t i = 0; i < q().num_slabs; ++i) {
            if (is_open(i)) cut(i);
        }
        if (queued() != 0) return;
        for (auto i = oldest_open(true); i != kNone; i = oldest_open(true)) queue_open(i);
    }

    // Gives no more rows of a batch; it is ready, holes and all, once none is being written. True: as for finish.
    bool cut(std::uint32_t i) {
        set_ending(i, Ending::cut);
        for (std::uint32_t r = 0; r < slabs_[i].given; ++r) {
            if (state_of(rows(i)[r]) == RowState::empty) --q().holes;
        }
        return finish(i);
    }

    // Of a batch that was cut short: makes it ready, unless rows are being written. True if a receiver should be woken.
    bool finish(std::uint32_t i) {
        for (std::uint32_t r = 0; r < slabs_[i].given; ++r) {
            if (state_of(rows(i)[r]) == RowState::writing) return false;
        }
        if (slabs_[i].done != 0) {
            set_ending(i, Ending::ready);
            return queue_ready(i);
        }
        --q().num_open;
        put_back(i);
        return queue_ready(kNone);
    }

    void repair() override {
        auto& h = q();
        std::uint32_t num_queued = 0;
        h.num_free = h.num_open = h.num_reading = h.holes = 0;
        h.waiting[0] = h.waiting[1] = 0;
        for (const auto& cell : h.segment.peers) {
            for (int side = 0; side < 2; ++side) h.waiting[side] += cell.waiting[side];
        }
        for (std::uint32_t i = 0; i < h.num_slabs; ++i) {
            auto& slab = slabs_[i];
            if (state_of(slab) == SlabState::open) {
                ++h.num_open;
                h.next_seq = std::max(h.next_seq, slab.seq + 1);
            }
            if (state_of(slab) == SlabState::open && ending_of(i) != Ending::ready) {
                std::uint32_t given = 0, present = 0;
                slab.done = 0;
                for (std::uint32_t r = 0; r < slab.rows; ++r) {
                    const auto state = state_of(rows(i)[r]);
                    if (state == RowState::empty) continue;
                    given = r + 1;
                    ++present;
                    slab.done += state == RowState::done ? 1 : 0;
                }
                slab.given = h.open_slab == i + 1 || !is_open(i) ? given : slab.rows;
                if (is_open(i)) h.holes += slab.given - present;
            }
            const auto state = state_of(slab);  // once: what is being read may be returned at any time
            if (state == SlabState::queued) ring_[num_queued++] = i;
            if (state == SlabState::free) free_[h.num_free++] = i;
            if (state == SlabState::reading || state == SlabState::returned) ++h.num_reading;
        }
        std::sort(ring_, ring_ + num_queued, [this](auto a, auto b) { return slabs_[a].seq < slabs_[b].seq; });
        if (num_queued != 0) h.next_seq = std::max(h.next_seq, slabs_[ring_[num_queued - 1]].seq + 1);
        h.head.store(0, std::memory_order_relaxed);
        h.tail.store(num_queued, std::memory_order_relaxed);
        if (h.open_slab != 0) {
            const auto& slab = slabs_[h.open_slab - 1];
            if (!is_open(h.open_slab - 1) || slab.given == slab.rows) h.open_slab = 0;
        }
        for (std::uint32_t i = 0; i < h.num_slabs; ++i) {
            if (state_of(slabs_[i]) == SlabState::open && ending_of(i) == Ending::cut) finish(i);
        }
        queue_ready(kNone);
    }

    void reclaim(std::uint32_t peer) override {
        for (std::uint32_t i = 0; i < q().num_slabs; ++i) {
            auto& slab = slabs_[i];
            const auto state = state_of(slab);
            if (state == SlabState::open) {
                for (std::uint32_t r = 0; r < slab.given; ++r) {
                    if (state_of(rows(i)[r]) != RowState::writing || rows(i)[r].owner != peer) continue;
                    count(q().counters.torn);
                    void_row(i, r);
                }
            } else if (slab.owner == peer && state == SlabState::writing) {
                count(q().counters.torn);
                put_back(i);
            } else if (slab.owner == peer && (state == SlabState::reading || state == SlabState::returned)) {
                --q().num_reading;
                put_back(i);
            }
        }
        const auto& cell = q().segment.peers[peer];
        for (int side = 0; side < 2; ++side) q().waiting[side] -= std::min(q().waiting[side], cell.waiting[side]);
    }

    Slab* slabs_ = nullptr;
    std::uint32_t* ring_ = nullptr;
    std::uint32_t* free_ = nullptr;
    std::uint64_t ring_size_ = 1;
};

}  // namespace torchext::channels

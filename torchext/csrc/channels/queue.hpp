// The queue behind a channel: slabs that senders fill and receivers read in place, with a policy for when it is full.
//
// A message lies in one slab: [header][data], or, where the receiver asked for batches, in one row of a slab:
// [row states][header][data of all rows, leaf by leaf]. What is true of a slab is its `state` and those of its rows, which
// change by single stores, always last. The ring of queued slabs, the stack of free ones and all counts follow from them,
// so that after a death in the critical section they are rebuilt; a message is queued or is not, but never half.
//
// A slab's life: free -> writing (one message) or open (rows) -> queued -> reading -> free. What is ready while a batch that
// was begun before still lacks rows stays open until that is queued: else it would overtake messages of the same sender.
#pragma once

#include <memory>
#include <optional>

#include "slabs.hpp"

namespace torchext::channels {

// What a caller does around its waits.
class Sleeper {
public:
    virtual ~Sleeper() = default;
    virtual void before_sleep() {}
    virtual bool interrupted() { return false; }  // called every kScanEvery or sooner
};

class Queue final : public Segment {
public:
    static constexpr std::uint64_t kMagic = 0x3230'4e48'4354'5854;  // changes with the layout
    static constexpr std::uint32_t kMaxRows = 4096;
    static constexpr std::uint32_t kWriters = kMaxPeers;  // slabs for those who write at the same time
    static constexpr std::uint64_t kSpace = std::uint64_t{1} << 41;  // of address space at most
    static constexpr std::uint64_t kLargestStride = std::uint64_t{1} << 32;
    static constexpr std::uint32_t kNone = ~std::uint32_t{0};  // as a slab
    static constexpr std::uint64_t kLeastKept = 64 << 10;

    static constexpr std::size_t kHeedless = ~std::size_t{0};  // as a number of known deaths: go on whoever dies

    static std::shared_ptr<Queue> create(std::uint64_t slots, std::uint64_t slot_bytes, Policy policy,
                                         std::uint64_t num_senders, bool poison, std::uint64_t nonce) {
        // Queued or open ones, as many that receivers hold, and those being written.
        const std::uint64_t num_slabs = 2 * slots + kWriters;
        std::uint64_t stride = kLargestStride;
        while (stride * num_slabs > kSpace) stride /= 2;
        const auto layout = lay_out(num_slabs);
        const std::uint64_t total = layout.data + num_slabs * stride;
        auto queue = std::shared_ptr<Queue>(new Queue(Mapping::create("torchext-channel", total)));
        auto& q = queue->q();
        q.slots = slots;
        q.slot_bytes = slot_bytes;
        q.num_slabs = num_slabs;
        q.stride = stride;
        q.data_offset = layout.data;
        q.num_senders = num_senders;
        q.policy = static_cast<std::uint32_t>(policy);
        q.poison = poison ? 1 : 0;
        initialize(q.segment, kMagic, nonce, total);
        queue->locate();
        Locked lock(*queue);
        queue->repair();
        return queue;
    }

    // Takes the descriptor over.
    static std::shared_ptr<Queue> attach(int fd) {
        auto queue = std::shared_ptr<Queue>(new Queue(Mapping::adopt(fd, kMagic)));
        queue->locate();
        return queue;
    }

    std::uint64_t stride() const { return q().stride; }
    std::uint64_t slots() const { return q().slots; }
    Policy policy() const { return static_cast<Policy>(q().policy); }
    Counters& counters() const { return q().counters; }
    std::byte* data(std::uint32_t slab) const { return base() + q().data_offset + slab * q().stride; }
    const Slab& slab(std::uint32_t i) const { return slabs_[i]; }
    Row* rows(std::uint32_t slab) const { return reinterpret_cast<Row*>(data(slab)); }
    static std::size_t header_offset(std::uint32_t rows) { return round_up(rows * sizeof(Row), kLine); }

    // Whether nobody is left who could receive what is sent.
    bool deserted() {
        Locked lock(*this);
        return unreachable();
    }

    // How many messages are put together from now on; 0 or 1: each by itself.
    void set_batch_rows(std::uint32_t rows) {
        bool wake = false;
        {
            Locked lock(*this);
            q().batch_rows = rows;
            wake = seal_open();
            if (q().holes != 0) wake = end_others({}) || wake;
        }
        if (wake) wake_side(kReceive, true);
    }
    std::uint32_t batch_rows() const { return batch_rows_word().load(std::memory_order_relaxed); }

    // --- Sending ---------------------------------------------------------------------------------------------------

    // Whether a message would be turned away as things stand, so that it need not be copied first.
    Status would_refuse() {
        if (policy() != Policy::drop_newest && policy() != Policy::error) return Status::ok;
        Locked lock(*this);
        if (queued() < q().slots) return Status::ok;
        return turn_away();
    }

    // A slab for one message of so many bytes.
    Status begin(std::uint32_t peer, std::uint64_t bytes, Nanoseconds deadline, Sleeper& sleeper,
                 std::size_t deaths, Ticket& ticket) {
        return wait(kSend, peer, deadline, sleeper, deaths, [&]() -> std::optional<Status> {
            if (unreachable()) return Status::closed;
            if (q().num_free == 0) return std::nullopt;
            const auto i = free_[--q().num_free];
            auto& slab = slabs_[i];
            slab.owner = peer;
            slab.rows = 0;
            slab.bytes = bytes;
            if (bytes > slab.touched) slab.touched = bytes;
            slab.state.store(static_cast<std::uint32_t>(SlabState::writing), std::memory_order_release);
            ticket = {i, 0, false};
            return Status::ok;
        });
    }

    // Queues what was written there; on any other outcome than ok the slab is given back, or after a timeout kept if told
    // to, for another try.
    Status commit(std::uint32_t peer, const Ticket& ticket, std::uint64_t header_bytes, std::int64_t version,
                  Nanoseconds deadline, Sleeper& sleeper, std::size_t deaths, bool keep = false) {
        auto& slab = slabs_[ticket.slab];
        bool wake = false;
        const auto status = wait(kSend, peer, deadline, sleeper, deaths, [&]() -> std::optional<Status> {
            if (unreachable()) return Status::closed;
            // What was sent before comes before.
            wake = seal_open() || wake;
            if (q().holes != 0) wake = end_others({}) || wake;
            while (queued() + q().num_open >= q().slots) {
                if (waits(peer) || queued() == 0) return std::nullopt;
                if (policy() != Policy::drop_oldest) return turn_away();
                drop_oldest();
            }
            slab.header_bytes = header_bytes;
            slab.version = version;
            slab.given = slab.done = 0;
            slab.seq = q().next_seq++;
            set_ending(ticket.slab, Ending::ready);
            slab.state.store(static_cast<std::uint32_t>(SlabState::open), std::memory_order_release);
            ++q().num_open;
            count(q().counters.sent);
            count(q().counters.bytes_sent, slab.bytes);
            wake = queue_ready(ticket.slab) || wake;
            return Status::ok;
        });
        if (wake) wake_side(kReceive, false);
        if (status == Status::ok) return status;
        if (status != Status::timeout || !keep) abandon(ticket);
        return status;
    }

    // A row of the batch that is open, or of a new one. `header` says what rows look like; all of a batch agree in it.
    Status begin_row(std::uint32_t peer, const std::string& header, std::uint64_t data_bytes, Nanoseconds deadline,
                     Sleeper& sleeper, std::size_t deaths, Ticket& ticket) {
        bool wake = false, wake_next = false;
        const auto status = wait(kSend, peer, deadline, sleeper, deaths, [&]() -> std::optional<Status> {
            if (unreachable()) return Status::closed;
            if (q().holes != 0) {
                if (fill_hole(peer, header, ticket, wake)) return Status::ok;
                wake = end_others(header) || wake;
            }
            if (q().open_slab != 0 && !same_header(q().open_slab - 1, header)) wake = seal_open() || wake;
            if (q().open_slab == 0) {
                while (queued() + q().num_open >= q().slots) {
                    if (waits(peer) || queued() == 0) return std::nullopt;
                    if (policy() != Policy::drop_oldest) return turn_away();
                    drop_oldest();
                }
                if (q().num_free == 0) return std::nullopt;
                open_batch(header, data_bytes);
            }
            const auto i = q().open_slab - 1;
            ticket = {i, slabs_[i].given, true};
            give_row(peer, i, ticket.row);
            if (++slabs_[i].given == slabs_[i].rows) q().open_slab = 0;
            wake_next = q().open_slab != 0 && q().waiting[kSend] != 0;  // a free slot is room for many rows
            return Status::ok;
        });
        if (wake) wake_side(kReceive, false);
        if (wake_next) wake_side(kSend, false);
        return status;
    }

    Status commit_row(const Ticket& ticket, std::int64_t version) {
        bool wake = false;
        {
            Locked lock(*this);
            if (unreachable()) {
                void_row(ticket.slab, ticket.row);
                return Status::closed;
            }
            auto& row = rows(ticket.slab)[ticket.row];
            row.version = version;
            row.state.store(static_cast<std::uint32_t>(RowState::done), std::memory_order_release);
            auto& slab = slabs_[ticket.slab];
            ++slab.done;
            count(q().counters.sent);
            count(q().counters.bytes_sent, slab.bytes / slab.rows);
            wake = ending_of(ticket.slab) == Ending::cut ? finish(ticket.slab) : queue_ready(ticket.slab);
        }
        if (wake) wake_side(kReceive, false);
        return Status::ok;
    }

    // Gives back what was not committed.
    void abandon(const Ticket& ticket) {
        bool wake = false, wake_reader = false;
        {
            Locked lock(*this);
            if (ticket.batched) {
                wake_reader = void_row(ticket.slab, ticket.row);
            } else {
                put_back(ticket.slab);
            }
            wake = q().waiting[kSend] != 0;
        }
        if (wake) wake_side(kSend, false);
        if (wake_reader) wake_side(kReceive, false);
    }

    // --- Receiving -------------------------------------------------------------------------------------------------

    // The next message or batch. Closed: nothing more will come.
    Status receive(std::uint32_t peer, Nanoseconds deadline, Sleeper& sleeper, std::size_t deaths,
                   Batch& batch) {
        bool wake = false, wake_next = false;
        const auto status = wait(kReceive, peer, deadline, sleeper, deaths, [&]() -> std::optional<Status> {
            if (queued() == 0) {
                const bool over = closed() || all_senders_left();
                if (!over) return std::nullopt;
                seal_all();
                if (queued() == 0) return Status::closed;
            }
            const auto i = ring_[q().head % ring_size_];
            auto& slab = slabs_[i];
            slab.owner = peer;
            slab.state.store(static_cast<std::uint32_t>(SlabState::reading), std::memory_order_release);
            ++q().head;
            ++q().num_reading;
            batch = {i, slab.rows, q().num_reading > q().slots};
            count(q().counters.received, slab.rows != 0 ? slab.done : 1);
            // Senders that wait for room sleep until half of it is there, or each message would cost two switches between
            // processes. Nobody waits for theirs meanwhile, and after kScanEvery they look by themselves.
            wake = q().waiting[kSend] != 0 && 2 * queued() <= q().slots;
            wake_next = queued() != 0 && q().waiting[kReceive] != 0;
            return Status::ok;
        });
        if (wake) wake_side(kSend, false);
        if (wake_next) wake_side(kReceive, false);
        return status;
    }

    // The receiver has done with it.
    void release(std::uint32_t i) {
        auto& slab = slabs_[i];
        if (q().poison != 0) std::memset(data(i), 0xFF, slab.bytes);
        const auto keep = std::max<std::uint64_t>(q().slot_bytes != 0 ? q().slot_bytes : recent(), kLeastKept);
        if (slab.touched > 2 * keep || (q().slot_bytes != 0 && slab.touched > keep)) {
            // The memory of an outlier goes back to the system.
            const auto from = round_up(keep, 4096);
            if (slab.touched > from) madvise(data(i) + from, round_up(slab.touched - from, 4096), MADV_REMOVE);
            slab.touched = from;
        }
        bool wake = false;
        {
            Locked lock(*this);
            --q().num_reading;
            wake = q().waiting[kSend] > q().num_free;  // who waits for slots, of which this is none, is woken by receive
            put_back(i);
        }
        if (wake) wake_side(kSend, false);
    }

    struct Depth {
        std::uint64_t messages, queued, open, reading, retained_bytes;
    };
    Depth depth() {
        Locked lock(*this);
        Depth d{0, queued(), q().num_open, q().num_reading, 0};
        for (std::uint64_t i = 0; i < q().num_slabs; ++i) {
            const auto& slab = slabs_[i];
            d.retained_bytes += slab.touched;
            const auto state = state_of(slab);
            if (state == SlabState::queued || state == SlabState::open) d.messages += slab.rows != 0 ? slab.done : 1;
        }
        return d;
    }

private:
    explicit Queue(Mapping mapping) : Segment(std::move(mapping)) {}

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

    std::uint64_t queued() const { return q().tail - q().head; }

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
        ring_[q().tail++ % ring_size_] = i;
    }

    void put_back(std::uint32_t i) {
        slabs_[i].state.store(static_cast<std::uint32_t>(SlabState::free), std::memory_order_release);
        free_[q().num_free++] = i;
    }

    void drop_oldest() {
        const auto i = ring_[q().head++ % ring_size_];
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
        h.head = h.tail = 0;
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
            if (state_of(slab) == SlabState::queued) ring_[h.tail++] = i;
            if (state_of(slab) == SlabState::free) free_[h.num_free++] = i;
            if (state_of(slab) == SlabState::reading) ++h.num_reading;
        }
        std::sort(ring_, ring_ + h.tail, [this](auto a, auto b) { return slabs_[a].seq < slabs_[b].seq; });
        if (h.tail != 0) h.next_seq = std::max(h.next_seq, slabs_[ring_[h.tail - 1]].seq + 1);
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
            } else if (slab.owner == peer && state == SlabState::reading) {
                --q().num_reading;
                put_back(i);
            }
        }
        const auto& cell = q().segment.peers[peer];
        for (int side = 0; side < 2; ++side) q().waiting[side] -= std::min(q().waiting[side], cell.waiting[side]);
    }

    // Without the lock.

    void wake_everyone() override {
        for (const auto side : {kSend, kReceive}) wake_side(side, true);
    }

    void wake_side(Side side, bool all) {
        auto& word = side == kSend ? q().writable : q().readable;
        word.fetch_add(1, std::memory_order_release);
        if (all) {
            futex_wake_all(word);
        } else {
            futex_wake_one(word);
        }
    }

    // Tries until it gives a status. Wakes up now and then to look at signals and at the other processes. One waker wakes
    // one waiter; if that one dies with the news, the others look again within kScanEvery.
    template <class Try>
    Status wait(Side side, std::uint32_t peer, Nanoseconds deadline, Sleeper& sleeper, std::size_t deaths,
                Try attempt) {
        if (forked()) return Status::forked;
        const Role role = side == kSend ? Role::sender : Role::receiver;
        if (this->deaths(role) != deaths && deaths != kHeedless) return Status::peer_died;
        auto& word = side == kSend ? q().writable : q().readable;
        auto& cell = q().segment.peers[peer];
        auto& waited = side == kSend ? q().counters.send_wait_ns : q().counters.receive_wait_ns;
        bool listed = false;
        Nanoseconds since = 0;
        std::optional<Status> early;
        while (true) {
            std::uint32_t seen = 0;
            std::optional<Status> status;
            {
                Locked lock(*this);
                if (listed) {
                    --q().waiting[side];
                    --cell.waiting[side];
                    listed = false;
                }
                // Not once a signal handler has raised: what came would be lost with the exception.
                if (early != Status::interrupted) status = attempt();
                if (!status.has_value()) status = early;
                if (!status.has_value() && now() >= deadline) status = Status::timeout;
                if (!status.has_value()) {
                    seen = word.load(std::memory_order_relaxed);  // changed after what we wait for, which the lock guards
                    ++q().waiting[side];
                    ++cell.waiting[side];
                    listed = true;
                }
            }
            // Where the last at the other end has died, that is the news.
            if (status == Status::closed && deaths != kHeedless && this->deaths(role, true) != deaths) {
                status = Status::peer_died;
            }
            if (status.has_value()) {
                if (since != 0) count(waited, static_cast<std::uint64_t>(now() - since));
                // We may have been woken for what we leave to others.
                if (since != 0 && *status != Status::ok) wake_side(side, false);
                return *status;
            }
            if (since == 0) {
                since = now();
                sleeper.before_sleep();
            }
            pause(word, seen, std::min(deadline - now(), kScanEvery));
            if (sleeper.interrupted()) {
                early = Status::interrupted;
            } else if (this->deaths(role) != deaths && deaths != kHeedless) {
                early = Status::peer_died;
            }
        }
    }

    // Waits for the word to change: a little by turning in place, if that has been enough lately, else asleep.
    void pause(std::atomic<std::uint32_t>& word, std::uint32_t seen, Nanoseconds timeout) {
        const auto turns = turns_.load(std::memory_order_relaxed);
        for (std::uint32_t i = 0; i < turns; ++i) {
            if (word.load(std::memory_order_acquire) != seen) {
                turns_.store(std::min(turns * 2, kMostTurns), std::memory_order_relaxed);
                return;
            }
            cpu_relax();
        }
        turns_.store(std::max(turns / 2, kLeastTurns), std::memory_order_relaxed);
        futex_wait(word, seen, timeout);
    }

    static constexpr std::uint32_t kLeastTurns = 8;
    static constexpr std::uint32_t kMostTurns = 1024;
    std::atomic<std::uint32_t> turns_{64};
    Slab* slabs_ = nullptr;
    std::uint32_t* ring_ = nullptr;
    std::uint32_t* free_ = nullptr;
    std::uint64_t ring_size_ = 1;
};

}  // namespace torchext::channels

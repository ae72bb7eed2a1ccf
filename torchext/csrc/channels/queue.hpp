// The queue behind a channel: slabs that senders fill and receivers read in place, with a policy for when it is full. What
// is in the shared memory, and holds after a death at any instruction, is in queue_state.hpp.
#pragma once

#include <memory>
#include <optional>

#include "queue_state.hpp"

namespace torchext::channels {

// What a caller does around its waits.
class Sleeper {
public:
    virtual ~Sleeper() = default;
    virtual void before_sleep() {}
    virtual bool interrupted() { return false; }  // called every kScanEvery or sooner
};

class Queue final : public QueueState {
public:
    static constexpr std::uint64_t kMagic = 0x3330'4e48'4354'5854;  // changes with the layout
    static constexpr std::uint32_t kMaxRows = 4096;
    static constexpr std::uint32_t kWriters = kMaxPeers;  // slabs for those who write at the same time
    static constexpr std::uint64_t kSpace = std::uint64_t{1} << 41;  // of address space at most
    static constexpr std::uint64_t kLargestStride = std::uint64_t{1} << 32;
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
        if (forked()) return Status::forked;  // it has to join first, or nobody would know of it
        Locked lock(*this);
        if (queued() < q().slots) return Status::ok;
        return turn_away();
    }

    // A slab for one message of so many bytes.
    Status begin(std::uint32_t peer, std::uint64_t bytes, Nanoseconds deadline, Sleeper& sleeper,
                 std::size_t deaths, Ticket& ticket) {
        return wait(kSend, peer, deadline, sleeper, deaths, &Queue::unclear, [&]() -> std::optional<Status> {
            if (unreachable()) return Status::closed;
            if (!any_free()) return std::nullopt;
            ticket = {take_free(peer, bytes), 0, false};
            return Status::ok;
        });
    }

    // Queues what was written there; on any other outcome than ok the slab is given back, or after a timeout kept if told
    // to, for another try.
    Status commit(std::uint32_t peer, const Ticket& ticket, std::uint64_t header_bytes, std::int64_t version,
                  Nanoseconds deadline, Sleeper& sleeper, std::size_t deaths, bool keep = false) {
        bool wake = false;
        const auto status = wait(kSend, peer, deadline, sleeper, deaths, &Queue::seems_full, [&]() -> std::optional<Status> {
            if (const auto full = make_room(peer, wake); full != Status::ok) return full;
            append(ticket.slab, header_bytes, version, wake);
            return Status::ok;
        });
        if (wake) wake_side(kReceive, false);
        if (status == Status::ok) return status;
        if (status != Status::timeout || !keep) abandon(ticket);
        return status;
    }

    // Both at once, with the lock held while `fill(slab)` writes: for what is small, as the lock, which travels between the
    // caches of processes, costs more than the message.
    template <class Fill>
    Status send(std::uint32_t peer, std::uint64_t bytes, std::uint64_t header_bytes, std::int64_t version,
                Nanoseconds deadline, Sleeper& sleeper, std::size_t deaths, Fill fill) {
        bool wake = false;
        const auto status = wait(kSend, peer, deadline, sleeper, deaths, &Queue::seems_full, [&]() -> std::optional<Status> {
            if (const auto full = make_room(peer, wake); full != Status::ok) return full;
            if (!any_free()) return lack_room(wake);
            const auto i = take_free(peer, bytes);
            fill(i);
            append(i, header_bytes, version, wake);
            return Status::ok;
        });
        if (wake) wake_side(kReceive, false);
        return status;
    }

    // A row of the batch that is open, or of a new one. `header` says what rows look like; all of a batch agree in it.
    Status begin_row(std::uint32_t peer, const std::string& header, std::uint64_t data_bytes, Nanoseconds deadline,
                     Sleeper& sleeper, std::size_t deaths, Ticket& ticket) {
        bool wake = false, wake_next = false;
        const auto status = wait(kSend, peer, deadline, sleeper, deaths, &Queue::unclear, [&]() -> std::optional<Status> {
            if (unreachable()) return Status::closed;
            if (q().holes != 0) {
                if (fill_hole(peer, header, ticket, wake)) return Status::ok;
                wake = end_others(header) || wake;
            }
            if (q().open_slab != 0 && !same_header(q().open_slab - 1, header)) wake = seal_open() || wake;
            if (q().open_slab == 0) {
                while (queued() + q().num_open >= q().slots) {
                    if (waits(peer) || queued() == 0) return lack_room(wake);
                    if (policy() != Policy::drop_oldest) return turn_away();
                    drop_oldest();
                }
                if (!any_free()) return lack_room(wake);
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
        const auto status = wait(kReceive, peer, deadline, sleeper, deaths, &Queue::seems_empty, [&]() -> std::optional<Status> {
            if (const auto mine = returned_.exchange(0, std::memory_order_relaxed); mine != 0) free_returned(mine - 1);
            if (queued() == 0) {
                const bool over = closed() || all_senders_left();
                if (!over) return std::nullopt;
                seal_all();
                if (queued() == 0) return Status::closed;
            }
            const auto i = pop();
            auto& slab = slabs_[i];
            slab.owner = peer;
            slab.state.store(static_cast<std::uint32_t>(SlabState::reading), std::memory_order_release);
            ++q().num_reading;
            if (q().num_reading > q().slots) free_all_returned();
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

    // The receiver has done with it. Without the lock if it can be: the next call of receive, which takes it anyway, frees
    // the slab; meanwhile a sender that needs one may.
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
        slab.state.store(static_cast<std::uint32_t>(SlabState::returned));  // seq_cst, see free_returned
        const auto before = returned_.exchange(i + 1, std::memory_order_relaxed);
        if (before == 0 && q().scarce.load() == 0) return;
        bool wake = false, both = false;
        {
            Locked lock(*this);
            const auto waiting = q().waiting[kSend];
            wake = waiting > q().num_free;  // who waits for slots, of which this is none, is woken by receive
            if (waiting == 0) q().scarce.store(0);
            both = before != 0 && free_returned(before - 1);
            // Who has freed it meanwhile has left it to us to wake who lacks one.
            if (!free_returned(i)) wake = waiting != 0;
        }
        if (wake) wake_side(kSend, both);
    }

    struct Depth {
        std::uint64_t messages, queued, open, reading, retained_bytes;
    };
    Depth depth() {
        Locked lock(*this);
        Depth d{0, queued(), q().num_open, 0, 0};
        for (std::uint64_t i = 0; i < q().num_slabs; ++i) {
            const auto& slab = slabs_[i];
            d.retained_bytes += slab.touched;
            const auto state = state_of(slab);
            if (state == SlabState::reading) ++d.reading;
            if (state == SlabState::queued || state == SlabState::open) d.messages += slab.rows != 0 ? slab.done : 1;
        }
        return d;
    }

private:
    explicit Queue(Mapping mapping) : QueueState(std::move(mapping)) {}

    // Whether trying would be in vain, as far as can be seen without the lock.
    bool unclear() const { return false; }
    bool seems_empty() const { return queued() == 0; }
    bool seems_full() const { return policy() == Policy::block && queued() >= q().slots; }

    // With the lock: whether a message by itself may be queued, and what else becomes of it; nothing: wait.
    std::optional<Status> make_room(std::uint32_t peer, bool& wake) {
        if (unreachable()) return Status::closed;
        // What was sent before comes before.
        wake = seal_open() || wake;
        if (q().holes != 0) wake = end_others({}) || wake;
        while (queued() + q().num_open >= q().slots) {
            if (waits(peer) || queued() == 0) return lack_room(wake);
            if (policy() != Policy::drop_oldest) return turn_away();
            drop_oldest();
        }
        return Status::ok;
    }

    // A sender that has to wait for receivers first wakes the one that takes what it has just queued of a batch.
    std::optional<Status> lack_room(bool& wake) {
        if (std::exchange(wake, false)) wake_side(kReceive, false);
        return std::nullopt;
    }

    // Without the lock.

    void wake_everyone() override {
        for (const auto side : {kSend, kReceive}) wake_side(side, true);
    }

    void wake_side(Side side, bool all) {
        auto& word = q().bells[side].word;
        word.fetch_add(1, std::memory_order_release);
        if (all) {
            futex_wake_all(word);
        } else {
            futex_wake_one(word);
        }
    }

    // Tries until it gives a status. Looks on for a moment before it sleeps; wakes up now and then to look at signals and at
    // the other processes. One waker wakes one waiter; if that one dies with the news, the others look again within
    // kScanEvery. Only those who sleep, or are about to, are counted as waiting, and cost the other side a system call.
    // Where trying seems in vain it looks on first: without the lock, which the other side needs to change that.
    template <class Try>
    Status wait(Side side, std::uint32_t peer, Nanoseconds deadline, Sleeper& sleeper, std::size_t deaths,
                bool (Queue::*in_vain)() const, Try attempt) {
        if (forked()) return Status::forked;
        const Role role = side == kSend ? Role::sender : Role::receiver;
        if (this->deaths(role) != deaths && deaths != kHeedless) return Status::peer_died;
        auto& bell = q().bells[side];
        auto& cell = q().segment.peers[peer];
        auto& waited = side == kSend ? q().counters.send_wait_ns : q().counters.receive_wait_ns;
        bool listed = false, looked = false;
        Nanoseconds since = 0;
        std::optional<Status> early;
        while (true) {
            std::uint32_t seen = 0;
            const auto news = bell.news.load(std::memory_order_relaxed);
            std::optional<Status> status;
            if (looked || !(this->*in_vain)() || closed() || now() >= deadline) {
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
                if (!status.has_value() && looked) {
                    seen = bell.word.load(std::memory_order_relaxed);  // changed after what we wait for, which the lock guards
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
            if (!std::exchange(looked, true)) {
                if (look_on(bell.news, news)) continue;
            } else {
                futex_wait(bell.word, seen, std::min(deadline - now(), kScanEvery));
            }
            if (sleeper.interrupted()) {
                early = Status::interrupted;
            } else if (this->deaths(role) != deaths && deaths != kHeedless) {
                early = Status::peer_died;
            }
        }
    }

    // Waits a little for the word to change, turning in place: the longer, the more often that has been enough lately.
    bool look_on(const std::atomic<std::uint32_t>& word, std::uint32_t seen) {
        const auto turns = turns_.load(std::memory_order_relaxed);
        for (std::uint32_t i = 0; i < turns; ++i) {
            if (word.load(std::memory_order_relaxed) != seen) {
                turns_.store(std::min(turns * 2, kMostTurns), std::memory_order_relaxed);
                return true;
            }
            cpu_relax();
        }
        turns_.store(std::max(turns / 2, kLeastTurns), std::memory_order_relaxed);
        return false;
    }

    static constexpr std::uint32_t kLeastTurns = 8;
    static constexpr std::uint32_t kMostTurns = 512;  // about as long as it takes to fall asleep and be woken
    std::atomic<std::uint32_t> turns_{64};
    std::atomic<std::uint32_t> returned_{0};  // a slab that this process has returned and nobody may have freed, plus one
};

}  // namespace torchext::channels

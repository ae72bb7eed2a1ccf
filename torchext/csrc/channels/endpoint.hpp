// A sender or receiver as Python holds it. The GIL is held for what takes microseconds, and released before any sleep and
// for large copies.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "codec.hpp"
#include "queue.hpp"

namespace torchext::channels {

inline constexpr std::size_t kLargeCopy = 128 << 10;  // worth releasing the GIL for
inline constexpr std::size_t kSmallCopy = 4 << 10;    // not worth taking the queue's lock twice for

inline Nanoseconds deadline_in(double timeout_s) {
    constexpr double kForever = 1e9;  // seconds
    return timeout_s < kForever ? now() + static_cast<Nanoseconds>(timeout_s * 1e9)
                                : std::numeric_limits<Nanoseconds>::max();
}

// Sleeps without the GIL and looks at signals.
class PythonSleeper final : public Sleeper {
public:
    ~PythonSleeper() override { wake(); }
    void before_sleep() override { thread_ = PyEval_SaveThread(); }
    bool interrupted() override {
        wake();
        const bool is = PyErr_CheckSignals() != 0;
        before_sleep();
        return is;
    }
    void wake() {
        if (thread_ != nullptr) PyEval_RestoreThread(std::exchange(thread_, nullptr));
    }

private:
    PyThreadState* thread_ = nullptr;
};

// One entry in the table of peers. After `leave` it goes once no view that it gave out is there. Without, as where an
// exception unwinds a process, it stays until that process has ended, so that the others learn how.
struct Member {
    std::shared_ptr<Queue> queue;
    std::uint32_t peer;
    std::atomic<bool> leaving{false};
    Member(std::shared_ptr<Queue> q, std::uint32_t p) : queue(std::move(q)), peer(p) {}
    Member(const Member&) = delete;
    Member& operator=(const Member&) = delete;
    ~Member() {
        if (leaving) queue->leave(peer);
    }
};
using MemberPtr = std::shared_ptr<Member>;

// What a receiver holds: a slab, or a copy of one.
struct Lease {
    MemberPtr member;
    std::uint32_t slab;
    std::uint32_t rows;
    std::size_t header_bytes, header_offset;
    bool owns_slab = true;
    std::unique_ptr<std::byte, decltype(&std::free)> copy{nullptr, &std::free};

    Lease(MemberPtr m, std::uint32_t s, std::uint32_t r, std::size_t bytes, std::size_t offset)
        : member(std::move(m)), slab(s), rows(r), header_bytes(bytes), header_offset(offset) {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    std::byte* base() const { return copy ? copy.get() : member->queue->data(slab); }
    const char* header() const { return reinterpret_cast<const char*>(base()) + header_offset; }
    std::byte* data() const { return base() + header_offset + round_up(header_bytes, kLine); }
    void release() {
        if (std::exchange(owns_slab, false) && !member->queue->forked()) member->queue->release(slab);
    }
    ~Lease() { release(); }
};

inline constexpr const char* kLease = "torchext.channels.lease";
inline constexpr const char* kReservation = "torchext.channels.reservation";

// What a sender writes in place. Its views keep the memory mapped, but not the sender there once it is sent.
struct Reservation {
    std::shared_ptr<Queue> queue;
    MemberPtr member;  // until it is sent or given back
    Ticket ticket;
    std::uint64_t header_bytes;
    std::int64_t version;

    Reservation(MemberPtr m, Ticket t, std::uint64_t bytes, std::int64_t v)
        : queue(m->queue), member(std::move(m)), ticket(t), header_bytes(bytes), version(v) {}
    Reservation(const Reservation&) = delete;
    Reservation& operator=(const Reservation&) = delete;
    void abandon() {
        if (member && !queue->forked()) queue->abandon(ticket);
        member.reset();
    }
    ~Reservation() { abandon(); }
};

template <class T>
T& in(const py::capsule& capsule, const char* name) {
    auto* pointer = static_cast<T*>(PyCapsule_GetPointer(capsule.ptr(), name));
    if (pointer == nullptr) throw py::error_already_set();
    return *pointer;
}

template <class T>
py::capsule capsule_of(std::unique_ptr<T> value, const char* name) {
    py::capsule capsule(value.get(), name, [](PyObject* object) {
        delete static_cast<T*>(PyCapsule_GetPointer(object, PyCapsule_GetName(object)));
    });
    (void)value.release();
    return capsule;
}

// The buffers of this thread's last message; where they are in use, as when a signal handler sends in the middle of a
// send, others.
class Scratch {
public:
    Scratch() : nested_(std::exchange(in_use(), true)) {
        if (nested_) own_.emplace();
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() {
        encoded().clear();
        if (!nested_) in_use() = false;
    }
    Encoded& encoded() { return nested_ ? *own_ : kept(); }

private:
    static bool& in_use() {
        static thread_local bool is = false;
        return is;
    }
    static Encoded& kept() {
        static thread_local Encoded encoded;
        return encoded;
    }
    const bool nested_;
    std::optional<Encoded> own_;
};

using Death = std::tuple<std::string, int, int, int>;  // name, pid, role, wait status or -1

// Which deaths one end has been told of.
class Told {
public:
    std::size_t count = 0;

    // Those since the last call. Where there are none, as another thread has asked since this one learnt of them, the
    // latest once more.
    template <class T>
    std::vector<Death> next(T& segment, Role role) {
        std::vector<Death> found;
        for (auto& d : segment.deaths_since(count, role)) {
            found.emplace_back(d.name, d.pid, static_cast<int>(d.role), d.status);
        }
        count += found.size();
        if (!found.empty()) latest_ = std::move(found);
        return latest_;
    }

private:
    std::vector<Death> latest_;
};

class Endpoint {
public:
    Endpoint(std::shared_ptr<Queue> queue, const std::string& name, Role role, bool heed_deaths)
        : role_(role), heed_(heed_deaths) {
        // A receiver joins when it first receives, and is told of all that this process has seen; a sender of what follows.
        if (role == Role::sender) told_.count = queue->known_deaths(role);
        const auto peer = queue->join(name, role);
        member_ = std::make_shared<Member>(std::move(queue), peer);
    }

    void leave() {
        if (member_) member_->leaving = true;
        member_.reset();
    }

    int send(py::handle tree, double timeout_s, std::int64_t version) {
        const auto member = this->member();
        auto& queue = *member->queue;
        Scratch scratch;
        auto& encoded = scratch.encoded();
        Slot slot;
        PythonSleeper sleeper;
        const auto deadline = deadline_in(timeout_s);
        const auto rows = queue.batch_rows();
        encoded.encode(tree, rows > 1, false);
        const auto bytes = plain_bytes(encoded);
        if (rows <= 1 && bytes <= kSmallCopy) {
            const auto write = [&](std::uint32_t slab) { fill(encoded, plain_slot(queue, {slab, 0, false}, encoded)); };
            return outcome(queue.send(member->peer, bytes, encoded.header.size(), version, deadline, sleeper, known(), write),
                           sleeper);
        }
        auto status = begin(*member, encoded, tree, rows, false, deadline, sleeper, slot);
        if (status != Status::ok) return outcome(status, sleeper);
        fill(encoded, slot);
        status = slot.ticket.batched
                     ? queue.commit_row(slot.ticket, version)
                     : queue.commit(member->peer, slot.ticket, encoded.header.size(), version, deadline, sleeper, known());
        return outcome(status, sleeper);
    }

    // (status, views, reservation)
    py::tuple reserve(py::handle spec, double timeout_s, std::int64_t version) {
        const auto member = this->member();
        Scratch scratch;
        auto& encoded = scratch.encoded();
        Slot slot;
        PythonSleeper sleeper;
        const auto rows = member->queue->batch_rows();
        encoded.encode(spec, rows > 1, true);
        const auto status = begin(*member, encoded, spec, rows, true, deadline_in(timeout_s), sleeper, slot);
        if (status != Status::ok) return py::make_tuple(outcome(status, sleeper), py::none(), py::none());
        fill(encoded, slot);
        auto capsule = capsule_of(
            std::make_unique<Reservation>(member, slot.ticket, encoded.header.size(), version), kReservation);
        const Rows row{slot.rows, slot.ticket.row, 1, false};
        auto views = decode(encoded.header.data(), encoded.header.size(), slot.data, row, capsule);
        return py::make_tuple(0, views, capsule);
    }

    // With `keep` it can be tried again after a timeout.
    int commit(const py::capsule& capsule, double timeout_s, bool keep) {
        auto& reservation = in<Reservation>(capsule, kReservation);
        auto& queue = *reservation.queue;
        const auto member = std::exchange(reservation.member, nullptr);
        if (!member) throw std::runtime_error("this reservation has been sent or dropped");
        PythonSleeper sleeper;
        const auto status = reservation.ticket.batched
                                ? queue.commit_row(reservation.ticket, reservation.version)
                                : queue.commit(member->peer, reservation.ticket, reservation.header_bytes,
                                               reservation.version, deadline_in(timeout_s), sleeper, known(), keep);
        if (status == Status::timeout && keep) reservation.member = member;
        return outcome(status, sleeper);
    }

    // A status, or (tree, rows, version or those of the rows, the rows that are there or None for all, lease).
    py::object receive(double timeout_s) {
        const auto member = this->member();
        auto& queue = *member->queue;
        Batch batch;
        PythonSleeper sleeper;
        const auto status = queue.receive(member->peer, deadline_in(timeout_s), sleeper, known(), batch);
        if (status != Status::ok) return py::int_(outcome(status, sleeper));
        sleeper.wake();
        const auto& slab = queue.slab(batch.slab);
        const std::int64_t version = slab.version;
        auto lease = take(member, batch);
        py::object versions = py::none(), there = py::none();
        Rows rows;
        if (batch.rows != 0) {
            rows = {batch.rows, 0, 0, true};
            py::list of_rows, indices;
            const auto* states = queue.rows(batch.slab);
            for (std::uint32_t r = 0; r < slab.given; ++r) {
                if (states[r].state.load(std::memory_order_relaxed) != static_cast<std::uint32_t>(RowState::done)) continue;
                of_rows.append(states[r].version);
                indices.append(r);
                rows.count = r + 1;
            }
            if (indices.size() != rows.count) there = indices;
            versions = of_rows;
        }
        if (batch.crowded) copy_out(*lease, slab.bytes);
        const auto& l = *lease;
        auto capsule = capsule_of(std::move(lease), kLease);
        auto tree = decode(l.header(), l.header_bytes, l.data(), rows, capsule);
        if (batch.rows == 0) return py::make_tuple(tree, 0, version, there, capsule);
        return py::make_tuple(tree, rows.count, versions, there, capsule);
    }

    // --- Whole messages as bytes, as brokers carry them from one machine to another: [header][data] as in a slab ------

    // A status, or (bytes, how many of them are the header, version, lease).
    py::object receive_bytes(double timeout_s) {
        const auto member = this->member();
        auto& queue = *member->queue;
        Batch batch;
        PythonSleeper sleeper;
        const auto status = queue.receive(member->peer, deadline_in(timeout_s), sleeper, known(), batch);
        if (status != Status::ok) return py::int_(outcome(status, sleeper));
        sleeper.wake();
        const auto& slab = queue.slab(batch.slab);
        const std::int64_t version = slab.version;
        const auto bytes = slab.bytes;
        auto lease = take(member, batch);
        if (batch.rows != 0) throw std::runtime_error("a batch cannot be carried: receivers here must not ask for batches");
        if (batch.crowded) copy_out(*lease, bytes);
        const auto& l = *lease;
        auto capsule = capsule_of(std::move(lease), kLease);
        return py::make_tuple(memory(l.base(), bytes, capsule), l.header_bytes, version, capsule);
    }

    // (status, bytes to fill, reservation to commit)
    py::tuple reserve_bytes(std::uint64_t size, std::uint64_t header_bytes, std::int64_t version, double timeout_s) {
        const auto member = this->member();
        auto& queue = *member->queue;
        check_size(queue, size);
        Ticket ticket;
        PythonSleeper sleeper;
        const auto status = queue.begin(member->peer, size, deadline_in(timeout_s), sleeper, known(), ticket);
        if (status != Status::ok) return py::make_tuple(outcome(status, sleeper), py::none(), py::none());
        sleeper.wake();
        auto capsule = capsule_of(std::make_unique<Reservation>(member, ticket, header_bytes, version), kReservation);
        return py::make_tuple(0, memory(queue.data(ticket.slab), size, capsule), capsule);
    }

    // Into a row of a batch where that is asked for and can be, else a slab of its own.
    int send_bytes(const py::buffer& message, std::uint64_t header_bytes, std::int64_t version, double timeout_s) {
        const auto member = this->member();
        auto& queue = *member->queue;
        const auto info = message.request();
        const auto size = static_cast<std::size_t>(info.size * info.itemsize);
        const auto* bytes = static_cast<const std::byte*>(info.ptr);
        if (round_up(header_bytes, kLine) > size) throw py::value_error("a message whose header is longer than itself");
        const auto deadline = deadline_in(timeout_s);
        PythonSleeper sleeper;
        Slot slot;
        Status status = Status::ok;
        const auto rows = queue.batch_rows();
        Scratch scratch;
        auto& encoded = scratch.encoded();
        if (rows > 1 && encoded.as_row_of(bytes, header_bytes, size) && fits(queue, encoded, rows)) {
            status = begin_row(*member, encoded, encoded.data_bytes(rows), deadline, sleeper, slot);
            if (status != Status::ok) return outcome(status, sleeper);
            fill(encoded, slot);
            status = queue.commit_row(slot.ticket, version);
        } else {
            check_size(queue, size);
            status = queue.begin(member->peer, size, deadline, sleeper, known(), slot.ticket);
            if (status != Status::ok) return outcome(status, sleeper);
            sleeper.wake();
            copy(queue.data(slot.ticket.slab), bytes, size);
            status = queue.commit(member->peer, slot.ticket, header_bytes, version, deadline, sleeper, known());
        }
        return outcome(status, sleeper);
    }

    // Leaves, and has the others told that this one, process `pid` of another machine, has died.
    void died(int pid, int status) {
        const auto member = std::exchange(member_, nullptr);
        if (member) member->queue->declare_dead(member->peer, pid, status);
    }

    std::vector<Death> deaths() { return told_.next(*member()->queue, role_); }

private:
    struct Slot {
        Ticket ticket;
        std::uint32_t rows = 0;
        std::byte* header = nullptr;  // nullptr: written already
        std::byte* data = nullptr;
    };

    MemberPtr member() const {
        if (!member_) throw std::runtime_error("closed");
        return member_;
    }
    std::size_t known() const { return heed_ ? told_.count : Queue::kHeedless; }

    static int outcome(Status status, PythonSleeper& sleeper) {
        sleeper.wake();
        if (status == Status::interrupted) throw py::error_already_set();
        return static_cast<int>(status);
    }

    // `encoded`: the tree, as a row if `rows` are put together.
    Status begin(Member& member, Encoded& encoded, py::handle tree, std::uint32_t rows, bool room_only, Nanoseconds deadline,
                 PythonSleeper& sleeper, Slot& slot) {
        auto& queue = *member.queue;
        if (rows > 1 && encoded.stackable) {
            const auto data_bytes = encoded.data_bytes(rows);
            check_size(queue, Queue::header_offset(rows) + round_up(encoded.header.size(), kLine) + data_bytes);
            const auto status = begin_row(member, encoded, data_bytes, deadline, sleeper, slot);
            if (status == Status::dropped && room_only) {
                // What is written in place needs a place all the same; whether it is dropped is decided at its end.
                queue.counters().dropped_newest.fetch_sub(1, std::memory_order_relaxed);
                return begin_plain(member, encoded, tree, room_only, deadline, sleeper, slot);
            }
            return status;
        }
        return begin_plain(member, encoded, tree, room_only, deadline, sleeper, slot);
    }

    Status begin_row(Member& member, const Encoded& encoded, std::size_t data_bytes, Nanoseconds deadline,
                     PythonSleeper& sleeper, Slot& slot) {
        auto& queue = *member.queue;
        const auto status = queue.begin_row(member.peer, encoded.header, data_bytes, deadline, sleeper, known(), slot.ticket);
        sleeper.wake();
        if (status != Status::ok) return status;
        slot.rows = queue.slab(slot.ticket.slab).rows;
        slot.data = queue.data(slot.ticket.slab) + Queue::header_offset(slot.rows) + round_up(encoded.header.size(), kLine);
        return status;
    }

    Status begin_plain(Member& member, Encoded& encoded, py::handle tree, bool room_only, Nanoseconds deadline,
                       PythonSleeper& sleeper, Slot& slot) {
        auto& queue = *member.queue;
        if (encoded.as_row()) encoded.encode(tree, false, room_only);
        const auto bytes = plain_bytes(encoded);
        check_size(queue, bytes);
        if (!room_only) {
            const auto status = queue.would_refuse();
            if (status != Status::ok) return status;
        }
        const auto status = queue.begin(member.peer, bytes, deadline, sleeper, known(), slot.ticket);
        sleeper.wake();
        if (status != Status::ok) return status;
        slot = plain_slot(queue, slot.ticket, encoded);
        return status;
    }

    static std::size_t plain_bytes(const Encoded& encoded) {
        return round_up(encoded.header.size(), kLine) + encoded.data_bytes(1);
    }
    static Slot plain_slot(const Queue& queue, const Ticket& ticket, const Encoded& encoded) {
        auto* header = queue.data(ticket.slab);
        return {ticket, 0, header, header + round_up(encoded.header.size(), kLine)};
    }

    static bool fits(const Queue& queue, const Encoded& encoded, std::uint32_t rows) {
        return Queue::header_offset(rows) + round_up(encoded.header.size(), kLine) + encoded.data_bytes(rows) <= queue.stride();
    }

    static void check_size(const Queue& queue, std::size_t bytes) {
        if (bytes <= queue.stride()) return;
        throw py::value_error("a message (with torchext's batches: all its rows) of " + std::to_string(bytes >> 20) +
                              " MiB is larger than the " + std::to_string(queue.stride() >> 20) +
                              " MiB that this channel has room for; with fewer slots there is room for larger ones");
    }

    static void fill(const Encoded& encoded, const Slot& slot) {
        std::size_t total = 0;
        for (const auto& leaf : encoded.leaves) total += leaf.bytes;
        PyThreadState* thread = total >= kLargeCopy ? PyEval_SaveThread() : nullptr;
        if (slot.header != nullptr) std::memcpy(slot.header, encoded.header.data(), encoded.header.size());
        std::byte* at = slot.data;
        const std::size_t rows = std::max<std::size_t>(slot.rows, 1);
        for (const auto& leaf : encoded.leaves) {
            if (leaf.data != nullptr) std::memcpy(at + leaf.bytes * slot.ticket.row, leaf.data, leaf.bytes);
            at += round_up(leaf.bytes * rows, kLine);
        }
        if (thread != nullptr) PyEval_RestoreThread(thread);
    }

    static std::unique_ptr<Lease> take(const MemberPtr& member, const Batch& batch) {
        return std::make_unique<Lease>(member, batch.slab, batch.rows, member->queue->slab(batch.slab).header_bytes,
                                       Queue::header_offset(batch.rows));
    }

    // Frees the slab by a copy of its bytes, as receivers hold too many.
    static void copy_out(Lease& lease, std::size_t bytes) {
        const auto& queue = *lease.member->queue;
        lease.copy.reset(static_cast<std::byte*>(
            std::aligned_alloc(kLine, round_up(std::max<std::size_t>(bytes, 1), kLine))));
        if (!lease.copy) throw std::bad_alloc();
        copy(lease.copy.get(), queue.data(lease.slab), bytes);
        lease.release();
        queue.counters().copied.fetch_add(1, std::memory_order_relaxed);
    }

    static py::array memory(std::byte* at, std::size_t bytes, const py::capsule& owner) {
        return py::array(py::dtype("u1"), {static_cast<py::ssize_t>(bytes)}, at, owner);
    }

    static void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
        PyThreadState* thread = bytes >= kLargeCopy ? PyEval_SaveThread() : nullptr;
        std::memcpy(to, from, bytes);
        if (thread != nullptr) PyEval_RestoreThread(thread);
    }

    MemberPtr member_;
    Role role_;
    bool heed_;
    Told told_;
};

}  // namespace torchext::channels

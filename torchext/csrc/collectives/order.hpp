// Puts collectives of any backend into one order, the same on all ranks, so that they can be launched without deadlock.
//
// Ready, then order. A rank that issues a collective tells the other members so (`join`). Once it knows that all have
// issued it, the collective is ready, and only then does the rank propose a place for it: its logical clock, raised by
// one. The place is the largest proposal of all members. A collective is launched once its place is known and no other
// that this rank takes part in has, or may still get, a place before it. Two collectives with two members in common get
// the same places there, hence the same order, whatever groups they belong to: no rank needs to know of more groups than
// its own, and nobody coordinates. (These are Skeen's timestamps. Had the rank proposed when it issued, a place could
// wait for a collective that another rank has yet to issue, and so for the user's program: a deadlock in most programs
// that are out of order.) From `ready` on nothing waits for user code, so places are always found.
//
// It takes two messages after one another. Calls are paired across ranks by what they are: the n-th call under a key with
// the n-th of each other member under that key, as in engine.hpp.
//
// Threads. All state is guarded by `mutex_`. Any thread may look for news; those that wait for a collective do, and while
// nobody waits and something is in flight, the thread in `background`. What is to be launched is taken out by `pop`, in
// order; the caller launches one before it takes the next.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena.hpp"
#include "futex.hpp"
#include "link.hpp"
#include "op.hpp"
#include "peers.hpp"
#include "signature.hpp"

namespace torchext::collectives {

enum class OrderRecord : std::uint8_t { pad = 0, join, propose, fail, leave };

struct OrderJoin {  // then follows the tag
    RecordHeader header;
    OpKind kind;
    ReduceOp reduce_op;
    std::uint8_t dtype;
    std::uint8_t num_dims;
    std::int32_t root;
    std::int32_t peer;
    std::uint32_t tag_bytes;
    std::uint64_t key;
    std::uint64_t id;         // how to address the sender's call from now on
    std::int64_t send_bytes;  // that the sender has for the receiver; -1 where the key covers it
    std::int64_t recv_bytes;  // that the sender wants of the receiver
    std::int64_t dims[kDims];
};

struct OrderPropose {
    RecordHeader header;
    std::uint64_t id;  // the receiver's call
    std::uint64_t clock;
    std::uint64_t unused;
};

struct OrderFail {  // then follows text
    RecordHeader header;
    std::uint64_t id;  // the sender's call
    std::uint32_t code;
    std::int32_t culprit;  // place in the group, or -1
    std::uint32_t text_bytes;
    std::uint32_t unused;
};

struct OrderLeave {
    RecordHeader header;
    std::uint32_t aborted;  // what it has launched is not going to end
    std::uint32_t unused;
};

class OrderGroup;

// One collective that this rank has issued.
struct Ordered {
    enum class State { issued, proposed, placed, popped };
    struct Member {
        int place = 0;  // in the group
        std::uint64_t id = 0;
        std::int64_t send_bytes = -1;  // that this rank has for it
        std::int64_t recv_bytes = -1;
        bool joined = false;
        bool proposed = false;
    };

    std::uint64_t id = 0;
    std::uint64_t key = 0;
    Signature signature;
    std::shared_ptr<OrderGroup> group;
    std::vector<Member> members;
    std::size_t me = 0;
    std::size_t num_joined = 1;
    std::size_t num_proposed = 0;
    std::uint64_t clock = 0;  // own proposal, or later the largest
    State state = State::issued;
    Code code = Code::none;
    std::string error;
    std::vector<int> culprits;  // places in the group
    Nanoseconds issued = 0;
    Nanoseconds deadline = 0;
    Nanoseconds finished_at = 0;  // launched or failed
    void* work = nullptr;         // the caller's; given back by `pop`

    bool done() const { return finished_at != 0; }
};
using OrderedPtr = std::shared_ptr<Ordered>;

class OrderGroup {
public:
    // A call that a peer has issued and this rank has not.
    struct Arrived {
        Signature signature;
        std::uint64_t id = 0;
        std::int64_t send_bytes = -1;
        std::int64_t recv_bytes = -1;
        Code code = Code::none;  // the peer has given up on it
        std::string error;
        int culprit = -1;
    };
    struct Queue {
        std::deque<OrderedPtr> posted;  // own calls that not every member has joined
        std::map<int, std::deque<Arrived>> arrived;
    };

    std::uint64_t id = 0;
    std::vector<int> ranks;  // as the user counts them
    int me = 0;
    std::vector<std::unique_ptr<Link>> links;  // by place; none to itself
    std::vector<Code> lost;
    std::vector<char> aborted;  // has left in the middle of what it had launched, or died
    std::shared_ptr<Arena> arena;
    Peers liveness;
    bool closed = false;
    std::unordered_map<std::uint64_t, Queue> queues;
};
using OrderGroupPtr = std::shared_ptr<OrderGroup>;

class Orderer {
public:
    struct Issue {
        Signature signature;
        std::uint64_t dims_hash = 0;
        std::vector<int> members;  // places in the group; the first one's numbers break ties
        std::vector<std::int64_t> send_bytes;  // for each member, or empty
        std::vector<std::int64_t> recv_bytes;
        Nanoseconds timeout = 0;
        bool will_wait = false;
        void* work = nullptr;
    };

    Orderer() {
        if (pipe2(doorbell_, O_CLOEXEC | O_NONBLOCK) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
        cpu_set_t set;
        usable_cores_ = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
    }
    Orderer(const Orderer&) = delete;
    Orderer& operator=(const Orderer&) = delete;
    ~Orderer() {
        ::close(doorbell_[0]);
        ::close(doorbell_[1]);
    }

    int doorbell() const { return doorbell_[1]; }

    // Takes a group whose links are set up.
    void add(const OrderGroupPtr& group) {
        std::lock_guard lock(mutex_);
        groups_.push_back(group);
        group->id = ++last_group_;
        if (group->arena != nullptr) {
            auto& cell = group->arena->cell(group->me);
            cell.sleeping.store(num_sleeping_ != 0, std::memory_order_relaxed);
            // Where each rank can have a core, an answer is likely to be on its way; else it needs this one.
            spin_limit_ = std::min(spin_limit_, group->arena->world_size() <= usable_cores_ ? 500 : 20);
        } else {
            spin_limit_ = std::min(spin_limit_, 50);  // a look at a socket is a system call
        }
    }

    // Issues a collective; never waits for a peer.
    OrderedPtr issue(const OrderGroupPtr& group, const Issue& request) {
        std::unique_lock lock(mutex_);
        auto op = std::make_shared<Ordered>();
        op->id = ++last_id_;
        op->signature = request.signature;
        op->key = request.signature.key(request.dims_hash);
        op->group = group;
        op->issued = now();
        op->deadline = op->issued + request.timeout;
        op->work = request.work;
        for (std::size_t i = 0; i < request.members.size(); ++i) {
            Ordered::Member member;
            member.place = request.members[i];
            if (!request.send_bytes.empty()) member.send_bytes = request.send_bytes[i];
            if (!request.recv_bytes.empty()) member.recv_bytes = request.recv_bytes[i];
            if (member.place == group->me) {
                op->me = i;
                member.joined = true;
                member.id = op->id;
            }
            op->members.push_back(member);
        }
        ++num_active_;
        active_.emplace(op->id, op);
        if (group->closed) {
            fail(op, Code::aborted, "the process group was destroyed or aborted", {}, false);
            return op;
        }
        for (const auto& member : op->members) {
            if (member.place != group->me) send_join(*op, member);
        }
        wake_peers();  // before anything else: it is what they wait for
        match(op);
        if (!op->done()) {
            for (const auto& member : op->members) {
                if (member.place != group->me && group->lost[at(member.place)] != Code::none) {
                    fail_if_needed(op, member, group->lost[at(member.place)]);
                }
            }
        }
        settle(op);
        place();
        wake_peers();
        if (!request.will_wait && num_waiting_ == 0 && busy()) background_.notify_one();
        return op;
    }

    // Waits until something is to be launched, the collective is no longer waited for here, or the deadline, and returns
    // whether it is one of the former two. `interrupted` is called now and then without the lock.
    bool wait(const OrderedPtr& op, Nanoseconds deadline, const std::function<bool()>& interrupted) {
        std::unique_lock lock(mutex_);
        ++num_waiting_;
        const auto parked = [&] { return parked_ && std::this_thread::get_id() != exiting_; };
        const auto stop = [&] { return parked() || !ready_.empty() || op->state == Ordered::State::popped; };
        bool stopped = stop();
        while (!stopped) {
            drive(lock, spin_limit_, stop);
            stopped = stop();
            if (stopped) break;
            lock.unlock();
            const bool interrupt = interrupted();
            lock.lock();
            if (interrupt || now() > deadline) break;
        }
        --num_waiting_;
        if (num_waiting_ == 0 && busy()) background_.notify_one();
        if (parked()) {
            lock.unlock();
            while (true) ::pause();
        }
        return stopped;
    }

    // For a thread that serves those that do not wait, and watches the peers of what runs on the inner groups: returns
    // when there is something to launch, or members have fallen, or false after `stop_background`.
    bool background() {
        std::unique_lock lock(mutex_);
        const auto news = [&] { return stopping_ || !fallen_.empty() || (num_waiting_ == 0 && !ready_.empty()); };
        while (!news()) {
            background_.wait_for(lock, std::chrono::nanoseconds(kCheckInterval),
                                 [&] { return news() || (num_waiting_ == 0 && busy()); });
            if (news() || num_waiting_ != 0) continue;
            if (busy()) {
                drive(lock, 0, [&] { return news() || num_waiting_ != 0; });  // the cores are for who computes
            } else {
                pass();
                if (now() - checked_ >= kCheckInterval) check();
            }
        }
        return !stopping_;
    }

    void stop_background() {
        std::lock_guard lock(mutex_);
        stopping_ = true;
        background_.notify_all();
        ring_self();
    }

    // The next collective to launch, or one that has failed; nullptr if there is none now.
    OrderedPtr pop() {
        std::lock_guard lock(mutex_);
        if (ready_.empty()) return nullptr;
        auto op = std::move(ready_.front());
        ready_.pop_front();
        op->state = Ordered::State::popped;
        return op;
    }

    // Groups of which a member has died, or aborted, since the last call, with the members' places.
    std::vector<std::pair<OrderGroupPtr, int>> fallen() {
        std::lock_guard lock(mutex_);
        return std::exchange(fallen_, {});
    }

    // Fails a collective that has not been placed yet; else does nothing.
    void cancel(const OrderedPtr& op, const std::string& text) {
        std::lock_guard lock(mutex_);
        if (!op->done()) fail(op, Code::timeout, text + "; " + absence(*op), missing(*op), true);
        place();
        wake_peers();
    }

    // Leaves the group: fails what is in flight and tells the others.
    void leave(const OrderGroupPtr& group, const std::string& text, bool aborted) {
        std::lock_guard lock(mutex_);
        if (group->closed) return;
        group->closed = true;
        for (const auto& op : in_flight(group.get())) fail(op, Code::aborted, text, {}, true);
        OrderLeave record{};
        record.header = {sizeof(record), static_cast<std::uint8_t>(OrderRecord::leave), {}};
        record.aborted = aborted;
        for (std::size_t p = 0; p < group->links.size(); ++p) {
            if (group->links[p] != nullptr) send(*group, static_cast<int>(p), &record);
        }
        const Nanoseconds end = now() + kSecond;  // for what finds no room at once; tiny records only
        while (flush(*group) && now() < end) {
            wake_peers();
            sched_yield();
        }
        if (group->arena != nullptr) {
            // release: all that this rank had to say lies in its rings before others see that it has left
            group->arena->cell(group->me).presence.store(
                static_cast<std::uint32_t>(aborted ? kAborted : static_cast<std::uint32_t>(Presence::left)),
                std::memory_order_release);
        }
        wake_peers();
        group->links.clear();
        group->arena.reset();
        groups_.erase(std::find(groups_.begin(), groups_.end(), group));
        place();
        ring_self();
    }

    // At the end of the process: threads other than the caller's never return from `wait` again. They would want the
    // interpreter's lock, and it ends threads that ask for it while it ends, inside frames that must not be unwound.
    void park() {
        std::unique_lock lock(mutex_);
        parked_ = true;
        exiting_ = std::this_thread::get_id();
        const Nanoseconds end = now() + kSecond;
        while (num_waiting_ != 0 && now() < end) {  // some may just look at signals, which takes that lock
            ring_self();
            lock.unlock();
            const timespec pause{0, 200'000};
            nanosleep(&pause, nullptr);
            lock.lock();
        }
    }

    // In a forked child: lets go of the sockets, whose end must be seen when the parent ends. The orderer is not used.
    void forget() {
        for (const auto& group : groups_) {
            for (const auto& link : group->links) {
                if (link != nullptr) link->forget();
            }
        }
    }

    std::pair<std::uint64_t, std::size_t> counts() {
        std::lock_guard lock(mutex_);
        return {last_id_, num_active_};
    }

private:
    static constexpr std::uint32_t kAborted = 3;  // a Presence of these arenas
    static constexpr Nanoseconds kCheckInterval = 50 * kMillisecond;
    static constexpr std::size_t kMaxTag = 200;

    static std::size_t at(int i) { return static_cast<std::size_t>(i); }

    using Place = std::tuple<std::uint64_t, int, std::uint64_t>;

    // Of equal clocks the lower number of the first member's call comes first: no two calls have the same, and every
    // member knows it.
    static Place place_of(const Ordered& op) {
        return {op.clock, op.group->ranks[at(op.members.front().place)], op.members.front().id};
    }

    // ---- Match -----------------------------------------------------------------------------------------------------

    void send_join(const Ordered& op, const Ordered::Member& member) {
        alignas(16) std::byte room[sizeof(OrderJoin) + kMaxTag + 16]{};
        const std::size_t tag = std::min(op.signature.tag.size(), kMaxTag);
        auto* join = new (room) OrderJoin{};
        join->header = {static_cast<std::uint32_t>(round_up(sizeof(OrderJoin) + tag, 16)),
                        static_cast<std::uint8_t>(OrderRecord::join),
                        {}};
        join->kind = op.signature.kind;
        join->reduce_op = op.signature.reduce_op;
        join->dtype = op.signature.dtype;
        join->num_dims = op.signature.num_dims;
        join->root = op.signature.root;
        join->peer = op.signature.peer;
        join->tag_bytes = static_cast<std::uint32_t>(tag);
        join->key = op.key;
        join->id = op.id;
        join->send_bytes = member.send_bytes;
        join->recv_bytes = member.recv_bytes;
        std::memcpy(join->dims, op.signature.dims.data(), sizeof(join->dims));
        std::memcpy(room + sizeof(OrderJoin), op.signature.tag.data(), tag);
        send(*op.group, member.place, room);
    }

    void send(OrderGroup& group, int p, const void* record) {
        group.links[at(p)]->send(static_cast<const std::byte*>(record));
        sent_ = true;
    }

    void match(const OrderedPtr& op) {
        if (op->members.size() == 1) return;
        auto& queue = op->group->queues[op->key];
        queue.posted.push_back(op);
        for (auto& member : op->members) {
            const auto found = queue.arrived.find(member.place);
            if (found == queue.arrived.end()) continue;
            const auto call = std::move(found->second.front());
            found->second.pop_front();
            if (found->second.empty()) queue.arrived.erase(found);
            join(op, member, call);
        }
        tidy(op->group.get(), op->key, op);
    }

    void on_join(OrderGroup& group, int p, const OrderJoin& record) {
        OrderGroup::Arrived call;
        auto& s = call.signature;
        s.kind = record.kind;
        s.reduce_op = record.reduce_op;
        s.dtype = record.dtype;
        s.num_dims = record.num_dims;
        s.root = record.root;
        s.peer = record.peer;
        std::memcpy(s.dims.data(), record.dims, sizeof(record.dims));
        s.tag.assign(reinterpret_cast<const char*>(&record) + sizeof(OrderJoin), record.tag_bytes);
        call.id = record.id;
        call.send_bytes = record.send_bytes;
        call.recv_bytes = record.recv_bytes;
        auto& queue = group.queues[record.key];
        if (queue.arrived.find(p) == queue.arrived.end()) {
            for (const auto& posted : queue.posted) {
                const auto member = std::find_if(posted->members.begin(), posted->members.end(),
                                                 [&](const auto& m) { return m.place == p; });
                if (member == posted->members.end() || member->joined) continue;
                const OrderedPtr op = posted;
                join(op, *member, call);
                settle(op);
                tidy(&group, record.key, op);
                return;
            }
        }
        queue.arrived[p].push_back(std::move(call));
    }

    // A member has joined this rank's call.
    void join(const OrderedPtr& op, Ordered::Member& member, const OrderGroup::Arrived& call) {
        member.joined = true;
        member.id = call.id;
        ++op->num_joined;
        if (op->done()) return;  // failed, of which the peer has been told
        if (call.code != Code::none) {
            std::vector<int> culprits;
            if (call.culprit >= 0) culprits.push_back(call.culprit);
            fail(op, call.code, call.error, culprits, true);
        } else if (!op->signature.same_call(call.signature)) {
            fail(op, Code::mismatch,
                 "rank " + std::to_string(rank_of(*op, member)) + " called " + call.signature.describe() +
                     ", which does not go together with it",
                 {member.place}, true);
        } else if ((member.send_bytes >= 0 && call.recv_bytes >= 0 && member.send_bytes != call.recv_bytes) ||
                   (member.recv_bytes >= 0 && call.send_bytes >= 0 && member.recv_bytes != call.send_bytes)) {
            fail(op, Code::mismatch,
                 "rank " + std::to_string(rank_of(*op, member)) + " called " + call.signature.describe() +
                     ", which sends this rank " + std::to_string(call.send_bytes) + " bytes where it expects " +
                     std::to_string(member.recv_bytes) + ", and expects " + std::to_string(call.recv_bytes) +
                     " where it sends " + std::to_string(member.send_bytes),
                 {member.place}, true);
        }
    }

    // Once all have joined, later calls under the key are others.
    void tidy(OrderGroup* group, std::uint64_t key, const OrderedPtr& op) {
        if (op->num_joined < op->members.size()) return;
        const auto found = group->queues.find(key);
        if (found == group->queues.end()) return;
        auto& posted = found->second.posted;
        const auto it = std::find(posted.begin(), posted.end(), op);
        if (it != posted.end()) posted.erase(it);
        if (posted.empty() && found->second.arrived.empty()) group->queues.erase(found);
    }

    static int rank_of(const Ordered& op, const Ordered::Member& member) { return op.group->ranks[at(member.place)]; }

    // ---- Order -----------------------------------------------------------------------------------------------------

    // Proposes a place once all have joined; settles it once all have proposed.
    void settle(const OrderedPtr& op) {
        if (op->done() || op->num_joined < op->members.size()) return;
        if (op->state == Ordered::State::issued) {
            op->state = Ordered::State::proposed;
            ++clock_;
            op->clock = std::max(op->clock, clock_);
            OrderPropose record{};
            record.header = {sizeof(record), static_cast<std::uint8_t>(OrderRecord::propose), {}};
            record.clock = clock_;
            for (const auto& member : op->members) {
                if (member.place == op->group->me) continue;
                record.id = member.id;
                send(*op->group, member.place, &record);
            }
            ++op->num_proposed;
            // Under its own proposal, which is no later than its place will be; `waiting_` is ordered by that.
            waiting_.emplace(Place{clock_, rank_of(*op, op->members.front()), op->members.front().id}, op);
            places_[op->id] = Place{clock_, rank_of(*op, op->members.front()), op->members.front().id};
        }
        if (op->state == Ordered::State::proposed && op->num_proposed == op->members.size()) {
            op->state = Ordered::State::placed;
            waiting_.erase(places_[op->id]);
            places_[op->id] = place_of(*op);
            waiting_.emplace(place_of(*op), op);
        }
    }

    void on_propose(OrderGroup& group, int p, const OrderPropose& record) {
        clock_ = std::max(clock_, record.clock);
        const auto found = active_.find(record.id);
        if (found == active_.end()) return;  // failed here, of which the peer has been told
        const OrderedPtr op = found->second;
        for (auto& member : op->members) {
            if (member.place != p || member.proposed || op->group.get() != &group) continue;
            member.proposed = true;
            ++op->num_proposed;
            op->clock = std::max(op->clock, record.clock);
            settle(op);
        }
    }

    // Takes from the front what has its place.
    void place() {
        while (!waiting_.empty() && waiting_.begin()->second->state == Ordered::State::placed) {
            const OrderedPtr op = waiting_.begin()->second;
            waiting_.erase(waiting_.begin());
            places_.erase(op->id);
            finish(op);
        }
    }

    void finish(const OrderedPtr& op) {
        op->finished_at = now();
        --num_active_;
        active_.erase(op->id);
        ready_.push_back(op);
        if (num_sleeping_ != 0) ring_self();
    }

    // ---- News ------------------------------------------------------------------------------------------------------

    bool busy() const { return num_active_ != 0 || kept_; }

    // Reads and sends all that can be now; true if something came.
    bool pass() {
        bool any = false;
        kept_ = false;
        for (std::size_t g = 0; g < groups_.size(); ++g) {
            OrderGroup& group = *groups_[g];
            for (std::size_t p = 0; p < group.links.size(); ++p) {
                if (group.links[p] != nullptr) any |= drain(group, static_cast<int>(p));
            }
            kept_ |= flush(group);
        }
        place();
        wake_peers();
        return any;
    }

    bool drain(OrderGroup& group, int p) {
        Link& link = *group.links[at(p)];
        bool any = false;
        while (const RecordHeader* record = link.front()) {
            any = true;
            switch (static_cast<OrderRecord>(record->kind)) {
                case OrderRecord::join:
                    on_join(group, p, *reinterpret_cast<const OrderJoin*>(record));
                    break;
                case OrderRecord::propose:
                    on_propose(group, p, *reinterpret_cast<const OrderPropose*>(record));
                    break;
                case OrderRecord::fail:
                    on_fail(group, p, *reinterpret_cast<const OrderFail*>(record));
                    break;
                case OrderRecord::leave:
                    lose(group, p, Code::peer_left, reinterpret_cast<const OrderLeave*>(record)->aborted != 0);
                    break;
                case OrderRecord::pad:
                    break;
            }
            link.pop();
        }
        if (link.broken() && group.lost[at(p)] == Code::none) lose(group, p, Code::peer_died, true);
        return any;
    }

    bool flush(OrderGroup& group) {
        bool left = false;
        for (std::size_t p = 0; p < group.links.size(); ++p) {
            if (group.links[p] != nullptr && group.links[p]->flush()) left |= group.lost[p] == Code::none;
        }
        sent_ |= left;
        return left;
    }

    void wake_peers() {
        if (!sent_) return;
        sent_ = false;
        // Either this side sees `sleeping`, or the sleeper, who sets it before it looks, sees the news (Dekker).
        std::atomic_thread_fence(std::memory_order_seq_cst);
        for (const auto& group : groups_) {
            for (const auto& link : group->links) {
                if (link != nullptr) link->wake();
            }
        }
    }

    void ring_self() {
        const char byte = 0;
        [[maybe_unused]] const auto written = ::write(doorbell_[1], &byte, 1);  // a full pipe wakes as well
    }

    // Looks for news until `stop` holds or it is time to look after other things.
    template <class Stop>
    void drive(std::unique_lock<std::mutex>& lock, int spins, const Stop& stop) {
        const Nanoseconds start = now();
        int idle = 0;
        while (!stop()) {
            const bool any = pass();
            if (stop()) break;
            if (any) {
                idle = 0;
            } else if (++idle <= spins) {
                lock.unlock();  // for those who issue
                cpu_relax();
                lock.lock();
                continue;
            } else {
                sleep(lock);
                idle = 0;
            }
            if (now() - checked_ >= kCheckInterval) check();
            if (now() - start >= kCheckInterval) return;
        }
    }

    void sleep(std::unique_lock<std::mutex>& lock) {
        if (num_sleeping_++ == 0) set_sleeping(1);
        std::atomic_thread_fence(std::memory_order_seq_cst);  // see wake_peers
        if (!pass()) {
            std::vector<pollfd> polls{{doorbell_[0], POLLIN, 0}};
            for (const auto& group : groups_) {
                for (std::size_t p = 0; p < group->links.size(); ++p) {
                    const auto& link = group->links[p];
                    if (link != nullptr && link->descriptor() >= 0 && !link->broken()) {
                        polls.push_back({link->descriptor(), static_cast<short>(kept_ ? POLLIN | POLLOUT : POLLIN), 0});
                    }
                }
            }
            lock.unlock();
            ::poll(polls.data(), polls.size(), static_cast<int>(kCheckInterval / kMillisecond));
            lock.lock();
        }
        if (--num_sleeping_ == 0) {
            set_sleeping(0);
            char bytes[256];
            while (::read(doorbell_[0], bytes, sizeof(bytes)) == static_cast<ssize_t>(sizeof(bytes))) {
            }
        }
    }

    void set_sleeping(std::uint32_t value) {
        for (const auto& group : groups_) {
            if (group->arena != nullptr) group->arena->cell(group->me).sleeping.store(value, std::memory_order_seq_cst);
        }
    }

    // ---- Faults ----------------------------------------------------------------------------------------------------

    void check() {
        const Nanoseconds t = checked_ = now();
        for (std::size_t g = 0; g < groups_.size(); ++g) {
            OrderGroup& group = *groups_[g];
            if (group.arena == nullptr) continue;
            for (std::size_t p = 0; p < group.links.size(); ++p) {
                // acquire: what it said before it left is in its ring
                const auto presence = group.arena->cell(static_cast<int>(p)).presence.load(std::memory_order_acquire);
                if (static_cast<int>(p) == group.me || presence <= 1 || group.lost[p] != Code::none) continue;
                drain(group, static_cast<int>(p));
                lose(group, static_cast<int>(p), Code::peer_left, presence == kAborted);
            }
            for (const int p : group.liveness.newly_dead()) {
                drain(group, p);
                lose(group, p, Code::peer_died, true);
            }
        }
        for (const auto& op : in_flight(nullptr)) {
            if (t > op->deadline) fail(op, Code::timeout, absence(*op), missing(*op), true);
        }
        place();
        wake_peers();
    }

    void lose(OrderGroup& group, int p, Code code, bool aborted) {
        if (group.lost[at(p)] != Code::none) return;
        group.lost[at(p)] = code;
        for (const auto& op : in_flight(&group)) {
            for (const auto& member : op->members) {
                if (member.place == p) fail_if_needed(op, member, code);
            }
        }
        if (aborted) {
            for (const auto& known : groups_) {
                if (known.get() == &group) fallen_.emplace_back(known, p);
            }
            background_.notify_one();
            if (num_sleeping_ != 0) ring_self();
        }
    }

    void fail_if_needed(const OrderedPtr& op, const Ordered::Member& member, Code code) {
        if (op->done() || (member.joined && member.proposed)) return;
        const int rank = rank_of(*op, member);
        fail(op, code,
             "rank " + std::to_string(rank) +
                 (code == Code::peer_died ? " died" : " has left (it destroyed or aborted its process group)") +
                 (member.joined ? " in the middle of it" : " without joining it" + instead(*op, member.place)),
             {member.place}, true);
    }

    // `tell`: the members that have joined, or will, get to know.
    void fail(const OrderedPtr& op, Code code, const std::string& text, std::vector<int> culprits, bool tell) {
        if (op->done()) return;
        op->code = code;
        op->error = text;
        op->culprits = std::move(culprits);
        if (tell) {
            for (const auto& member : op->members) {
                if (member.place != op->group->me) send_fail(*op, member);
            }
        }
        if (const auto found = places_.find(op->id); found != places_.end()) {
            waiting_.erase(found->second);
            places_.erase(found);
        }
        finish(op);
    }

    void send_fail(const Ordered& op, const Ordered::Member& member) {
        auto& group = *op.group;
        if (group.lost[at(member.place)] != Code::none) return;
        // A timeout or an abort here is, over there, a peer that failed; a death or a mismatch is what it is.
        const bool own = op.code == Code::timeout || op.code == Code::aborted || op.code == Code::peer_failed;
        std::string text = own && op.code != Code::peer_failed
                               ? "rank " + std::to_string(group.ranks[at(group.me)]) + " gave up on it: " + op.error
                               : op.error;
        if (text.size() > 1000) text.resize(1000);
        std::vector<std::byte> bytes(round_up(sizeof(OrderFail) + text.size(), 16));
        auto* record = new (bytes.data()) OrderFail{};
        record->header = {static_cast<std::uint32_t>(bytes.size()), static_cast<std::uint8_t>(OrderRecord::fail), {}};
        record->id = op.id;
        record->code = static_cast<std::uint32_t>(own ? Code::peer_failed : op.code);
        record->culprit = own || op.culprits.empty() ? group.me : op.culprits.front();
        record->text_bytes = static_cast<std::uint32_t>(text.size());
        std::memcpy(bytes.data() + sizeof(OrderFail), text.data(), text.size());
        send(group, member.place, bytes.data());
    }

    void on_fail(OrderGroup& group, int p, const OrderFail& record) {
        const auto code = static_cast<Code>(record.code);
        const std::string text(reinterpret_cast<const char*>(&record + 1), record.text_bytes);
        for (const auto& op : in_flight(&group)) {
            for (const auto& member : op->members) {
                if (member.place == p && member.joined && member.id == record.id) {
                    fail(op, code, text, {record.culprit}, false);
                    return;
                }
            }
        }
        for (auto& [key, queue] : group.queues) {
            const auto found = queue.arrived.find(p);
            if (found == queue.arrived.end()) continue;
            for (auto& call : found->second) {
                if (call.id != record.id) continue;
                call.code = code;
                call.error = text;
                call.culprit = record.culprit;
                return;
            }
        }
    }

    std::vector<OrderedPtr> in_flight(const OrderGroup* group) const {
        std::vector<OrderedPtr> ops;
        for (const auto& [id, op] : active_) {
            if (group == nullptr || op->group.get() == group) ops.push_back(op);
        }
        return ops;
    }

    static std::vector<int> missing(const Ordered& op) {
        std::vector<int> places;
        for (const auto& member : op.members) {
            if (!member.joined) places.push_back(member.place);
        }
        return places;
    }

    static std::string absence(const Ordered& op) {
        std::string text;
        for (const auto& member : op.members) {
            if (member.joined) continue;
            text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank_of(op, member)) +
                    " has not joined it" + instead(op, member.place);
        }
        return text.empty() ? "all members have joined it, but some do not go on (stopped?)" : text;
    }

    // What a member has called on the group that this rank has not.
    static std::string instead(const Ordered& op, int p) {
        std::string text;
        int count = 0;
        for (const auto& [key, queue] : op.group->queues) {
            const auto found = queue.arrived.find(p);
            if (found == queue.arrived.end()) continue;
            for (const auto& call : found->second) {
                if (++count > 3) continue;
                text += (text.empty() ? "" : ", ") + call.signature.describe();
            }
        }
        if (count > 3) text += " and " + std::to_string(count - 3) + " more";
        return text.empty() ? " and has called nothing else on this group that this rank has not"
                            : ", it has called instead " + text;
    }

    int doorbell_[2] = {-1, -1};
    int usable_cores_ = 1;

    std::mutex mutex_;  // guards everything below
    std::condition_variable background_;
    int num_waiting_ = 0;
    int num_sleeping_ = 0;
    int spin_limit_ = 500;
    bool stopping_ = false;
    bool parked_ = false;
    std::thread::id exiting_;  // who has parked the others
    bool kept_ = false;  // some link could not send all
    bool sent_ = false;  // peers may have to be woken
    Nanoseconds checked_ = 0;

    std::vector<OrderGroupPtr> groups_;
    std::uint64_t last_group_ = 0;
    std::uint64_t last_id_ = 0;
    std::uint64_t clock_ = 0;
    std::size_t num_active_ = 0;
    std::map<std::uint64_t, OrderedPtr> active_;   // issued and not launched, by id
    std::map<Place, OrderedPtr> waiting_;          // proposed or placed, not launched
    std::unordered_map<std::uint64_t, Place> places_;  // of those, by id
    std::deque<OrderedPtr> ready_;                 // to be launched, or failed
    std::vector<std::pair<OrderGroupPtr, int>> fallen_;
};

}  // namespace torchext::collectives

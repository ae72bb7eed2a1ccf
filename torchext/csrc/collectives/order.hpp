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

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "caller.hpp"
#include "order_state.hpp"

namespace torchext::collectives {

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

    Orderer();
    Orderer(const Orderer&) = delete;
    Orderer& operator=(const Orderer&) = delete;
    ~Orderer();

    int doorbell() const { return doorbell_[1]; }

    // Takes a group whose links are set up.
    void add(const OrderGroupPtr& group);

    // Issues a collective; never waits for a peer.
    OrderedPtr issue(const OrderGroupPtr& group, const Issue& request);

    // The same for a receive from whichever of several members sends first; `request.members` are those.
    OrderedPtr issue_any(const OrderGroupPtr& group, const Issue& request);

    // Waits until something is to be launched, the collective is no longer waited for here, or the deadline, and returns
    // whether it is one of the former two.
    bool wait(const OrderedPtr& op, Nanoseconds deadline, const Caller& caller);

    // Something may be chained to the end of the collective that issues others.
    void watch(const OrderedPtr& op);

    // For a thread that serves those that do not wait, and watches the peers of what runs on the inner groups: returns
    // when there is something to launch, or members have fallen, or false after `stop_background`.
    bool background();

    void stop_background();

    // The next collective to launch, or one that has failed; nullptr if there is none now.
    OrderedPtr pop();

    // Groups of which a member has died, or aborted, since the last call, with the members' places.
    std::vector<std::pair<OrderGroupPtr, int>> fallen();

    // Fails a collective that is not to be launched yet, as a timeout; else does nothing.
    void cancel(const OrderedPtr& op, const std::string& text);

    // Leaves the group: fails what is in flight and tells the others.
    void leave(const OrderGroupPtr& group, const std::string& text, bool aborted);

    // At the end of the process: threads other than the caller's never return from `wait` again. They would want the
    // interpreter's lock, and it ends threads that ask for it while it ends, inside frames that must not be unwound.
    void park();

    // In a forked child: lets go of the sockets, whose end must be seen when the parent ends. The orderer is not used.
    void forget();

    // Calls issued, those that are not launched yet, and deadlocks that this rank was found in.
    std::tuple<std::uint64_t, std::size_t, std::uint64_t> counts();

    // Of each rank that this one shares a group with, and this one: whether it is gone, and what it waits for.
    std::map<int, std::pair<bool, Report>> reports();

    // Calls of this rank that are in flight.
    std::vector<Blocked> pending();

private:
    static constexpr std::uint32_t kAborted = 3;  // a Presence of these arenas
    static constexpr Nanoseconds kCheckInterval = 50 * kMillisecond;
    static constexpr Nanoseconds kBlockedAfter = 100 * kMillisecond;  // then a thread's wait is told to others
    static constexpr std::size_t kMaxClaims = 16;
    static constexpr std::size_t kMaxTag = 200;
    static constexpr std::size_t kMaxText = 3500;  // of a record; the smallest ring has to hold it twice, with
    static constexpr std::size_t kMaxRanks = 200;  // of a failure or a deadlock

    // A thread that waits for a call; on its stack.
    struct Waiter {
        OrderedPtr op;
        std::uint64_t thread;
        std::string where = {};
    };

    static std::size_t at(int i) { return static_cast<std::size_t>(i); }

    using Place = std::tuple<std::uint64_t, int, std::uint64_t>;

    // Of equal clocks the lower number of the first member's call comes first: no two calls have the same, and every
    // member knows it.
    static Place place_of(const Ordered& op);

    // ---- Match -----------------------------------------------------------------------------------------------------

    OrderedPtr make(const OrderGroupPtr& group, const Issue& request);

    void set_off(const OrderedPtr& op, bool will_wait);

    // The sender of a receive from any rank is known.
    void choose(const OrderedPtr& op, int place, std::uint64_t key);

    void send_join(const Ordered& op, const Ordered::Member& member);

    void send(OrderGroup& group, int p, const void* record);

    template <class Record>
    void send_record(OrderGroup& group, int p, OrderRecord kind, Record record, const std::string& rest = {}) {
        const std::size_t bytes = round_up(sizeof(Record) + rest.size(), 16);
        if (bytes > group.links[at(p)]->limit()) return;  // a report of hundreds of threads or groups: not known there
        std::vector<std::byte> room(bytes);
        record.header = {static_cast<std::uint32_t>(bytes), static_cast<std::uint8_t>(kind), {}};
        std::memcpy(room.data(), &record, sizeof(Record));
        std::memcpy(room.data() + sizeof(Record), rest.data(), rest.size());
        send(group, p, room.data());
    }

    void match(const OrderedPtr& op);

    void on_join(OrderGroup& group, int p, const OrderJoin& record);

    // A member has joined this rank's call.
    void join(const OrderedPtr& op, Ordered::Member& member, const OrderGroup::Arrived& call);

    // Once all have joined, later calls under the key are others.
    void tidy(OrderGroup* group, std::uint64_t key, const OrderedPtr& op);

    static int rank_of(const Ordered& op, const Ordered::Member& member) { return op.group->ranks[at(member.place)]; }

    // ---- Order -----------------------------------------------------------------------------------------------------

    // Proposes a place once all have joined; settles it once all have proposed.
    void settle(const OrderedPtr& op);

    void on_propose(OrderGroup& group, int p, const OrderPropose& record);

    // Takes from the front what has its place.
    void place();

    void finish(const OrderedPtr& op);

    // ---- News ------------------------------------------------------------------------------------------------------

    bool busy() const { return num_active_ != 0 || kept_; }

    // Reads and sends all that can be now; true if something came.
    bool pass();

    bool drain(OrderGroup& group, int p);

    bool flush(OrderGroup& group);

    void wake_peers();

    void ring_self();

    // Looks for news until `stop` holds or it is time to look after other things.
    template <class Stop>
    void drive(std::unique_lock<std::mutex>& lock, int spins, const Stop& stop);

    void sleep(std::unique_lock<std::mutex>& lock);

    void set_sleeping(std::uint32_t value);

    // ---- Faults ----------------------------------------------------------------------------------------------------

    void check();

    void lose(OrderGroup& group, int p, Code code, bool aborted);

    void fail_if_needed(const OrderedPtr& op, const Ordered::Member& member, Code code);

    // `tell`: the members that have joined, or will, get to know.
    void fail(const OrderedPtr& op, Code code, const std::string& text, std::vector<int> culprits, bool tell);

    void send_fail(const Ordered& op, const Ordered::Member& member);

    void on_fail(OrderGroup& group, int p, const OrderFail& record);

    std::vector<OrderedPtr> in_flight(const OrderGroup* group) const;

    static std::vector<int> missing(const Ordered& op);

    static std::string absence(const Ordered& op);

    // What a member has called on the group that this rank has not.
    static std::string instead(const Ordered& op, int p);

    // ---- Deadlocks -------------------------------------------------------------------------------------------------

    void consider(std::unique_lock<std::mutex>& lock, Waiter& waiter, const Caller& caller);

    OrderView view(bool quiet) const;

    Blocked blocked(const Ordered& op) const;

    // Tells all others what this rank waits for, if that is news.
    void publish(OrderView view);

    // A link to each rank that this one shares a group with.
    std::map<int, std::pair<OrderGroup*, int>> neighbours() const;

    void on_report(const OrderReport& record);

    void look_for_deadlock();

    void on_verdict(const OrderVerdict& record);

    // Passes it on to those in it, once, and fails what the threads of this rank were waiting for in its view.
    void spread_verdict(Code code, const std::string& text, const std::map<int, std::uint64_t>& versions);

    int own_rank() const { return groups_.front()->ranks[at(groups_.front()->me)]; }

    int doorbell_[2] = {-1, -1};

    std::mutex mutex_;  // guards everything below
    std::condition_variable background_;
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
    std::vector<OrderedPtr> any_;                  // receives whose sender is not known yet
    std::vector<std::pair<OrderGroupPtr, int>> fallen_;

    std::vector<Waiter*> waiters_;
    Issuers issuers_;
    std::uint64_t activity_ = 0;   // changes with whatever bears on what threads wait for
    std::map<int, OrderView> views_;  // of all ranks, as far as they have told
    std::string published_;        // this rank's, encoded; empty if it waits for nothing
    Quiet quiet_;
    int num_sightings_ = 0;        // of one deadlock, in a row
    std::map<int, std::uint64_t> judged_;  // by rank: the latest version of its view that a verdict was about
    std::deque<std::pair<std::uint64_t, std::vector<OrderedPtr>>> claims_;  // by version: what a stuck rank waited for
    std::uint64_t num_deadlocks_ = 0;
};

}  // namespace torchext::collectives

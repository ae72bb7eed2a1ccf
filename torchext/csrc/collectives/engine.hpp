// The progress engine of one rank: it matches calls across ranks and drives those that can go on, whatever their order.
//
// Matching. To issue a collective is to tell each other member so, by a record in the ring to it. The receiver pairs the
// n-th call that a member makes under a key with its own n-th call under that key. Calls under different keys never wait
// for each other, so the order between them is free. Records that come before this rank's own call are kept on the heap.
//
// Small collectives: the record carries the input; when all have come, each member computes the result by itself, in
// the same order and so with the same bits. If the ring is full, or a peer has too much unread, the input follows once
// the peer has joined.
//
// Large collectives: once all have joined, the first member takes staging memory from its pool and grants it to all.
// The collective is then in the run queue. It runs while its primitives (primitives.hpp) find something to do; after
// `patience` polls in vain it is preempted: its context stays saved and the next one runs.
//
// Stickiness, after DFCCL: a collective that has made progress gets five times the patience that it needed, one that was
// preempted falls back to the base, and the head of the queue has five times the base. So ranks that found each other on
// one collective stay on it together, and otherwise soon try another: they converge without a coordinator.
//
// Threads. All state is guarded by `mutex_`. Whoever waits for a collective drives the engine meanwhile, so that small
// ones need no thread switch; while nobody waits and something is in flight, the engine's own thread drives. There is at
// most one driver at a time (`driving_`). No exception leaves a thread: an error is stored in the op.
//
// Deadlocks. A rank whose threads have waited for some time says on its board (board.hpp) what each waits for; see
// deadlock.cpp for how ranks that wait for each other are found.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena.hpp"
#include "caller.hpp"
#include "futex.hpp"
#include "op.hpp"
#include "peers.hpp"
#include "primitives.hpp"
#include "report.hpp"
#include "ring.hpp"
#include "stats.hpp"
#include "wire.hpp"

namespace torchext::collectives {

// What happened from `begin` to `end`, for a trace.
struct Event {
    const char* what;  // "call", "failed call", or of the driver: "run", "preempted", "deadlock"
    std::string text;
    std::uint64_t id;  // of the call
    Nanoseconds begin, end;
};

enum class Waited { done, expired, deferred };

struct Settings {
    std::uint32_t patience = 80;       // polls before a collective is preempted, at the least
    bool defer = false;                // what to do about a deadlock: put the waits off, or raise
    bool strict = false;               // refuse a second call in flight under one key
    std::vector<int> names = {};       // of the ranks, as messages give them; empty: their numbers
};

class Engine {
public:
    Engine(std::shared_ptr<Arena> arena, int rank, Settings settings = {});

    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    ~Engine();

    // Waits until every rank is there, then starts to watch them. Returns the ranks that are missing at the deadline.
    std::vector<int> meet(Nanoseconds timeout, const std::function<bool()>& interrupted);

    // Issues a collective; never waits for a peer. Throws std::invalid_argument for a request that makes no sense.
    OpPtr issue(const Request& request);

    // The same for a receive from whichever of several ranks sends first; one request for each.
    OpPtr issue_any(std::vector<Request> choices);

    // Issues a collective and waits for its end, or until the wait is deferred; says which. If interrupted, it fails as
    // aborted.
    std::pair<OpPtr, Waited> run(const Request& request, const Caller& caller);

    // Waits for the end of a collective. At `deadline`, when interrupted or when deferred, it goes on.
    Waited wait(const OpPtr& op, Nanoseconds deadline, const Caller& caller, bool deferrable);

    bool done(const OpPtr& op);

    // Fails a collective before its time, as a timeout; else does nothing.
    void cancel(const OpPtr& op, const std::string& text);

    // Fails what is in flight on one group (0: on all), here and on the other members.
    void abort(std::uint64_t group, const std::string& text);

    // Leaves the world: fails what is in flight, tells the peers, ends the thread. Idempotent, from any thread.
    // `at_exit`: those who wait for a call never return. They would want the interpreter's lock, and it ends threads that
    // ask for it while it ends, inside frames that must not be unwound.
    void close(const std::string& text, bool at_exit = false);

    // Asks for the op's id among the finished ones; true, and no id, if it is done already.
    bool watch(const OpPtr& op);

    // Ids of finished ops that are watched; waits for some, up to the timeout or the end of the world.
    std::vector<std::uint64_t> finished(Nanoseconds timeout);

    // The reports of all ranks, nothing for those that have none; true for those that are gone.
    std::vector<std::pair<std::optional<Report>, bool>> reports();

    // Calls of this rank that are in flight.
    std::vector<Blocked> pending();

    // Calls that a peer has made and this rank has not.
    std::vector<std::pair<int, std::string>> unanswered();

    // From now on, notes what happens, or not. Returns what has been noted.
    std::vector<Event> trace(bool on);

    // What the caller may release: the buffers are no longer used.
    std::vector<void*> released();

    // Stats and the number of collectives in flight now.
    std::pair<Stats, std::size_t> stats();

    bool closed();
    bool forked() const { return thread_ != nullptr && fork_generation_ != generation().load(std::memory_order_relaxed); }
    int rank() const { return rank_; }
    int world_size() const { return world_size_; }
    std::size_t eager_bytes() const { return eager_bytes_; }
    int spin_limit() const { return spin_limit_; }  // polls in vain before the driver sleeps

private:
    static constexpr std::size_t at(int i) { return static_cast<std::size_t>(i); }
    static constexpr Nanoseconds kNever = std::numeric_limits<Nanoseconds>::max();
    // What goes through a ring. Between two ranks, whole inputs cross as much memory as parts of them through staging, and
    // wait once instead of three times; among more, each rank would get the inputs of all. A ring must hold two records, or
    // one that does not fit before its end might never fit.
    static constexpr std::size_t eager_limit(std::size_t ring_bytes, int world_size) {
        return (ring_bytes - kMaxRecordHead) / (world_size == 2 ? 2 : 8);
    }
    static constexpr std::size_t kMaxRecordHead = 8192;     // twice that of what goes with a payload, and more
    static constexpr std::size_t kMaxEagerAhead = 4 << 20;  // unread payload that one peer may have to keep
    static constexpr std::size_t kMaxEvents = 1 << 20;      // of a trace; later ones are dropped
    static constexpr std::size_t kMaxTag = 200;             // of which peers are told
    static constexpr std::size_t kMaxText = 3500;           // of a record; the smallest ring has to hold it twice,
    static constexpr std::size_t kMaxCulprits = 500;        // with these

    // A call that a peer has issued and this rank has not.
    struct Unexpected {
        Signature signature;
        std::uint64_t id = 0;
        std::uint64_t send_bytes = 0;
        std::uint64_t recv_bytes = 0;
        bool staged = false;
        bool has_payload = false;
        std::vector<std::byte> payload;
        Code code = Code::none;  // the peer has given up on it
        Code cause = Code::none;
        std::string error;
        std::vector<int> culprits;
    };

    struct KeyQueue {
        std::vector<OpPtr> posted;                                // own calls that not every member has joined
        std::unordered_map<int, std::deque<Unexpected>> arrived;  // by world rank
    };

    struct Peer {
        RingWriter out;
        RingReader in;
        std::deque<std::vector<std::byte>> backlog;  // records without payload that found the ring full
        std::size_t eager_ahead = 0;                 // payload sent for calls that the peer has not joined yet
        Code lost = Code::none;                      // peer_died or peer_left
    };

    // A thread that waits for a call; on its stack.
    struct Waiter {
        OpPtr op;
        bool deferrable;
        Nanoseconds since;
        std::uint64_t thread;
        std::string where = {};
        bool deferred = false;
    };

    struct Block {
        std::size_t offset;
        std::size_t bytes;
        std::shared_ptr<const Members> members;
    };

    // Takes the mutex; the driver gives way to whoever stands here.
    struct Entry {
        explicit Entry(Engine& engine) : lock(engine.mutex_, std::defer_lock) {
            if (!lock.try_lock()) {
                engine.entering_.fetch_add(1, std::memory_order_relaxed);  // a hint, orders nothing
                lock.lock();
                engine.entering_.fetch_sub(1, std::memory_order_relaxed);
            }
        }
        std::unique_lock<std::mutex> lock;
    };

    static std::atomic<int>& generation() {
        static std::atomic<int> forks{0};
        static const int registered =
            pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
        (void)registered;
        return forks;
    }

    // ---- Issue and match -------------------------------------------------------------------------------------------

    OpPtr issue_locked(const Request& request, bool will_wait);
    void post(const OpPtr& op, bool will_wait);
    void choose(const OpPtr& op, const Request& choice);
    bool in_flight_under(std::uint64_t key) const;
    void send_join(Op& op, int member);

    // A member has joined this rank's call. If the payload lies in the ring, `settle` has to be called before it goes.
    void join(const OpPtr& op, int member, Unexpected& call, const std::byte* payload);
    // `owner`: of the payload, if it lies on the heap.
    void receive(const OpPtr& op, int member, const std::byte* payload, std::size_t bytes, std::vector<std::byte> owner);
    void queue_sends(const OpPtr& op);

    // Finishes the call if nothing is left to do.
    void settle(const OpPtr& op);
    void finish(const OpPtr& op);

    // An op stays known until it is done and every member has joined: later joins must not pair with a later call.
    void forget(const OpPtr& op);
    void forget_key(const OpPtr& op);
    bool all_come(const Op& op) const;  // every member has joined or is lost
    std::vector<OpPtr> in_flight() const;

    // ---- Records ---------------------------------------------------------------------------------------------------

    bool drain(int p);
    OpPtr find(std::uint64_t id) const;
    void on_join(int p, const JoinRecord& record);
    void on_grant(int p, const GrantRecord& grant);
    void on_fail(int p, const FailRecord& record);

    void on_verdict(const VerdictRecord& record);
    template <class Record>
    void send_record(int p, const Record& record, const std::string& text = {}) {
        Peer& peer = peers_[at(p)];
        std::vector<std::byte> bytes(RingWriter::record_bytes(sizeof(Record) + text.size()));
        std::memcpy(bytes.data(), &record, sizeof(Record));
        std::memcpy(bytes.data() + sizeof(Record), text.data(), text.size());
        reinterpret_cast<RecordHeader*>(bytes.data())->bytes = static_cast<std::uint32_t>(bytes.size());
        peer.backlog.push_back(std::move(bytes));
        flush_backlog(p);
    }

    // Moves what found a ring full; true if something is left for a peer that still reads.
    bool flush_backlogs();
    bool flush_backlog(int p);
    bool backlogged() const;

    // Whether somebody has to drive.
    bool busy() const { return num_active_ != 0 || backlogged(); }

    // Small inputs that could not go with the join: to each peer that has joined, as its ring has room.
    bool send_late(const OpPtr& op);

    // ---- Staging ---------------------------------------------------------------------------------------------------

    StageLayout layout_of(const Op& op) const {
        return StageLayout(op.flow, op.n, arena_->pool_bytes() / 8, arena_->chunk_bytes());
    }

    void start(const OpPtr& op, std::byte* block);

    // Gives staging to those of this rank's collectives that all have joined, first come first served.
    bool grant();

    // Takes back the blocks that no member touches any more.
    void recover();
    void decline(std::byte* block, int member, const Members& members);

    // ---- Progress --------------------------------------------------------------------------------------------------

    // Does all that can be done now; true if that was something.
    bool pass();
    bool run_sends();

    // One turn of each collective in the queue.
    bool run_queue();

    // Wakes the peers for whom there is news and whose driver sleeps.
    void wake_touched();

    // relaxed: the doorbell itself carries no data, what is news was published before
    static void ring(RankCell& cell);
    void wake_local() { ring(arena_->cell(rank_)); }

    enum class Drive { stopped, checked };

    // Makes progress until `stop` holds, or it has been idle for some time (then the caller may check for signals).
    template <class Stop>
    Drive drive(std::unique_lock<std::mutex>& lock, Stop&& stop);
    void sleep(std::unique_lock<std::mutex>& lock);
    Waited wait_locked(std::unique_lock<std::mutex>& lock, const OpPtr& op, Nanoseconds deadline, const Caller& caller,
                       bool deferrable);
    void run_thread();

    // ---- Faults ----------------------------------------------------------------------------------------------------

    void check(Nanoseconds t);
    void lose(int p, Code code);

    // Fails the call if it cannot end without the lost member.
    void fail_if_needed(const OpPtr& op, int member, Code code);
    const Unexpected* given_up(const Op& op, int p) const;

    // `tell`: the members that have joined, or will, get to know.
    void fail(const OpPtr& op, Code code, const std::string& text, std::vector<int> culprits, bool tell);
    void send_fail(const Op& op, int member);
    std::vector<int> missing(const Op& op) const;

    // Whom the call waits for.
    std::string absence(const Op& op) const;

    // What a member has called on the same group that this rank has not.
    std::string instead(const Op& op, int p) const;
    // A rank as messages name it.
    std::string name(int p) const {
        return "rank " + std::to_string(settings_.names.empty() ? p : settings_.names[at(p)]);
    }

    void note(const Op& op, const char* what, Nanoseconds begin, Nanoseconds end) {
        if (events_.size() < kMaxEvents) events_.push_back({what, op.signature.describe(), op.id, begin, end});
    }

    // ---- Deadlocks -------------------------------------------------------------------------------------------------

    // To be called before anything that bears on what this rank's threads wait for is seen by others.
    void stir() {
        ++activity_;
        if (published_ != 0) withdraw();
    }
    void withdraw();
    void consider(std::unique_lock<std::mutex>& lock, Waiter& waiter, const Caller& caller);
    Report report(bool quiet) const;
    Blocked blocked(const Op& op) const;
    bool in_transit() const;
    void look_for_deadlock();
    void pass_verdict(const std::map<int, Seen>& stuck);
    void apply_verdict(Code code, const std::string& text, const std::vector<int>& members);

    std::shared_ptr<Arena> arena_;
    const int rank_;
    const int world_size_;
    const std::size_t eager_bytes_;
    const Settings settings_;
    const std::uint32_t max_patience_;
    int spin_limit_ = 0;
    static constexpr Nanoseconds kCheckInterval = 50 * kMillisecond;
    static constexpr Nanoseconds kBlockedAfter = 100 * kMillisecond;  // then a thread's wait is told to others

    std::mutex mutex_;  // guards everything below but the atomics
    std::condition_variable changed_;     // a call has finished, or the driver has stopped
    std::condition_variable background_;  // the engine's thread may have to drive
    std::condition_variable finished_;    // notices_ has grown
    std::atomic<int> entering_{0};
    std::atomic<bool> has_released_{false};
    bool driving_ = false;
    bool in_background_ = false;  // the engine's thread is the driver
    bool closed_ = false;
    bool parked_ = false;  // closed at the end of the process
    int num_waiting_ = 0;
    int num_wanting_ = 0;  // of those, who do not drive

    std::vector<Peer> peers_;
    Peers liveness_;
    std::unordered_map<std::uint64_t, KeyQueue> keys_;
    std::unordered_map<std::uint64_t, OpPtr> ops_;
    std::uint64_t last_id_ = 0;
    bool tracing_ = false;
    std::vector<Event> events_;
    std::size_t num_active_ = 0;

    std::vector<OpPtr> any_;        // receives whose sender is not known yet
    std::vector<OpPtr> sends_;      // with small inputs still to be sent
    std::deque<OpPtr> wanted_;      // led by this rank, joined by all, waiting for staging
    std::deque<OpPtr> run_queue_;   // with staging
    std::uint64_t last_run_ = 0;
    std::uint64_t head_ = 0;
    std::size_t num_deferred_ = 0;
    StagingPool pool_;
    std::vector<Block> blocks_;
    Touched touched_;
    std::vector<const void*> sources_;

    std::vector<Waiter*> waiters_;
    Issuers issuers_;
    std::uint64_t activity_ = 0;      // changes with whatever bears on what threads wait for
    std::uint64_t published_ = 0;     // the version of the report on the board; 0 for none
    bool published_stuck_ = false;
    Quiet quiet_;
    int num_sightings_ = 0;           // of one deadlock, in a row

    std::vector<std::uint64_t> notices_;
    bool any_watched_ = false;
    bool listening_ = false;  // somebody waits for notices
    std::vector<void*> released_;
    Stats stats_;

    int fork_generation_ = 0;
    std::mutex join_mutex_;
    std::unique_ptr<std::thread> thread_;
};

}  // namespace torchext::collectives

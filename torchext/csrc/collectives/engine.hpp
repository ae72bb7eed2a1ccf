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
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena.hpp"
#include "futex.hpp"
#include "op.hpp"
#include "peers.hpp"
#include "primitives.hpp"
#include "ring.hpp"
#include "stats.hpp"
#include "wire.hpp"

namespace torchext::collectives {

class Engine {
public:
    Engine(std::shared_ptr<Arena> arena, int rank)
        : arena_(std::move(arena)),
          rank_(rank),
          world_size_(arena_->world_size()),
          eager_bytes_(arena_->ring_bytes() / 8),
          peers_(static_cast<std::size_t>(world_size_)),
          pool_(arena_->pool_bytes()),
          touched_(world_size_) {
        for (int p = 0; p < world_size_; ++p) {
            auto& peer = peers_[at(p)];
            peer.out = RingWriter(arena_->ring_control(rank, p), arena_->ring_data(rank, p), arena_->ring_bytes());
            peer.in = RingReader(arena_->ring_control(p, rank), arena_->ring_data(p, rank), arena_->ring_bytes());
        }
        const long cores = sysconf(_SC_NPROCESSORS_ONLN);
        cpu_set_t set;
        const int usable = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : static_cast<int>(cores);
        // Where each rank can have a core, an answer is likely to be on its way; else the core is needed to make it.
        spin_limit_ = world_size_ <= usable ? 2000 : 20;
        auto& cell = arena_->cell(rank_);
        cell.pid.store(static_cast<std::uint32_t>(getpid()), std::memory_order_relaxed);
        // release: publishes the pid
        cell.presence.store(static_cast<std::uint32_t>(Presence::present), std::memory_order_release);
    }

    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    ~Engine() {
        if (forked()) {
            thread_.release();  // the thread does not exist in this process: neither join nor destroy it
            return;
        }
        close("the process group was destroyed");
    }

    // Waits until every rank is there, then starts to watch them. Returns the ranks that are missing at the deadline.
    std::vector<int> meet(Nanoseconds timeout, const std::function<bool()>& interrupted) {
        const Nanoseconds end = now() + timeout;
        Nanoseconds next_check = now() + 50 * kMillisecond;
        std::vector<int> missing;
        while (true) {
            missing.clear();
            for (int p = 0; p < world_size_; ++p) {
                // acquire: pairs with the release in the constructor
                if (arena_->cell(p).presence.load(std::memory_order_acquire) == 0) missing.push_back(p);
            }
            if (missing.empty()) break;
            const Nanoseconds t = now();
            if (t > end) return missing;
            if (t > next_check) {
                if (interrupted()) return missing;
                next_check = t + 50 * kMillisecond;
            }
            const timespec pause{0, 200'000};
            nanosleep(&pause, nullptr);
        }
        std::vector<int> pids;
        for (int p = 0; p < world_size_; ++p) {
            pids.push_back(p == rank_ ? 0 : static_cast<int>(arena_->cell(p).pid.load(std::memory_order_relaxed)));
        }
        liveness_.watch(pids);
        fork_generation_ = generation().load(std::memory_order_relaxed);
        thread_ = std::make_unique<std::thread>([this] { run_thread(); });
        return {};
    }

    // Issues a collective; never waits for a peer. Throws std::invalid_argument for a request that makes no sense.
    OpPtr issue(const Request& request) {
        Entry entry(*this);
        return issue_locked(request, /*will_wait=*/false);
    }

    // Issues a collective and waits for its end. `interrupted` is called now and then without the lock; if it says so,
    // the collective fails as aborted.
    OpPtr run(const Request& request, const std::function<bool()>& interrupted) {
        Entry entry(*this);
        OpPtr op = issue_locked(request, /*will_wait=*/true);
        if (!op->done && !wait_locked(entry.lock, op, kNever, interrupted)) {
            fail(op, Code::aborted, "interrupted", {}, true);
            wake_touched();
        }
        return op;
    }

    // Waits for the end of a collective. At `deadline`, or when interrupted, returns false; the collective goes on.
    bool wait(const OpPtr& op, Nanoseconds deadline, const std::function<bool()>& interrupted) {
        Entry entry(*this);
        return op->done || wait_locked(entry.lock, op, deadline, interrupted);
    }

    bool done(const OpPtr& op) {
        std::lock_guard lock(mutex_);
        return op->done;
    }

    void cancel(const OpPtr& op, Code code, const std::string& text) {
        Entry entry(*this);
        if (!op->done) fail(op, code, text, {}, true);
        wake_touched();
    }

    // Fails what is in flight on one group (0: on all), here and on the other members.
    void abort(std::uint64_t group, const std::string& text) {
        Entry entry(*this);
        for (const auto& op : in_flight()) {
            if (group == 0 || op->signature.group == group) fail(op, Code::aborted, text, {}, true);
        }
        wake_touched();
    }

    // Leaves the world: fails what is in flight, tells the peers, ends the thread. Idempotent, from any thread.
    void close(const std::string& text) {
        if (forked()) return;
        {
            Entry entry(*this);
            if (!closed_) {
                closed_ = true;
                for (const auto& op : in_flight()) fail(op, Code::aborted, text, {}, true);
                const Nanoseconds end = now() + kSecond;  // for what waits for room in a ring; tiny records only
                while (flush_backlogs() && now() < end) {
                    wake_touched();
                    sched_yield();
                }
                // release: all that this rank had to say lies in its rings before others see that it has left
                arena_->cell(rank_).presence.store(static_cast<std::uint32_t>(Presence::left),
                                                   std::memory_order_release);
                for (int p = 0; p < world_size_; ++p) touched_.add(p);
                wake_touched();
            }
            wake_local();
            changed_.notify_all();
            background_.notify_all();
            finished_.notify_all();
        }
        std::lock_guard join(join_mutex_);
        if (thread_ != nullptr && thread_->joinable()) thread_->join();
    }

    // Asks for the op's id among the finished ones; true, and no id, if it is done already.
    bool watch(const OpPtr& op) {
        Entry entry(*this);
        op->notify = !op->done;
        return op->done;
    }

    // Ids of finished ops that are watched; waits for some, up to the timeout or the end of the world.
    std::vector<std::uint64_t> finished(Nanoseconds timeout) {
        std::unique_lock lock(mutex_);
        finished_.wait_for(lock, std::chrono::nanoseconds(timeout), [&] { return !notices_.empty() || closed_; });
        return std::exchange(notices_, {});
    }

    // What the caller may release: the buffers are no longer used.
    std::vector<void*> released() {
        if (!has_released_.load(std::memory_order_relaxed)) return {};
        std::lock_guard lock(mutex_);
        has_released_.store(false, std::memory_order_relaxed);
        return std::exchange(released_, {});
    }

    // Stats and the number of collectives in flight now.
    std::pair<Stats, std::size_t> stats() {
        std::lock_guard lock(mutex_);
        return {stats_, num_active_};
    }

    bool closed() {
        std::lock_guard lock(mutex_);
        return closed_;
    }
    bool forked() const { return thread_ != nullptr && fork_generation_ != generation().load(std::memory_order_relaxed); }
    int rank() const { return rank_; }
    int world_size() const { return world_size_; }
    std::size_t eager_bytes() const { return eager_bytes_; }

private:
    static constexpr std::size_t at(int i) { return static_cast<std::size_t>(i); }
    static constexpr Nanoseconds kNever = std::numeric_limits<Nanoseconds>::max();
    static constexpr std::uint32_t kBasePatience = 80;
    static constexpr std::uint32_t kMaxPatience = 4000;
    static constexpr std::size_t kMaxEagerAhead = 4 << 20;  // unread payload that one peer may have to keep
    static constexpr std::size_t kMaxTag = 200;             // of which peers are told

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
        std::string error;
        int culprit = -1;
    };

    struct KeyQueue {
        std::deque<OpPtr> posted;                                 // own calls that not every member has joined
        std::unordered_map<int, std::deque<Unexpected>> arrived;  // by world rank
    };

    struct Peer {
        RingWriter out;
        RingReader in;
        std::deque<std::vector<std::byte>> backlog;  // records without payload that found the ring full
        std::size_t eager_ahead = 0;                 // payload sent for calls that the peer has not joined yet
        Code lost = Code::none;                      // peer_died or peer_left
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

    OpPtr issue_locked(const Request& request, bool will_wait) {
        auto op = std::make_shared<Op>();
        op->signature = request.signature;
        op->members = request.members;
        op->n = request.members->size();
        op->me = request.members->me;
        prepare(*op, request, eager_bytes_);
        op->id = ++last_id_;
        op->key = request.signature.key(request.dims_hash);
        op->issued = now();
        op->deadline = op->issued + request.timeout;
        op->keepalive = request.keepalive;
        ++stats_.issued;
        ++num_active_;
        stats_.max_queue_depth = std::max<std::uint64_t>(stats_.max_queue_depth, num_active_);
        if (closed_) {
            fail(op, Code::aborted, "the process group was destroyed or aborted", {}, false);
            return op;
        }
        if (op->n == 1) {
            if (op->local_to.bytes != 0) std::memmove(op->local_to.data, op->local_from.data, op->local_to.bytes);
            if (op->flow == Flow::reduce && op->result.data != op->whole.data && op->whole.bytes != 0) {
                std::memmove(op->result.data, op->whole.data, op->whole.bytes);
            }
            finish(op);
            return op;
        }
        ops_.emplace(op->id, op);
        for (int i = 1; i < op->n; ++i) send_join(*op, (op->me + i) % op->n);
        wake_touched();  // before anything else: it is what the peers wait for
        auto& queue = keys_[op->key];
        queue.posted.push_back(op);
        if (!queue.arrived.empty()) {
            // Once all have joined, `queue` is gone.
            for (int m = 0; m < op->n && !op->done && !op->all_joined(); ++m) {
                const auto found = queue.arrived.find(op->world_rank(m));
                if (m == op->me || found == queue.arrived.end()) continue;
                Unexpected call = std::move(found->second.front());
                found->second.pop_front();
                if (found->second.empty()) queue.arrived.erase(found);
                join(op, m, call, call.payload.data());
            }
        }
        for (int m = 0; m < op->n && !op->done; ++m) {
            const int p = op->world_rank(m);
            if (peers_[at(p)].lost != Code::none) fail_if_needed(op, m, peers_[at(p)].lost);
        }
        settle(op);
        if (!op->done) {
            if (op->num_pending_sends != 0 && !op->in_send_queue) queue_sends(op);
            if (driving_) {
                wake_local();  // the driver may sleep, and there may be something for it to do now
            } else if (!will_wait && num_waiting_ == 0) {
                background_.notify_one();
            }
        }
        wake_touched();
        return op;
    }

    void send_join(Op& op, int member) {
        const int p = op.world_rank(member);
        Peer& peer = peers_[at(p)];
        auto& state = op.peers[at(member)];
        const Span payload = state.sent ? Span{} : op.send[at(member)];
        const std::size_t tag = std::min(op.signature.tag.size(), kMaxTag);
        const std::size_t bare = sizeof(JoinRecord) + round_up(tag, 16);
        std::byte* room = nullptr;
        bool eager = false;
        std::size_t record = RingWriter::record_bytes(bare + payload.bytes);
        if (peer.backlog.empty()) {
            if (payload.bytes != 0 && peer.eager_ahead + payload.bytes <= kMaxEagerAhead) {
                room = peer.out.reserve(record);
                eager = room != nullptr;
            }
            if (room == nullptr) {
                record = bare;
                room = peer.out.reserve(record);
            }
        } else {
            record = bare;
        }
        std::vector<std::byte> late;
        if (room == nullptr) {
            late.resize(record);
            room = late.data();
        }
        auto* join = new (room) JoinRecord{};
        join->header = {static_cast<std::uint32_t>(record), static_cast<std::uint8_t>(RecordKind::join), {}};
        join->op = op.signature.kind;
        join->reduce_op = op.signature.reduce_op;
        join->dtype = op.signature.dtype;
        join->num_dims = op.signature.num_dims;
        join->staged = op.staged_here;
        join->has_payload = eager;
        join->tag_bytes = static_cast<std::uint16_t>(tag);
        join->root = op.signature.root;
        join->peer = op.signature.peer;
        join->group = op.signature.group;
        join->key = op.key;
        join->id = op.id;
        join->send_bytes = op.send[at(member)].bytes;
        join->recv_bytes = op.recv[at(member)].bytes;
        std::memcpy(join->dims, op.signature.dims.data(), sizeof(join->dims));
        std::memcpy(room + sizeof(JoinRecord), op.signature.tag.data(), tag);
        if (eager) {
            std::memcpy(room + bare, payload.data, payload.bytes);
            state.sent = true;
            state.eager_bytes = payload.bytes;
            peer.eager_ahead += payload.bytes;
            --op.num_pending_sends;
        }
        if (late.empty()) {
            peer.out.publish();
            touched_.add(p);
        } else {
            peer.backlog.push_back(std::move(late));
        }
    }

    // A member has joined this rank's call.
    void join(const OpPtr& op, int member, const Unexpected& call, const std::byte* payload) {
        const int p = op->world_rank(member);
        auto& state = op->peers[at(member)];
        state.joined = true;
        state.id = call.id;
        peers_[at(p)].eager_ahead -= state.eager_bytes;
        ++op->num_joined;
        op->staged |= call.staged;
        if (call.code != Code::none) {
            fail(op, call.code, call.error, {call.culprit}, true);
        } else if (op->done) {
            // Finished early, as a sender may, or failed, of which the peer has been told.
        } else if (!op->signature.same_call(call.signature) || call.send_bytes != op->recv[at(member)].bytes ||
                   call.recv_bytes != op->send[at(member)].bytes) {
            fail(op, Code::mismatch,
                 "rank " + std::to_string(p) + " called " + call.signature.describe() + ", which sends this rank " +
                     std::to_string(call.send_bytes) + " bytes where it expects " +
                     std::to_string(op->recv[at(member)].bytes) + ", and expects " + std::to_string(call.recv_bytes) +
                     " where it sends " + std::to_string(op->send[at(member)].bytes),
                 {p}, true);
        } else {
            if (call.has_payload) receive(op, member, payload, call.send_bytes);
            if (!state.sent && !op->in_send_queue) queue_sends(op);
        }
        if (op->all_joined()) {
            forget_key(op);
            if (op->staged && !op->done) {
                if (op->leads()) wanted_.push_back(op);
            } else if (op->done) {
                forget(op);
            }
        }
    }

    void receive(const OpPtr& op, int member, const std::byte* payload, std::size_t bytes) {
        auto& state = op->peers[at(member)];
        if (state.have || bytes != op->recv[at(member)].bytes) return;
        std::memcpy(op->recv[at(member)].data, payload, bytes);
        state.have = true;
        --op->num_pending_recvs;
    }

    void queue_sends(const OpPtr& op) {
        op->in_send_queue = true;
        sends_.push_back(op);
    }

    // Finishes the call if nothing is left to do.
    void settle(const OpPtr& op) {
        if (op->done || op->num_pending_sends != 0 || op->num_pending_recvs != 0) return;
        if (op->needs_all_joined && !op->all_joined()) return;
        if (op->staged && !op->stage_done) return;
        if (!op->staged) {
            if (op->local_to.bytes != 0) std::memmove(op->local_to.data, op->local_from.data, op->local_to.bytes);
            if (op->flow == Flow::reduce && op->result.data != nullptr && op->whole.bytes != 0) {
                sources_.clear();
                for (int m = 0; m < op->n; ++m) {
                    sources_.push_back(m == op->me ? op->whole.data : op->recv[at(m)].data);
                }
                op->kernel(op->result.data, sources_.data(), op->n, op->whole.bytes / op->item_bytes, op->n);
            }
        }
        finish(op);
    }

    void finish(const OpPtr& op) {
        op->done = true;
        op->finished_at = now();
        --num_active_;
        ++(op->code == Code::none ? stats_.completed : stats_.failed);
        if (op->block != nullptr) {
            if (op->code == Code::none) ++stats_.staged;
            decline(op->block, op->me, *op->members);
            op->block = nullptr;
        }
        op->scratch = {};
        if (op->keepalive != nullptr) {
            released_.push_back(std::exchange(op->keepalive, nullptr));
            has_released_.store(true, std::memory_order_relaxed);  // the mutex orders what it announces
        }
        if (op->notify) {
            notices_.push_back(op->id);
            finished_.notify_all();
        }
        if (num_waiting_ > 1 || (num_waiting_ == 1 && in_background_)) changed_.notify_all();
        if (op->all_joined()) forget(op);
    }

    // An op stays known until it is done and every member has joined: later joins must not pair with a later call.
    void forget(const OpPtr& op) {
        // A failed call whose staging has yet to be granted stays, to decline it; harmless if that never comes.
        if (op->done && op->all_joined()) ops_.erase(op->id);
    }

    void forget_key(const OpPtr& op) {
        const auto found = keys_.find(op->key);
        if (found == keys_.end()) return;
        auto& posted = found->second.posted;
        posted.erase(std::find(posted.begin(), posted.end(), op));
        if (posted.empty() && found->second.arrived.empty()) keys_.erase(found);
    }

    std::vector<OpPtr> in_flight() const {
        std::vector<OpPtr> ops;
        for (const auto& [id, op] : ops_) {
            if (!op->done) ops.push_back(op);
        }
        std::sort(ops.begin(), ops.end(), [](const OpPtr& a, const OpPtr& b) { return a->id < b->id; });
        return ops;
    }

    // ---- Records ---------------------------------------------------------------------------------------------------

    bool drain(int p) {
        Peer& peer = peers_[at(p)];
        bool any = false;
        while (const RecordHeader* record = peer.in.front()) {
            any = true;
            const std::size_t bytes = record->bytes;
            switch (static_cast<RecordKind>(record->kind)) {
                case RecordKind::join:
                    on_join(p, *reinterpret_cast<const JoinRecord*>(record));
                    break;
                case RecordKind::data: {
                    const auto& data = *reinterpret_cast<const DataRecord*>(record);
                    if (const auto op = find(data.id); op != nullptr && !op->done) {
                        receive(op, op->members->index(p), reinterpret_cast<const std::byte*>(&data + 1), data.bytes);
                        settle(op);
                    }
                    break;
                }
                case RecordKind::grant:
                    on_grant(p, *reinterpret_cast<const GrantRecord*>(record));
                    break;
                case RecordKind::fail:
                    on_fail(p, *reinterpret_cast<const FailRecord*>(record));
                    break;
                case RecordKind::pad:
                    break;
            }
            peer.in.pop(bytes);
        }
        return any;
    }

    OpPtr find(std::uint64_t id) const {
        const auto found = ops_.find(id);
        return found == ops_.end() ? nullptr : found->second;
    }

    void on_join(int p, const JoinRecord& record) {
        const auto found = keys_.find(record.key);
        OpPtr op;
        int member = -1;
        if (found != keys_.end() && found->second.arrived.find(p) == found->second.arrived.end()) {
            for (const auto& posted : found->second.posted) {
                member = posted->members->index(p);
                if (member >= 0 && !posted->peers[at(member)].joined) {
                    op = posted;
                    break;
                }
            }
        }
        Unexpected call;
        call.signature = signature_of(record);
        call.id = record.id;
        call.send_bytes = record.send_bytes;
        call.recv_bytes = record.recv_bytes;
        call.staged = record.staged != 0;
        call.has_payload = record.has_payload != 0;
        const std::byte* payload = payload_of(record);
        if (op != nullptr) {
            join(op, member, call, payload);
            settle(op);
            return;
        }
        if (call.has_payload) call.payload.assign(payload, payload + call.send_bytes);
        keys_[record.key].arrived[p].push_back(std::move(call));
    }

    void on_grant(int p, const GrantRecord& grant) {
        std::byte* block = arena_->pool(p) + grant.offset;
        const auto op = find(grant.id);
        if (op == nullptr || op->done) {
            // release: nothing of this rank touches the block; the leader's acquire lets it use the memory again
            StageLayout::finished(block, static_cast<int>(grant.member)).store(1, std::memory_order_release);
            touched_.add(p);
            return;
        }
        start(op, block);
    }

    void on_fail(int p, const FailRecord& record) {
        const auto code = static_cast<Code>(record.code);
        const std::string text(reinterpret_cast<const char*>(&record + 1), record.text_bytes);
        for (const auto& op : in_flight()) {
            const int member = op->members->index(p);
            if (member >= 0 && op->peers[at(member)].joined && op->peers[at(member)].id == record.id) {
                fail(op, code, text, {record.culprit}, false);
                return;
            }
        }
        for (auto& [key, queue] : keys_) {
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
    bool flush_backlogs() {
        bool left = false;
        for (int p = 0; p < world_size_; ++p) left |= flush_backlog(p) && peers_[at(p)].lost == Code::none;
        return left;
    }

    bool flush_backlog(int p) {
        Peer& peer = peers_[at(p)];
        while (!peer.backlog.empty()) {
            const auto& record = peer.backlog.front();
            std::byte* room = peer.out.reserve(record.size());
            if (room == nullptr) return true;
            std::memcpy(room, record.data(), record.size());
            peer.out.publish();
            touched_.add(p);
            peer.backlog.pop_front();
        }
        return false;
    }

    // Small inputs that could not go with the join: to each peer that has joined, as its ring has room.
    bool send_late(const OpPtr& op) {
        bool moved = false;
        for (int m = 0; m < op->n; ++m) {
            auto& state = op->peers[at(m)];
            const int p = op->world_rank(m);
            Peer& peer = peers_[at(p)];
            if (m == op->me || state.sent || !state.joined || !peer.backlog.empty()) continue;
            const Span& payload = op->send[at(m)];
            const std::size_t record = RingWriter::record_bytes(sizeof(DataRecord) + payload.bytes);
            std::byte* room = peer.out.reserve(record);
            if (room == nullptr) continue;
            auto* data = new (room) DataRecord{};
            data->header = {static_cast<std::uint32_t>(record), static_cast<std::uint8_t>(RecordKind::data), {}};
            data->id = state.id;
            data->bytes = payload.bytes;
            std::memcpy(data + 1, payload.data, payload.bytes);
            peer.out.publish();
            touched_.add(p);
            state.sent = true;
            --op->num_pending_sends;
            moved = true;
        }
        return moved;
    }

    // ---- Staging ---------------------------------------------------------------------------------------------------

    StageLayout layout_of(const Op& op) const { return StageLayout(op.flow, op.n, arena_->pool_bytes() / 8); }

    void start(const OpPtr& op, std::byte* block) {
        op->block = block;
        op->layout = layout_of(*op);
        op->granted = true;
        op->patience = kBasePatience;
        op->context.sent.assign(at(op->n), 0);
        op->context.received.assign(at(op->n), 0);
        op->context.spread_got.assign(at(op->n), 0);
        run_queue_.push_back(op);
    }

    // Gives staging to those of this rank's collectives that all have joined, first come first served.
    bool grant() {
        bool moved = false;
        while (!wanted_.empty()) {
            const OpPtr op = wanted_.front();
            if (!op->done) {
                const StageLayout layout = layout_of(*op);
                auto offset = pool_.take(layout.total());
                if (!offset.has_value()) {
                    recover();
                    offset = pool_.take(layout.total());
                }
                if (!offset.has_value()) {
                    if (wanted_.size() != num_deferred_) {
                        num_deferred_ = wanted_.size();
                        ++stats_.grants_deferred;
                    }
                    return moved;
                }
                blocks_.push_back({*offset, layout.total(), op->members});
                std::byte* block = arena_->pool(rank_) + *offset;
                layout.reset(block);
                for (int m = 0; m < op->n; ++m) {
                    if (m == op->me) continue;
                    GrantRecord record{};
                    record.header.kind = static_cast<std::uint8_t>(RecordKind::grant);
                    record.id = op->peers[at(m)].id;
                    record.offset = *offset;
                    record.member = static_cast<std::uint32_t>(m);
                    record.num_members = static_cast<std::uint32_t>(op->n);
                    send_record(op->world_rank(m), record);
                }
                start(op, block);
            }
            wanted_.pop_front();
            moved = true;
        }
        num_deferred_ = 0;
        return moved;
    }

    // Takes back the blocks that no member touches any more.
    void recover() {
        for (std::size_t i = 0; i < blocks_.size();) {
            std::byte* block = arena_->pool(rank_) + blocks_[i].offset;
            const auto& members = *blocks_[i].members;
            bool free = true;
            for (int m = 0; m < members.size(); ++m) {
                // acquire: what the member did to the block comes before its use for something else
                free = free && (StageLayout::finished(block, m).load(std::memory_order_acquire) != 0 ||
                                peers_[at(members.rank(m))].lost != Code::none);
            }
            if (free) {
                pool_.give_back(blocks_[i].offset, blocks_[i].bytes);
                blocks_[i] = blocks_.back();
                blocks_.pop_back();
            } else {
                ++i;
            }
        }
    }

    void decline(std::byte* block, int member, const Members& members) {
        // release: the last that this rank does to the block
        StageLayout::finished(block, member).store(1, std::memory_order_release);
        touched_.add(members.rank(0));
    }

    // ---- Progress --------------------------------------------------------------------------------------------------

    // Does all that can be done now; true if that was something.
    bool pass() {
        bool moved = false;
        for (int p = 0; p < world_size_; ++p) {
            if (p != rank_) moved |= drain(p);
        }
        if (num_active_ != 0) {
            for (int p = 0; p < world_size_; ++p) {
                if (!peers_[at(p)].backlog.empty()) moved |= !flush_backlog(p);
            }
            if (!sends_.empty()) moved |= run_sends();
            if (!wanted_.empty()) moved |= grant();
            if (!run_queue_.empty()) moved |= run_queue();
        }
        wake_touched();
        return moved;
    }

    bool run_sends() {
        bool moved = false;
        for (std::size_t i = 0; i < sends_.size();) {
            const OpPtr op = sends_[i];
            if (!op->done) {
                moved |= send_late(op);
                settle(op);
            }
            if (op->done || op->num_pending_sends == 0) {
                op->in_send_queue = false;
                sends_.erase(sends_.begin() + static_cast<std::ptrdiff_t>(i));
            } else {
                ++i;
            }
        }
        return moved;
    }

    // One turn of each collective in the queue.
    bool run_queue() {
        bool moved = false;
        for (std::size_t turn = run_queue_.size(); turn > 0 && !run_queue_.empty(); --turn) {
            const OpPtr op = run_queue_.front();
            run_queue_.pop_front();
            if (op->done) continue;
            if (op->id != last_run_) {
                last_run_ = op->id;
                ++stats_.context_switches;
            }
            const bool alone = run_queue_.empty();
            const bool is_head = op->id == head_;
            Primitives primitives(*op, eager_bytes_, touched_);
            std::uint32_t polls = 0;
            while (true) {
                const int done = primitives.run();
                if (op->stage_done) {
                    settle(op);
                    moved = true;
                    break;
                }
                if (done != 0) {
                    stats_.primitives += static_cast<std::uint64_t>(done);
                    op->patience = std::clamp(5 * polls, kBasePatience, kMaxPatience);
                    polls = 0;
                    moved = true;
                    wake_touched();
                    if (alone) break;  // the rings may have news; nothing else is to be run
                    continue;
                }
                ++stats_.spins;
                // Alone in the queue there is nothing to turn to: the driver polls the rings as well, and may sleep.
                if (alone || ++polls > (is_head ? 5 * op->patience : op->patience)) {
                    if (!alone) {
                        ++stats_.preemptions;
                        op->patience = kBasePatience;
                    }
                    break;
                }
                cpu_relax();
            }
            if (!op->done) run_queue_.push_back(op);
        }
        // The oldest is the head: the same one on all ranks that are in the same state.
        head_ = 0;
        for (const auto& op : run_queue_) {
            if (head_ == 0 || op->id < head_) head_ = op->id;
        }
        return moved;
    }

    // Wakes the peers for whom there is news and whose driver sleeps.
    void wake_touched() {
        if (touched_.empty()) return;
#if defined(__SANITIZE_THREAD__)
        const bool fenced = false;  // not modelled by the sanitizer; a read-modify-write orders as well
#else
        const bool fenced = true;
        // Either this side sees `sleeping`, or the sleeper, who sets it before it looks, sees the news (Dekker).
        std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
        touched_.drain([&](int p) {
            auto& cell = arena_->cell(p);
            const std::uint32_t asleep = fenced ? cell.sleeping.load(std::memory_order_relaxed)
                                                : cell.sleeping.fetch_or(0, std::memory_order_seq_cst);
            if (asleep != 0) {
                ring(cell);
                if (p != rank_) ++stats_.wakes;
            }
        });
    }

    // relaxed: the doorbell itself carries no data, what is news was published before
    static void ring(RankCell& cell) {
        cell.doorbell.fetch_add(1, std::memory_order_relaxed);
        futex_wake_all(cell.doorbell);
    }

    void wake_local() { ring(arena_->cell(rank_)); }

    enum class Drive { stopped, checked };

    // Makes progress until `stop` holds, or it has been idle for some time (then the caller may check for signals).
    template <class Stop>
    Drive drive(std::unique_lock<std::mutex>& lock, Stop&& stop) {
        Nanoseconds checked = now();
        int idle = 0;
        int busy = 0;
        while (!stop()) {
            const bool moved = pass();
            if (stop()) break;
            if (entering_.load(std::memory_order_relaxed) != 0) {
                lock.unlock();
                while (entering_.load(std::memory_order_relaxed) != 0) sched_yield();
                lock.lock();
            }
            if (moved) {
                idle = 0;
                if (++busy < 1000) continue;
            } else if (++idle <= spin_limit_) {
                ++stats_.spins;
                cpu_relax();
                continue;
            } else {
                // Not sched_yield first: on a busy machine that costs whole time slices, while a sleeper runs soon after
                // it is woken.
                sleep(lock);
            }
            busy = 0;
            const Nanoseconds t = now();
            if (t - checked >= kCheckInterval) {
                checked = t;
                check(t);
                return Drive::checked;
            }
        }
        return Drive::stopped;
    }

    void sleep(std::unique_lock<std::mutex>& lock) {
        auto& cell = arena_->cell(rank_);
        // relaxed: whoever raises it later makes the futex return at once
        const std::uint32_t seen = cell.doorbell.load(std::memory_order_relaxed);
        // seq_cst, with the fence: see wake_touched
        cell.sleeping.exchange(1, std::memory_order_seq_cst);
#if !defined(__SANITIZE_THREAD__)
        std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
        if (!pass()) {
            ++stats_.sleeps;
            lock.unlock();
            futex_wait(cell.doorbell, seen, kCheckInterval);
            lock.lock();
        }
        cell.sleeping.store(0, std::memory_order_relaxed);  // a needless wake-up does no harm
    }

    bool wait_locked(std::unique_lock<std::mutex>& lock, const OpPtr& op, Nanoseconds deadline,
                     const std::function<bool()>& interrupted) {
        ++num_waiting_;
        bool stopped = false;
        while (!op->done && !stopped) {
            if (!driving_) {
                driving_ = true;
                const Drive why = drive(lock, [&] { return op->done; });
                driving_ = false;
                if (why == Drive::stopped) break;
            } else {
                ++num_wanting_;
                if (in_background_) wake_local();
                changed_.wait_for(lock, std::chrono::nanoseconds(kCheckInterval),
                                  [&] { return op->done || !driving_; });
                --num_wanting_;
            }
            if (op->done) break;
            lock.unlock();
            const bool interrupt = interrupted();
            lock.lock();
            stopped = interrupt || now() > deadline;
        }
        --num_waiting_;
        if (!driving_ && num_active_ != 0) {
            if (num_waiting_ != 0) {
                changed_.notify_all();
            } else {
                background_.notify_one();
            }
        }
        return op->done;
    }

    void run_thread() {
        pthread_setname_np(pthread_self(), "dfccl");
        std::unique_lock lock(mutex_);
        while (!closed_) {
            background_.wait(lock, [&] { return closed_ || (num_active_ != 0 && !driving_ && num_waiting_ == 0); });
            if (closed_) break;
            driving_ = in_background_ = true;
            drive(lock, [&] { return closed_ || num_active_ == 0 || num_wanting_ != 0; });
            driving_ = in_background_ = false;
            if (num_waiting_ != 0) changed_.notify_all();
        }
    }

    // ---- Faults ----------------------------------------------------------------------------------------------------

    void check(Nanoseconds t) {
        for (const int p : liveness_.newly_dead()) {
            if (peers_[at(p)].lost == Code::none) lose(p, Code::peer_died);
        }
        for (int p = 0; p < world_size_; ++p) {
            // acquire: what it said before it left is in its ring
            if (p != rank_ && peers_[at(p)].lost == Code::none &&
                arena_->cell(p).presence.load(std::memory_order_acquire) == static_cast<std::uint32_t>(Presence::left)) {
                lose(p, Code::peer_left);
            }
        }
        for (const auto& op : in_flight()) {
            if (t > op->deadline) fail(op, Code::timeout, absence(*op), missing(*op), true);
        }
        wake_touched();
    }

    void lose(int p, Code code) {
        drain(p);
        if (arena_->cell(p).presence.load(std::memory_order_acquire) == static_cast<std::uint32_t>(Presence::left)) {
            code = Code::peer_left;  // it had said goodbye before it ended
        }
        peers_[at(p)].lost = code;
        peers_[at(p)].backlog.clear();
        for (const auto& op : in_flight()) {
            const int member = op->members->index(p);
            if (member >= 0) fail_if_needed(op, member, code);
        }
    }

    // Fails the call if it cannot end without the lost member.
    void fail_if_needed(const OpPtr& op, int member, Code code) {
        const auto& state = op->peers[at(member)];
        const bool by_stage =
            op->staged && !(op->granted && StageLayout::finished(op->block, member).load(std::memory_order_acquire) != 0);
        if (!state.joined || !state.have || !state.sent || by_stage) {
            const int p = op->world_rank(member);
            fail(op, code,
                 "rank " + std::to_string(p) +
                     (code == Code::peer_died ? " died" : " has left (it destroyed or aborted its process group)") +
                     (state.joined ? " in the middle of it" : " without joining it" + instead(*op, p)),
                 {p}, true);
        }
    }

    // `tell`: the members that have joined, or will, get to know.
    void fail(const OpPtr& op, Code code, const std::string& text, std::vector<int> culprits, bool tell) {
        if (op->done) return;
        op->code = code;
        op->error = text;
        op->culprits = std::move(culprits);
        if (tell) {
            for (int m = 0; m < op->n; ++m) {
                if (m != op->me) send_fail(*op, m);
            }
        }
        finish(op);
    }

    void send_fail(const Op& op, int member) {
        const int p = op.world_rank(member);
        if (peers_[at(p)].lost != Code::none) return;
        FailRecord record{};
        record.header.kind = static_cast<std::uint8_t>(RecordKind::fail);
        record.id = op.id;
        // A timeout or an abort here is, over there, a peer that failed; a death or a mismatch is what it is.
        const bool own = op.code == Code::timeout || op.code == Code::aborted || op.code == Code::peer_failed;
        record.code = static_cast<std::uint32_t>(own ? Code::peer_failed : op.code);
        record.culprit = own || op.culprits.empty() ? rank_ : op.culprits.front();
        std::string text = own && op.code != Code::peer_failed
                               ? "rank " + std::to_string(rank_) + " gave up on it: " + op.error
                               : op.error;
        if (text.size() > 1000) text.resize(1000);
        record.text_bytes = static_cast<std::uint32_t>(text.size());
        send_record(p, record, text);
    }

    std::vector<int> missing(const Op& op) const {
        std::vector<int> ranks;
        for (int m = 0; m < op.n; ++m) {
            if (m != op.me && !op.peers[at(m)].joined) ranks.push_back(op.world_rank(m));
        }
        return ranks;
    }

    // Whom the call waits for.
    std::string absence(const Op& op) const {
        std::string text;
        for (const int p : missing(op)) {
            text += (text.empty() ? "rank " : "; rank ") + std::to_string(p) + " has not joined it" + instead(op, p);
        }
        return text.empty() ? "all members have joined it, but some do not go on (stopped?)" : text;
    }

    // What a member has called on the same group that this rank has not.
    std::string instead(const Op& op, int p) const {
        std::string text;
        int count = 0;
        for (const auto& [key, queue] : keys_) {
            const auto found = queue.arrived.find(p);
            if (found == queue.arrived.end()) continue;
            for (const auto& call : found->second) {
                if (call.signature.group != op.signature.group || ++count > 3) continue;
                text += (text.empty() ? "" : ", ") + call.signature.describe();
            }
        }
        if (count > 3) text += " and " + std::to_string(count - 3) + " more";
        return text.empty() ? " and has called nothing else on this group that this rank has not"
                            : ", it has called instead " + text;
    }

    std::shared_ptr<Arena> arena_;
    const int rank_;
    const int world_size_;
    const std::size_t eager_bytes_;
    int spin_limit_ = 0;
    static constexpr Nanoseconds kCheckInterval = 50 * kMillisecond;

    std::mutex mutex_;  // guards everything below but the atomics
    std::condition_variable changed_;     // a call has finished, or the driver has stopped
    std::condition_variable background_;  // the engine's thread may have to drive
    std::condition_variable finished_;    // notices_ has grown
    std::atomic<int> entering_{0};
    std::atomic<bool> has_released_{false};
    bool driving_ = false;
    bool in_background_ = false;  // the engine's thread is the driver
    bool closed_ = false;
    int num_waiting_ = 0;
    int num_wanting_ = 0;  // of those, who do not drive

    std::vector<Peer> peers_;
    Peers liveness_;
    std::unordered_map<std::uint64_t, KeyQueue> keys_;
    std::unordered_map<std::uint64_t, OpPtr> ops_;
    std::uint64_t last_id_ = 0;
    std::size_t num_active_ = 0;

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

    std::vector<std::uint64_t> notices_;
    std::vector<void*> released_;
    Stats stats_;

    int fork_generation_ = 0;
    std::mutex join_mutex_;
    std::unique_ptr<std::thread> thread_;
};

}  // namespace torchext::collectives

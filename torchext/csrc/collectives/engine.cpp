// What the engine offers to its callers; see engine.hpp.
#if defined(__linux__)

#include "engine.hpp"

namespace torchext::collectives {

Engine::Engine(std::shared_ptr<Arena> arena, int rank, Settings settings)
    : arena_(std::move(arena)),
      rank_(rank),
      world_size_(arena_->world_size()),
      eager_bytes_(eager_limit(arena_->ring_bytes(), world_size_)),
      settings_(std::move(settings)),
      max_patience_(50 * settings_.patience),
      peers_(static_cast<std::size_t>(world_size_)),
      pool_(arena_->pool_bytes()),
      touched_(world_size_) {
    for (int p = 0; p < world_size_; ++p) {
        auto& peer = peers_[at(p)];
        peer.out = RingWriter(arena_->ring_control(rank, p), arena_->ring_data(rank, p), arena_->ring_bytes());
        peer.in = RingReader(arena_->ring_control(p, rank), arena_->ring_data(p, rank), arena_->ring_bytes());
    }
    auto& cell = arena_->cell(rank_);
    cell.pid.store(static_cast<std::uint32_t>(getpid()), std::memory_order_relaxed);
    // release: publishes the pid
    cell.presence.store(static_cast<std::uint32_t>(Presence::present), std::memory_order_release);
}

Engine::~Engine() {
    if (forked()) {
        thread_.release();  // the thread does not exist in this process: neither join nor destroy it
        return;
    }
    close("the process group was destroyed");
}

std::vector<int> Engine::meet(Nanoseconds timeout, const std::function<bool()>& interrupted) {
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
    spin_limit_ = arena_->has_core_for_each() ? 2000 : 20;
    fork_generation_ = generation().load(std::memory_order_relaxed);
    thread_ = std::make_unique<std::thread>([this] { run_thread(); });
    return {};
}

OpPtr Engine::issue(const Request& request) {
    Entry entry(*this);
    return issue_locked(request, /*will_wait=*/false);
}

std::pair<OpPtr, Waited> Engine::run(const Request& request, const Caller& caller) {
    Entry entry(*this);
    OpPtr op = issue_locked(request, /*will_wait=*/true);
    if (op->done) return {std::move(op), Waited::done};
    Waited waited = wait_locked(entry.lock, op, kNever, caller, op->signature.kind != OpKind::barrier);
    if (waited == Waited::expired) {
        fail(op, Code::aborted, "interrupted", {}, true);
        wake_touched();
        waited = Waited::done;
    }
    return {std::move(op), waited};
}

Waited Engine::wait(const OpPtr& op, Nanoseconds deadline, const Caller& caller, bool deferrable) {
    Entry entry(*this);
    if (op->done) return Waited::done;
    return wait_locked(entry.lock, op, deadline, caller, deferrable && op->signature.kind != OpKind::barrier);
}

bool Engine::done(const OpPtr& op) {
    Entry entry(*this);
    return op->done;
}

void Engine::cancel(const OpPtr& op, const std::string& text) {
    Entry entry(*this);
    if (!op->done) fail(op, Code::timeout, text + "; " + absence(*op), missing(*op), true);
    wake_touched();
}

void Engine::abort(std::uint64_t group, const std::string& text) {
    Entry entry(*this);
    for (const auto& op : in_flight()) {
        if (group == 0 || op->signature.group == group) fail(op, Code::aborted, text, {}, true);
    }
    wake_touched();
}

void Engine::close(const std::string& text, bool at_exit) {
    if (forked()) return;
    {
        Entry entry(*this);
        parked_ |= at_exit;
        if (!closed_) {
            closed_ = true;
            stir();
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
        // Some of those who wait may just look at signals, which takes the interpreter's lock: while it can be had.
        const Nanoseconds end = now() + kSecond;
        while (parked_ && num_waiting_ != 0 && now() < end) {
            entry.lock.unlock();
            const timespec pause{0, 200'000};
            nanosleep(&pause, nullptr);
            entry.lock.lock();
        }
    }
    std::lock_guard join(join_mutex_);
    if (thread_ != nullptr && thread_->joinable()) thread_->join();
}

bool Engine::watch(const OpPtr& op) {
    Entry entry(*this);
    op->notify = !op->done;
    any_watched_ |= op->notify;
    stir();
    return op->done;
}

std::vector<std::uint64_t> Engine::finished(Nanoseconds timeout) {
    std::unique_lock lock(mutex_);
    listening_ = true;
    finished_.wait_for(lock, std::chrono::nanoseconds(timeout), [&] { return !notices_.empty() || closed_; });
    listening_ = false;
    stir();
    return std::exchange(notices_, {});
}

std::vector<void*> Engine::released() {
    if (!has_released_.load(std::memory_order_relaxed)) return {};
    Entry entry(*this);
    has_released_.store(false, std::memory_order_relaxed);
    return std::exchange(released_, {});
}

std::pair<Stats, std::size_t> Engine::stats() {
    Entry entry(*this);
    return {stats_, num_active_};
}

std::vector<Event> Engine::trace(bool on) {
    Entry entry(*this);
    tracing_ = on;
    return std::exchange(events_, {});
}

bool Engine::closed() {
    Entry entry(*this);
    return closed_;
}

}  // namespace torchext::collectives

#endif

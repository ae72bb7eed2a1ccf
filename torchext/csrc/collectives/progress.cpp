// Staging memory, the run queue, and who drives. See engine.hpp.
#if defined(__linux__)

#include "engine.hpp"

namespace torchext::collectives {

void Engine::start(const OpPtr& op, std::byte* block) {
    op->block = block;
    op->layout = layout_of(*op);
    op->granted = true;
    op->patience = settings_.patience;
    op->context.sent.assign(at(op->n), 0);
    op->context.received.assign(at(op->n), 0);
    op->context.spread_got.assign(at(op->n), 0);
    run_queue_.push_back(op);
}

bool Engine::grant() {
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

void Engine::recover() {
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

void Engine::decline(std::byte* block, int member, const Members& members) {
    // release: the last that this rank does to the block
    StageLayout::finished(block, member).store(1, std::memory_order_release);
    touched_.add(members.rank(0));
}

bool Engine::pass() {
    bool moved = false;
    for (int p = 0; p < world_size_; ++p) {
        if (p != rank_) moved |= drain(p);
    }
    for (int p = 0; p < world_size_; ++p) {
        if (!peers_[at(p)].backlog.empty()) moved |= !flush_backlog(p);
    }
    if (num_active_ != 0) {
        if (!sends_.empty()) moved |= run_sends();
        if (!wanted_.empty()) moved |= grant();
        if (!run_queue_.empty()) moved |= run_queue();
    }
    wake_touched();
    return moved;
}

bool Engine::run_sends() {
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

bool Engine::run_queue() {
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
        bool ran = false;
        const Nanoseconds begin = tracing_ ? now() : 0;
        while (true) {
            const int done = primitives.run();
            ran |= done != 0;
            if (op->stage_done) {
                settle(op);
                moved = true;
                break;
            }
            if (done != 0) {
                stats_.primitives += static_cast<std::uint64_t>(done);
                op->patience = std::clamp(5 * polls, settings_.patience, max_patience_);
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
                    op->patience = settings_.patience;
                }
                break;
            }
            cpu_relax();
        }
        if (tracing_ && (ran || !alone)) note(*op, ran ? "run" : "preempted", begin, now());
        if (!op->done) run_queue_.push_back(op);
    }
    // The oldest is the head: the same one on all ranks that are in the same state.
    head_ = 0;
    for (const auto& op : run_queue_) {
        if (head_ == 0 || op->id < head_) head_ = op->id;
    }
    return moved;
}

void Engine::wake_touched() {
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

void Engine::ring(RankCell& cell) {
    cell.doorbell.fetch_add(1, std::memory_order_relaxed);
    futex_wake_all(cell.doorbell);
}

template <class Stop>
Engine::Drive Engine::drive(std::unique_lock<std::mutex>& lock, Stop&& stop) {
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

void Engine::sleep(std::unique_lock<std::mutex>& lock) {
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

Waited Engine::wait_locked(std::unique_lock<std::mutex>& lock, const OpPtr& op, Nanoseconds deadline,
                           const Caller& caller, bool deferrable) {
    Waiter waiter{op, deferrable, now(), static_cast<std::uint64_t>(pthread_self())};
    stir();
    waiters_.push_back(&waiter);
    ++op->num_waiting;
    ++num_waiting_;
    bool stopped = false;
    const auto over = [&] { return op->done || waiter.deferred; };
    while (!over() && !stopped) {
        if (!driving_) {
            driving_ = true;
            const Drive why = drive(lock, over);
            driving_ = false;
            if (why == Drive::stopped) break;
        } else {
            ++num_wanting_;
            if (in_background_) wake_local();
            changed_.wait_for(lock, std::chrono::nanoseconds(kCheckInterval), [&] { return over() || !driving_; });
            --num_wanting_;
        }
        if (over()) break;
        lock.unlock();
        const bool interrupt = caller.interrupted();
        lock.lock();
        const Nanoseconds t = now();
        stopped = interrupt || t > deadline;
        if (!over() && !stopped && caller.look && t - waiter.since > kBlockedAfter) consider(lock, waiter, caller);
    }
    stir();
    waiters_.erase(std::find(waiters_.begin(), waiters_.end(), &waiter));
    --op->num_waiting;
    --num_waiting_;
    if (!driving_ && busy()) {
        if (num_waiting_ != 0) {
            changed_.notify_all();
        } else {
            background_.notify_one();
        }
    }
    if (parked_) {
        lock.unlock();
        while (true) ::pause();
    }
    return op->done ? Waited::done : waiter.deferred ? Waited::deferred : Waited::expired;
}

void Engine::run_thread() {
    pthread_setname_np(pthread_self(), "dfccl");
    std::unique_lock lock(mutex_);
    while (!closed_) {
        background_.wait(lock, [&] { return closed_ || (!driving_ && num_waiting_ == 0 && busy()); });
        if (closed_) break;
        driving_ = in_background_ = true;
        drive(lock, [&] { return closed_ || num_wanting_ != 0 || !busy(); });
        driving_ = in_background_ = false;
        if (num_waiting_ != 0) changed_.notify_all();
    }
}

}  // namespace torchext::collectives

#endif

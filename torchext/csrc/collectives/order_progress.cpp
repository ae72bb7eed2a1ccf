// How news comes and goes, and who looks for it; see order.hpp.
#if defined(__linux__)

#include "order.hpp"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>

namespace torchext::collectives {

Orderer::Orderer() {
    if (pipe2(doorbell_, O_CLOEXEC | O_NONBLOCK) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
}

Orderer::~Orderer() {
    ::close(doorbell_[0]);
    ::close(doorbell_[1]);
}

void Orderer::add(const OrderGroupPtr& group) {
    std::lock_guard lock(mutex_);
    groups_.push_back(group);
    group->sent.assign(group->ranks.size(), 0);
    group->received.assign(group->ranks.size(), 0);
    group->id = ++last_group_;
    if (group->arena != nullptr) {
        auto& cell = group->arena->cell(group->me);
        cell.sleeping.store(num_sleeping_ != 0, std::memory_order_relaxed);
        spin_limit_ = std::min(spin_limit_, group->arena->has_core_for_each() ? 500 : 20);
    } else {
        spin_limit_ = std::min(spin_limit_, 50);  // a look at a socket is a system call
    }
}

bool Orderer::wait(const OrderedPtr& op, Nanoseconds deadline, const Caller& caller) {
    std::unique_lock lock(mutex_);
    Waiter waiter{op, static_cast<std::uint64_t>(pthread_self())};
    if (op->waited_since == 0) op->waited_since = now();
    waiters_.push_back(&waiter);
    ++activity_;
    const auto parked = [&] { return parked_ && std::this_thread::get_id() != exiting_; };
    const auto stop = [&] { return parked() || !ready_.empty() || op->state == Ordered::State::popped; };
    while (!stop()) {
        drive(lock, spin_limit_, stop);
        if (stop()) break;
        lock.unlock();
        const bool interrupt = caller.interrupted();
        lock.lock();
        if (interrupt || now() > deadline) break;
        if (!stop() && caller.look && now() - op->waited_since > kBlockedAfter) consider(lock, waiter, caller);
    }
    const bool stopped = stop();
    waiters_.erase(std::find(waiters_.begin(), waiters_.end(), &waiter));
    ++activity_;
    if (!published_.empty()) {  // it held for the time of this wait
        publish({});
        wake_peers();
    }
    if (waiters_.empty() && busy()) background_.notify_one();
    if (parked()) {
        lock.unlock();
        while (true) ::pause();
    }
    return stopped;
}

bool Orderer::background() {
    std::unique_lock lock(mutex_);
    const auto news = [&] { return stopping_ || !fallen_.empty() || (waiters_.empty() && !ready_.empty()); };
    while (!news()) {
        background_.wait_for(lock, std::chrono::nanoseconds(kCheckInterval),
                             [&] { return news() || (waiters_.empty() && busy()); });
        if (news() || !waiters_.empty()) continue;
        if (busy()) {
            drive(lock, 0, [&] { return news() || !waiters_.empty(); });  // the cores are for who computes
        } else {
            pass();
            if (now() - checked_ >= kCheckInterval) check();
        }
    }
    return !stopping_;
}

void Orderer::stop_background() {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    background_.notify_all();
    ring_self();
}

void Orderer::park() {
    std::unique_lock lock(mutex_);
    parked_ = true;
    exiting_ = std::this_thread::get_id();
    const Nanoseconds end = now() + kSecond;
    while (!waiters_.empty() && now() < end) {  // some may just look at signals, which takes that lock
        ring_self();
        lock.unlock();
        const timespec pause{0, 200'000};
        nanosleep(&pause, nullptr);
        lock.lock();
    }
}

void Orderer::forget() {
    for (const auto& group : groups_) {
        for (const auto& link : group->links) {
            if (link != nullptr) link->forget();
        }
    }
}

bool Orderer::pass() {
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

bool Orderer::drain(OrderGroup& group, int p) {
    Link& link = *group.links[at(p)];
    bool any = false;
    while (const RecordHeader* record = link.front()) {
        any = true;
        const auto kind = static_cast<OrderRecord>(record->kind);
        group.received[at(p)] += kind != OrderRecord::report && kind != OrderRecord::verdict;
        switch (kind) {
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
            case OrderRecord::report:
                on_report(*reinterpret_cast<const OrderReport*>(record));
                break;
            case OrderRecord::verdict:
                on_verdict(*reinterpret_cast<const OrderVerdict*>(record));
                break;
            case OrderRecord::pad:
                break;
        }
        link.pop();
    }
    if (link.broken() && group.lost[at(p)] == Code::none) lose(group, p, Code::peer_died, true);
    return any;
}

bool Orderer::flush(OrderGroup& group) {
    bool left = false;
    for (std::size_t p = 0; p < group.links.size(); ++p) {
        if (group.links[p] != nullptr && group.links[p]->flush()) left |= group.lost[p] == Code::none;
    }
    sent_ |= left;
    return left;
}

void Orderer::wake_peers() {
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

void Orderer::ring_self() {
    const char byte = 0;
    [[maybe_unused]] const auto written = ::write(doorbell_[1], &byte, 1);  // a full pipe wakes as well
}

template <class Stop>
void Orderer::drive(std::unique_lock<std::mutex>& lock, int spins, const Stop& stop) {
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

void Orderer::sleep(std::unique_lock<std::mutex>& lock) {
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

void Orderer::set_sleeping(std::uint32_t value) {
    for (const auto& group : groups_) {
        if (group->arena != nullptr) group->arena->cell(group->me).sleeping.store(value, std::memory_order_seq_cst);
    }
}

}  // namespace torchext::collectives

#endif

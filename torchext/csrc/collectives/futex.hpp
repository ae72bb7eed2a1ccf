// Waiting on a 32-bit word that several processes share, and the clock that all deadlines use.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace torchext::collectives {

using Nanoseconds = std::int64_t;

inline constexpr Nanoseconds kMillisecond = 1'000'000;
inline constexpr Nanoseconds kSecond = 1'000'000'000;

// CLOCK_MONOTONIC: the same for all processes of a host, and it never jumps.
inline Nanoseconds now() {
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * kSecond + t.tv_nsec;
}

// Of a timeout in seconds; what would not fit, as that of timedelta.max, is some thirty years.
inline Nanoseconds nanoseconds(double seconds) {
    constexpr double kMost = 1e9;
    return static_cast<Nanoseconds>((seconds < kMost ? seconds : kMost) * 1e9);
}

// Returns when woken, when the word is not `expected`, when a signal came or when the time is up; callers check again.
// Without FUTEX_PRIVATE_FLAG, because the word lies in memory shared between processes.
inline void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, Nanoseconds timeout) {
    if (timeout <= 0) return;
    timespec t{};
    t.tv_sec = timeout / kSecond;
    t.tv_nsec = timeout % kSecond;
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, expected, &t, nullptr, 0);
}

inline void futex_wake_all(std::atomic<std::uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free,
              "atomics in shared memory must not depend on a lock of one process");

}  // namespace torchext::collectives

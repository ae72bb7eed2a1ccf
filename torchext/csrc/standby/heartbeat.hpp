// Sends a byte over a connected socket again and again, from a thread that needs no interpreter: a training process that
// computes, compiles or pickles under the GIL for seconds is alive; one that was stopped or whose host is gone is not.
#pragma once

#if defined(__linux__)

#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace torchext::standby {

class Heartbeat {
public:
    // The socket stays the caller's, and open until `stop`.
    Heartbeat(int descriptor, int interval_ms) : process_(getpid()) {
        // Signals are for the program's own threads: they interrupt what those wait for.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        thread_ = std::thread([this, descriptor, interval_ms] {
            std::unique_lock lock(mutex_);
            while (!stopping_) {
                const char beat = 1;
                // A full buffer is no matter: the peer has enough of them to read. A lost peer is noticed elsewhere.
                (void)::send(descriptor, &beat, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
                wake_.wait_for(lock, std::chrono::milliseconds(interval_ms), [this] { return stopping_; });
            }
        });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    Heartbeat(const Heartbeat&) = delete;
    Heartbeat& operator=(const Heartbeat&) = delete;
    ~Heartbeat() { stop(); }

    void stop() {
        if (!thread_.joinable()) return;
        if (getpid() != process_) {  // forked: the thread is the parent's, and so may be the lock
            thread_.detach();
            return;
        }
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_one();
        thread_.join();
    }

private:
    std::mutex mutex_;
    std::condition_variable wake_;
    bool stopping_ = false;  // guarded by mutex_
    const pid_t process_;
    std::thread thread_;  // last: it uses the others
};

}  // namespace torchext::standby

#endif

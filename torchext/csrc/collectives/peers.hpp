// Whether the other ranks' processes live. A pidfd stays with its process, so a reused number never misleads.
#pragma once

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <vector>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace torchext::collectives {

class Peers {
public:
    Peers() = default;
    Peers(const Peers&) = delete;
    Peers& operator=(const Peers&) = delete;
    ~Peers() {
        for (const auto& p : polls_) {
            if (p.fd >= 0) ::close(p.fd);
        }
    }

    // One process for each rank; 0 for this rank itself.
    void watch(const std::vector<int>& pids) {
        for (const int pid : pids) {
            int fd = -1;
            if (pid != 0) {
                fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
                if (fd < 0 && errno != ESRCH) {
                    throw std::system_error(errno, std::generic_category(), "pidfd_open (Linux 5.3 or later)");
                }
            }
            // A process that has gone already: a descriptor that cannot be polled is reported below as well.
            polls_.push_back({fd, POLLIN, 0});
            gone_.push_back(pid != 0 && fd < 0);
        }
    }

    // The ranks whose process has ended since the last call.
    std::vector<int> newly_dead() {
        std::vector<int> dead;
        poll(polls_.data(), polls_.size(), 0);
        for (std::size_t i = 0; i < polls_.size(); ++i) {
            if (!gone_[i] && (polls_[i].fd < 0 || polls_[i].revents == 0)) continue;
            gone_[i] = false;
            if (polls_[i].fd >= 0) ::close(polls_[i].fd);
            polls_[i].fd = -1;  // poll skips it from now on
            polls_[i].revents = 0;
            dead.push_back(static_cast<int>(i));
        }
        return dead;
    }

private:
    std::vector<pollfd> polls_;
    std::vector<char> gone_;  // had ended before it could be watched; reported once
};

}  // namespace torchext::collectives

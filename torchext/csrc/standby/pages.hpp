// Which pages of a mapping were written: userfaultfd in asynchronous write-protect mode with PAGEMAP_SCAN (Linux 6.7).
// The kernel lifts the protection of a page at its first write by itself: the writer takes one fault, waits for nobody.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace torchext::standby {

class PageTracker {
public:
    // Throws std::system_error, naming the call, where the kernel refuses.
    PageTracker(std::uintptr_t address, std::size_t size);
    PageTracker(const PageTracker&) = delete;
    PageTracker& operator=(const PageTracker&) = delete;
    ~PageTracker();

    // Ranges (offset, size in bytes) written since the last call with `rearm`, at first since construction.
    std::vector<std::pair<std::size_t, std::size_t>> scan(bool rearm);

    // Lifts the protection; no scan afterwards. Idempotent.
    void close() noexcept;

private:
    std::uintptr_t address_;
    std::size_t size_;
    int userfaultfd_ = -1;
    int pagemap_ = -1;
};

}  // namespace torchext::standby

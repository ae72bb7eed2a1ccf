#if defined(__linux__)

#include "pages.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace torchext::standby {
namespace {

// Of linux/userfaultfd.h and linux/fs.h; written out, as the headers at hand may be older than the kernel.
struct UffdApi {
    std::uint64_t api, features, ioctls;
};
struct UffdRegister {
    std::uint64_t start, length, mode, ioctls;
};
struct UffdWriteProtect {
    std::uint64_t start, length, mode;
};
struct PageRegion {
    std::uint64_t start, end, categories;
};
struct ScanArguments {
    std::uint64_t size, flags, start, end, walk_end, regions, num_regions, max_pages;
    std::uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};

constexpr std::uint64_t kApiVersion = 0xAA;
constexpr unsigned long kApi = _IOWR(0xAA, 0x3F, UffdApi);
constexpr unsigned long kRegister = _IOWR(0xAA, 0x00, UffdRegister);
constexpr unsigned long kWriteProtect = _IOWR(0xAA, 0x06, UffdWriteProtect);
constexpr unsigned long kNewUserfaultfd = _IO(0xAA, 0x00);
constexpr unsigned long kScan = _IOWR('f', 16, ScanArguments);
constexpr std::uint64_t kModeWriteProtect = 1U << 1;
constexpr std::uint64_t kArm = 1;
constexpr std::uint64_t kFeatures = (1U << 15) | (1U << 13) | (1U << 12);  // WP_ASYNC, unpopulated, hugetlb and shared
constexpr int kUserModeOnly = 1;
constexpr std::uint64_t kWritten = 1U << 1;
constexpr std::uint64_t kProtectMatching = 1U << 0;
constexpr std::uint64_t kCheckAsync = 1U << 1;

[[noreturn]] void refuse(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

int open_userfaultfd() {
    // With all rights, writes by the kernel on the program's behalf (read() into a tensor) are tracked as well.
    for (const int mode : {0, kUserModeOnly}) {
        const long fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | mode);
        if (fd >= 0) return static_cast<int>(fd);
    }
    const int error = errno;
    const int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    if (device >= 0) {
        const int fd = ioctl(device, kNewUserfaultfd, O_CLOEXEC | O_NONBLOCK);
        close(device);
        if (fd >= 0) return fd;
    }
    errno = error;
    refuse("userfaultfd (see vm.unprivileged_userfaultfd)");
}

}  // namespace

PageTracker::PageTracker(std::uintptr_t address, std::size_t size) : address_(address), size_(size) {
    try {
        userfaultfd_ = open_userfaultfd();
        UffdApi api{kApiVersion, kFeatures, 0};
        if (ioctl(userfaultfd_, kApi, &api) != 0) refuse("asynchronous write-protection (Linux 6.7 or later)");
        UffdRegister range{address, size, kModeWriteProtect, 0};
        if (ioctl(userfaultfd_, kRegister, &range) != 0) refuse("userfaultfd: registering the memory");
        UffdWriteProtect arm{address, size, kArm};
        if (ioctl(userfaultfd_, kWriteProtect, &arm) != 0) refuse("userfaultfd: write-protecting the memory");
        pagemap_ = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
        if (pagemap_ < 0) refuse("/proc/self/pagemap");
        scan(false);  // so that a kernel without PAGEMAP_SCAN is refused here
    } catch (...) {
        close();
        throw;
    }
}

PageTracker::~PageTracker() { close(); }

void PageTracker::close() noexcept {
    if (userfaultfd_ >= 0) ::close(std::exchange(userfaultfd_, -1));  // the protection goes with it
    if (pagemap_ >= 0) ::close(std::exchange(pagemap_, -1));
}

std::vector<std::pair<std::size_t, std::size_t>> PageTracker::scan(bool rearm) {
    std::vector<std::pair<std::size_t, std::size_t>> written;
    std::vector<PageRegion> regions(1024);
    if (pagemap_ < 0) throw std::system_error(EBADF, std::generic_category(), "a page tracker that was closed");
    std::uint64_t at = address_;
    const std::uint64_t end = address_ + size_;
    while (at < end) {
        ScanArguments arguments{};
        arguments.size = sizeof(arguments);
        arguments.flags = rearm ? kProtectMatching | kCheckAsync : 0;
        arguments.start = at;
        arguments.end = end;
        arguments.regions = reinterpret_cast<std::uint64_t>(regions.data());
        arguments.num_regions = regions.size();
        arguments.category_mask = kWritten;
        arguments.return_mask = kWritten;
        const int found = ioctl(pagemap_, kScan, &arguments);
        if (found < 0) {
            if (errno == EINTR) continue;
            refuse("PAGEMAP_SCAN (Linux 6.7 or later)");
        }
        for (int i = 0; i < found; ++i) {
            const auto& region = regions[static_cast<std::size_t>(i)];
            written.emplace_back(region.start - address_, region.end - region.start);
        }
        at = arguments.walk_end;
    }
    return written;
}

}  // namespace torchext::standby

#endif

// How often a predicate is evaluated per second in the native core: once for each ack that comes in (what the node
// does), and from all its counters anew. In time of the processor, which others do not take away. Built and run by replication.py.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
#include <vector>

#include "counters.hpp"

using torchext::replication::Counters;

int main(int argc, char** argv) {
    const int n = argc > 1 ? std::atoi(argv[1]) : 8;
    Counters counters;
    Counters::Code code;
    for (int i = 0; i < n; ++i) code.push_back(static_cast<std::int64_t>(counters.add_counter()));
    code.push_back(-n);
    code.push_back(n / 2 + 1);
    const std::size_t predicate = counters.add(code);
    std::mt19937_64 random(1);
    constexpr int kAcks = 1 << 22;
    // Each site acknowledges in its own order of time: its next message, or a few at once.
    std::vector<std::uint32_t> site(kAcks);
    std::vector<std::uint64_t> seq(kAcks), last(static_cast<std::size_t>(n), 0);
    for (int i = 0; i < kAcks; ++i) {
        site[i] = static_cast<std::uint32_t>(random() % n);
        seq[i] = last[site[i]] += 1 + random() % 3;
    }
    std::uint64_t moves = 0;
    const std::clock_t begin = std::clock();
    for (int i = 0; i < kAcks; ++i) counters.raise(site[i], seq[i], [&](std::size_t) { ++moves; });
    const std::clock_t middle = std::clock();
    std::uint64_t sum = 0;
    for (int i = 0; i < kAcks; ++i) sum += counters.evaluate(predicate);
    const std::clock_t end = std::clock();
    const auto rate = [](std::clock_t from, std::clock_t to) {
        return static_cast<double>(kAcks) * CLOCKS_PER_SEC / static_cast<double>(to - from) / 1e6;
    };
    std::printf("%.2f %.2f %.3f\n", rate(begin, middle), rate(middle, end),
                static_cast<double>(moves) / kAcks + (sum == 1));
}

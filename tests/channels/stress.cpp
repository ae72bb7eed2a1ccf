// The queue and the weights under a sanitizer: peers are threads of one process here, so that it sees both ends.
//
//   g++ -std=c++20 -O1 -g -fsanitize=thread -pthread -o stress tests/channels/stress.cpp
//   setarch -R ./stress 4 2 2000
//
// (in memory that is not laid out at random, or there is no room for a channel's address space beside the sanitizer's), or
// with -fsanitize=address,undefined. Arguments: senders, receivers, messages of each sender. Ends with status 0 if each
// message arrived once, whole, and in its sender's order for each receiver. A slow test does the first.
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "../../torchext/csrc/channels/latest.hpp"

using namespace torchext::channels;

namespace {

constexpr std::size_t kWords = 300;
constexpr std::uint32_t kRows = 4;
const std::string kHeader = "header";

void fail(const char* what) {
    std::fprintf(stderr, "%s\n", what);
    std::abort();
}

void fill(std::byte* at, std::uint64_t value) {
    auto* words = reinterpret_cast<std::uint64_t*>(at);
    for (std::size_t i = 0; i < kWords; ++i) words[i] = value;
}

std::uint64_t check(const std::byte* at) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(at);
    for (std::size_t i = 1; i < kWords; ++i) {
        if (words[i] != words[0]) fail("a torn message");
    }
    return words[0];
}

std::byte* row_data(Queue& queue, std::uint32_t slab, std::uint32_t row) {
    return queue.data(slab) + Queue::header_offset(kRows) + kLine + row * kWords * 8;
}

void send(Queue& queue, std::uint32_t sender, std::uint64_t count, bool batched) {
    const auto peer = queue.join("sender", Role::sender);
    Sleeper sleeper;
    std::mt19937 random(sender);
    const auto deadline = now() + 300 * kSecond;
    for (std::uint64_t i = 0; i < count;) {
        if (!batched && i % 2 == 0) {
            const auto write = [&](std::uint32_t slab) { fill(queue.data(slab) + kLine, sender * 1'000'000 + i); };
            if (queue.send(peer, kLine + kWords * 8, 0, 0, deadline, sleeper, 0, write) != Status::ok) fail("send");
            ++i;
            continue;
        }
        Ticket ticket;
        const auto status = batched ? queue.begin_row(peer, kHeader, kRows * kWords * 8, deadline, sleeper, 0, ticket)
                                    : queue.begin(peer, kLine + kWords * 8, deadline, sleeper, 0, ticket);
        if (status != Status::ok) fail("begin");
        fill(batched ? row_data(queue, ticket.slab, ticket.row) : queue.data(ticket.slab) + kLine, sender * 1'000'000 + i);
        if (random() % 8 == 0) {
            queue.abandon(ticket);
            continue;
        }
        const auto sent = batched ? queue.commit_row(ticket, 0) : queue.commit(peer, ticket, 0, 0, deadline, sleeper, 0);
        if (sent != Status::ok) fail("commit");
        ++i;
    }
    queue.leave(peer);
}

void receive(Queue& queue, std::vector<std::uint64_t>& got) {
    const auto peer = queue.join("receiver", Role::receiver);
    Sleeper sleeper;
    Batch batch;
    Status status;
    while ((status = queue.receive(peer, now() + 300 * kSecond, sleeper, 0, batch)) == Status::ok) {
        if (batch.rows == 0) {
            got.push_back(check(queue.data(batch.slab) + kLine));
        } else {
            for (std::uint32_t r = 0; r < queue.slab(batch.slab).given; ++r) {
                if (queue.rows(batch.slab)[r].state.load(std::memory_order_relaxed) == 2) {
                    got.push_back(check(row_data(queue, batch.slab, r)));
                }
            }
        }
        queue.release(batch.slab);
    }
    if (status != Status::closed) fail("receive");
    queue.leave(peer);
}

void run_queue(unsigned senders, unsigned receivers, std::uint64_t count, bool batched) {
    auto queue = Queue::create(4, 0, Policy::block, senders, false, 1);
    queue->set_batch_rows(batched ? kRows : 0);
    std::vector<std::thread> threads;
    std::vector<std::vector<std::uint64_t>> got(receivers);
    for (auto& g : got) threads.emplace_back([&queue, &g] { receive(*queue, g); });
    for (unsigned s = 0; s < senders; ++s) threads.emplace_back([&queue, s, count, batched] { send(*queue, s, count, batched); });
    for (auto& thread : threads) thread.join();
    std::vector<std::uint64_t> all;
    for (const auto& g : got) {
        std::vector<std::uint64_t> next(senders, 0);
        for (const auto value : g) {
            if (value % 1'000'000 < next[value / 1'000'000]) fail("out of order");
            next[value / 1'000'000] = value % 1'000'000 + 1;
            all.push_back(value);
        }
    }
    std::sort(all.begin(), all.end());
    if (all.size() != senders * count || std::adjacent_find(all.begin(), all.end()) != all.end()) fail("lost or repeated");
    if (queue->depth().reading != 0 || queue->depth().messages != 0) fail("left behind");
    std::printf("%s: %zu messages\n", batched ? "batches" : "messages", all.size());
}

void run_latest(unsigned readers, std::uint64_t count) {
    auto latest = Latest::create(kWords * 8, "meta", 1);
    std::vector<std::thread> threads;
    for (unsigned r = 0; r < readers; ++r) {
        threads.emplace_back([&latest, count] {
            const auto peer = latest->join("reader", Role::sender);
            Sleeper sleeper;
            for (std::uint64_t seen = 0; seen < count;) {
                if (latest->wait(seen, now() + 300 * kSecond, sleeper, 0) != Status::ok) fail("wait");
                const auto [version, slab] = latest->pin(peer);
                if (version <= seen || check(latest->data(slab)) != version) fail("an old or torn version");
                latest->unpin(peer);
                seen = version;
            }
            latest->leave(peer);
        });
    }
    const auto peer = latest->join("publisher", Role::creator);
    for (std::uint64_t version = 1; version <= count; ++version) {
        const auto slab = latest->begin(peer);
        fill(latest->data(slab), version);
        if (latest->commit(slab) != version) fail("version");
    }
    for (auto& thread : threads) thread.join();
    std::printf("weights: %llu versions\n", static_cast<unsigned long long>(count));
}

}  // namespace

int main(int argc, char** argv) {
    const auto senders = static_cast<unsigned>(argc > 1 ? std::atoi(argv[1]) : 4);
    const auto receivers = static_cast<unsigned>(argc > 2 ? std::atoi(argv[2]) : 2);
    const auto count = static_cast<std::uint64_t>(argc > 3 ? std::atoi(argv[3]) : 2000);
    for (const bool batched : {false, true}) run_queue(senders, receivers, count, batched);
    run_latest(receivers, count);
}

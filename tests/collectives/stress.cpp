// The engine under a sanitizer: ranks are threads of one process here, so that it sees both ends of every exchange.
// Arguments: ranks, programs. Ends with status 0 if all values are right. sanitize.py builds and runs it.
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "../../torchext/csrc/collectives/engine.hpp"

using namespace torchext::collectives;

namespace {

// Between two ranks the third is the largest that goes through a ring, which soon is full of those.
constexpr std::size_t kRingBytes = (64 << 10) + 8192;
constexpr std::size_t kSizes[] = {1, 33, 4096, 5000, 200'000};

struct Step {
    OpKind kind;
    std::size_t n;
    int root;
};

struct Running {
    Step step;
    OpPtr op;
    std::vector<std::int64_t> in, out;
};

std::int64_t value(int rank, std::size_t number, std::size_t i) {
    return static_cast<std::int64_t>(1000 * static_cast<std::size_t>(rank + 1) + 7 * number + i % 13);
}

template <class T>
Span span(std::vector<T>& v) {
    return {reinterpret_cast<std::byte*>(v.data()), v.size() * sizeof(T)};
}

void check(const Running& r, std::size_t number, int rank, int world) {
    if (r.op->code != Code::none) {
        std::fprintf(stderr, "rank %d: %s\n", rank, r.op->error.c_str());
        std::abort();
    }
    for (std::size_t i = 0; i < r.out.size(); ++i) {
        std::int64_t want = 0;
        if (r.step.kind == OpKind::all_reduce) {
            for (int p = 0; p < world; ++p) want += value(p, number, i);
        } else if (r.step.kind == OpKind::broadcast) {
            want = value(r.step.root, number, i);
        } else {  // all_gather
            want = value(static_cast<int>(i / r.step.n), number, i % r.step.n);
        }
        if (r.out[i] != want) {
            std::fprintf(stderr, "rank %d, step %zu: wrong value\n", rank, number);
            std::abort();
        }
    }
}

void run_rank(std::shared_ptr<Arena> arena, int rank, int world, int programs) {
    Engine engine(std::move(arena), rank, Settings{80, /*defer=*/true, false, {}});
    const auto never = [] { return false; };
    Caller caller;
    caller.interrupted = never;
    if (!engine.meet(30 * kSecond, never).empty()) std::abort();
    std::vector<int> ranks(static_cast<std::size_t>(world));
    std::iota(ranks.begin(), ranks.end(), 0);
    const auto members = std::make_shared<Members>(ranks, world, rank);
    for (int program = 0; program < programs; ++program) {
        std::mt19937 shared(static_cast<unsigned>(program)), own(static_cast<unsigned>(program * 64 + rank));
        std::vector<Step> steps;
        for (std::size_t i = 0; i < 8; ++i) {
            constexpr OpKind kinds[] = {OpKind::all_reduce, OpKind::broadcast, OpKind::all_gather, OpKind::barrier};
            const OpKind kind = kinds[shared() % std::size(kinds)];
            const std::size_t size = kSizes[shared() % std::size(kSizes)];
            steps.push_back({kind, size, static_cast<int>(shared() % static_cast<unsigned>(world))});
        }
        std::vector<std::size_t> order(steps.size());
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), own);
        std::vector<Running> running(steps.size());
        for (const std::size_t number : order) {
            Running& r = running[number];
            r.step = steps[number];
            const bool root = rank == r.step.root;
            if (r.step.kind != OpKind::barrier) {
                r.in.resize(r.step.n);
                for (std::size_t i = 0; i < r.in.size(); ++i) r.in[i] = value(rank, number, i);
                r.out.resize(r.step.n * (r.step.kind == OpKind::all_gather ? static_cast<std::size_t>(world) : 1));
                if (r.step.kind == OpKind::broadcast && root) r.out = r.in;
            }
            Request request;
            request.signature.kind = r.step.kind;
            request.signature.dtype = static_cast<std::uint8_t>(DType::i64);
            request.signature.group = 1;
            request.signature.tag = std::to_string(number);
            if (r.step.kind == OpKind::all_reduce) request.signature.reduce_op = ReduceOp::sum;
            if (r.step.kind == OpKind::broadcast) request.signature.root = r.step.root;
            request.members = members;
            if (r.step.kind != OpKind::barrier && (r.step.kind != OpKind::broadcast || root)) request.in = {span(r.in)};
            if (r.step.kind != OpKind::barrier && (r.step.kind != OpKind::broadcast || !root)) request.out = {span(r.out)};
            request.item_bytes = sizeof(std::int64_t);
            request.timeout = 60 * kSecond;
            r.op = engine.issue(request);
        }
        // Two threads wait, so that they contend for driving.
        auto wait = [&](std::size_t from) {
            for (std::size_t i = from; i < running.size(); i += 2) {
                engine.wait(running[i].op, now() + 60 * kSecond, caller, false);
                check(running[i], i, rank, world);
            }
        };
        std::thread other(wait, 1);
        wait(0);
        other.join();
    }
    // Each rank begins with its right neighbour: a circle, which is found and resolved.
    caller.look = [](auto...) { return Caller::Sight{"here", true}; };
    for (int round = 0; round < 3; ++round) {
        std::vector<std::int64_t> values(2, rank + 1);
        std::vector<OpPtr> ops;
        for (const int side : {0, 1}) {
            const int left = side == 0 ? rank : (rank + world - 1) % world;
            Request request;
            request.signature.kind = OpKind::all_reduce;
            request.signature.reduce_op = ReduceOp::sum;
            request.signature.dtype = static_cast<std::uint8_t>(DType::i64);
            request.signature.group = request.group_uid = 10 + static_cast<std::uint64_t>(left);
            request.members = std::make_shared<Members>(std::vector<int>{left, (left + 1) % world}, world, rank);
            auto* value = reinterpret_cast<std::byte*>(&values[static_cast<std::size_t>(side)]);
            request.in = request.out = {{value, sizeof(std::int64_t)}};
            request.item_bytes = sizeof(std::int64_t);
            request.timeout = 60 * kSecond;
            ops.push_back(engine.run(request, caller).first);
        }
        for (const int side : {0, 1}) {
            if (engine.wait(ops[static_cast<std::size_t>(side)], now() + 60 * kSecond, caller, false) != Waited::done) std::abort();
            const int left = side == 0 ? rank : (rank + world - 1) % world;
            if (values[static_cast<std::size_t>(side)] != left + 1 + (left + 1) % world + 1) std::abort();
        }
    }
    const auto stats = engine.stats().first;
    std::printf("rank %d: %llu calls, %llu preemptions, %llu deadlocks\n", rank,
                static_cast<unsigned long long>(stats.completed), static_cast<unsigned long long>(stats.preemptions),
                static_cast<unsigned long long>(stats.deadlocks));
}

// A writer that finds no room says so, and whoever makes room hears of it, once.
void check_room(const Arena& arena) {
    RingWriter out(arena.ring_control(0, 1), arena.ring_data(0, 1), arena.ring_bytes());
    RingReader in(arena.ring_control(0, 1), arena.ring_data(0, 1), arena.ring_bytes());
    constexpr std::size_t kRecord = 4096;
    while (std::byte* room = out.reserve(kRecord)) {
        new (room) RecordHeader{kRecord, static_cast<std::uint8_t>(RecordKind::data), {}};
        out.publish();
        if (in.room_wanted()) std::abort();
    }
    if (in.front() == nullptr) std::abort();
    in.pop(kRecord);
    if (!in.room_wanted() || in.room_wanted() || out.reserve(kRecord) == nullptr) std::abort();
}

}  // namespace

int main(int argc, char** argv) {
    const int world = argc > 1 ? std::atoi(argv[1]) : 3;
    const int programs = argc > 2 ? std::atoi(argv[2]) : 100;
    check_room(*Arena::create(2, kRingBytes, 16 << 20, 128 << 10, 1));
    auto arena = Arena::create(world, kRingBytes, 16 << 20, 128 << 10, 1);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world; ++rank) threads.emplace_back(run_rank, arena, rank, world, programs);
    for (auto& thread : threads) thread.join();
}

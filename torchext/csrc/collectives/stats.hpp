// What the engine has done, for pg.stats(). Guarded by the engine's mutex.
#pragma once

#include <cstdint>

namespace torchext::collectives {

struct Stats {
    std::uint64_t issued = 0;            // collectives, point-to-point calls included
    std::uint64_t completed = 0;
    std::uint64_t failed = 0;
    std::uint64_t staged = 0;            // completed through staging memory; the others went through the rings
    std::uint64_t primitives = 0;        // chunks sent, received, reduced or copied
    std::uint64_t spins = 0;             // polls by which nothing could go on
    std::uint64_t preemptions = 0;       // collectives left with their context saved, for lack of a peer's progress
    std::uint64_t context_switches = 0;  // turns to another collective than the one before
    std::uint64_t sleeps = 0;            // waits on the doorbell
    std::uint64_t wakes = 0;             // doorbells rung for others
    std::uint64_t grants_deferred = 0;   // that had to wait for staging memory
    std::uint64_t deadlocks = 0;         // in which this rank was found
    std::uint64_t deferred = 0;          // waits that were put off to the first use, to resolve one
    std::uint64_t max_queue_depth = 0;   // most collectives in flight at once
};

}  // namespace torchext::collectives

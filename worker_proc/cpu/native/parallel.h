// The threads of a worker that share out the tasks of one operation.
//
// One pool per process. The calling thread takes part; helpers spin for some tens of microseconds between operations,
// then sleep. Tasks are handed out one by one, and an operation waits only for threads that have begun a task: a helper
// whose core was taken by another process costs nothing but its help. So tasks should be short, 20 to 200 us.
#pragma once

#include <cstdint>
#include <type_traits>

namespace rhizome {

using TaskFunction = void (*)(void* context, int64_t task, int thread);

// Threads of the pool, the caller included; 1 while the caller works alone (`rhizome_alone`).
int num_threads();

// Calls function(context, task, thread) once for every task in 0 .. num_tasks - 1, handed out in ascending order;
// `thread` in 0 .. num_threads() - 1 is never in two tasks at once. Returns when all are done. All writes made before
// are seen by the tasks, and theirs by the caller afterwards. From inside a task, or while another thread is in the
// pool, it runs the tasks one after another as thread 0 of the caller's own: never with per-thread state then.
void run_tasks(int64_t num_tasks, void* context, TaskFunction function);

// parallel_for(n, [&](int64_t task, int thread) { ... })
template <class Function>
inline void parallel_for(int64_t num_tasks, Function&& function) {
  using Plain = std::remove_reference_t<Function>;
  run_tasks(num_tasks, const_cast<void*>(static_cast<const void*>(&function)),
            [](void* context, int64_t task, int thread) { (*static_cast<Plain*>(context))(task, thread); });
}

}  // namespace rhizome

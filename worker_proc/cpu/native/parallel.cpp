#include "parallel.h"

#include <pthread.h>
#include <time.h>

#include <atomic>
#include <cstdlib>

#include "abi.h"

namespace rhizome {
namespace {

constexpr int kMaxThreads = 256;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// Spins until `word` is not `value` any more, at most for `spin_ns`, then sleeps.
void wait_while(const std::atomic<uint32_t>& word, uint32_t value, int64_t spin_ns) {
  const int64_t deadline = now_ns() + spin_ns;
  do {
    for (int i = 0; i < 32; ++i) {
      if (word.load(std::memory_order_acquire) != value) return;
      pause();
    }
  } while (now_ns() < deadline);
  while (word.load(std::memory_order_acquire) == value) word.wait(value, std::memory_order_acquire);
}

struct Pool {
  // The operation in progress; written only while the gate is closed and nobody is inside.
  void* context = nullptr;
  TaskFunction function = nullptr;
  int64_t num_tasks = 0;
  alignas(64) std::atomic<int64_t> next{0};
  // Operation number times 2 + 1 while it is open to helpers, times 2 when it is closed.
  alignas(64) std::atomic<uint32_t> gate{0};
  // Helpers that are inside. A helper enters by raising it and then looking at the gate once more.
  alignas(64) std::atomic<uint32_t> inside{0};
  alignas(64) std::atomic<bool> busy{false};
  std::atomic<bool> stopping{false};
  int64_t spin_ns = 50'000;
  int threads = 1;
  std::atomic<bool> alone{false};  // the caller does all tasks itself, and wakes nobody
  pthread_t helpers[kMaxThreads];
};

Pool pool;
thread_local bool in_task = false;

void take_tasks(int thread) {
  in_task = true;
  for (;;) {
    const int64_t task = pool.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= pool.num_tasks) break;
    pool.function(pool.context, task, thread);
  }
  in_task = false;
}

void* helper_main(void* argument) {
  const int thread = static_cast<int>(reinterpret_cast<intptr_t>(argument));
  uint32_t seen = pool.gate.load(std::memory_order_acquire);
  for (;;) {
    const uint32_t gate = pool.gate.load(std::memory_order_acquire);
    if (pool.stopping.load(std::memory_order_acquire)) break;  // after the gate, which is moved after it is set
    if (gate == seen || gate % 2 == 0) {
      wait_while(pool.gate, gate, pool.spin_ns);
      continue;
    }
    seen = gate;
    // Both sides store, then load: either the caller sees this helper inside, or the helper sees the gate closed.
    pool.inside.fetch_add(1, std::memory_order_seq_cst);
    if (pool.gate.load(std::memory_order_seq_cst) == gate) take_tasks(thread);
    if (pool.inside.fetch_sub(1, std::memory_order_acq_rel) == 1) pool.inside.notify_one();
  }
  return nullptr;
}

void open_gate() {
  pool.gate.fetch_add(1, std::memory_order_seq_cst);
  pool.gate.notify_all();  // no system call when nobody sleeps
}

void stop_helpers() {
  pool.stopping.store(true, std::memory_order_release);
  pool.gate.fetch_add(2, std::memory_order_seq_cst);
  pool.gate.notify_all();
  for (int i = 1; i < pool.threads; ++i) pthread_join(pool.helpers[i], nullptr);
  pool.threads = 1;
  pool.stopping.store(false, std::memory_order_release);
}

}  // namespace

int num_threads() { return pool.alone.load(std::memory_order_relaxed) ? 1 : pool.threads; }

void run_tasks(int64_t num_tasks, void* context, TaskFunction function) {
  if (num_tasks <= 0) return;
  if (num_tasks == 1 || num_threads() == 1 || in_task || pool.busy.exchange(true, std::memory_order_acquire)) {
    for (int64_t task = 0; task < num_tasks; ++task) function(context, task, 0);
    return;
  }
  pool.context = context;
  pool.function = function;
  pool.num_tasks = num_tasks;
  pool.next.store(0, std::memory_order_relaxed);
  open_gate();
  take_tasks(0);
  pool.gate.fetch_add(1, std::memory_order_seq_cst);  // closed: who has not come yet is not waited for
  for (uint32_t count; (count = pool.inside.load(std::memory_order_seq_cst)) != 0;)
    wait_while(pool.inside, count, pool.spin_ns);
  pool.busy.store(false, std::memory_order_release);
}

}  // namespace rhizome

// Use `threads` threads from now on, the caller's included. Helpers spin for `spin_ns` before they sleep. Returns the number
// of threads there are.
RHIZOME_EXPORT int rhizome_set_threads(int threads, int64_t spin_ns) {
  using namespace rhizome;
  if (threads < 1) threads = 1;
  if (threads > kMaxThreads) threads = kMaxThreads;
  if (pool.busy.exchange(true, std::memory_order_acquire)) return pool.threads;
  stop_helpers();
  pool.alone = false;
  pool.spin_ns = spin_ns;
  for (int i = 1; i < threads; ++i) {
    if (pthread_create(&pool.helpers[i], nullptr, helper_main, reinterpret_cast<void*>(intptr_t{i})) != 0) break;
    pool.threads = i + 1;
  }
  pool.busy.store(false, std::memory_order_release);
  return pool.threads;
}

// Whether the caller does the tasks of the next operations alone, until it says otherwise. Not for use during one.
RHIZOME_EXPORT void rhizome_alone(int alone) { rhizome::pool.alone = alone != 0; }

// For tests of the pool: adds task + 1 of every task into sums[thread] of each thread.
RHIZOME_EXPORT void rhizome_test_tasks(int64_t num_tasks, int64_t* sums) {
  rhizome::parallel_for(num_tasks, [&](int64_t task, int thread) { sums[thread] += task + 1; });
}

// Shares the work of a layer's attention out over threads and puts the partial results together.
#include "attention.h"

#include <cmath>
#include <vector>

#include "attention_amx.h"
#include "attention_dots.h"
#include "attention_kernel.h"
#include "attention_plan.h"
#include "attention_vector.h"
#include "kv_int8.h"
#include "parallel.h"

namespace rhizome {
namespace {

constexpr int kMaxQueries = 1024;  // of one task: bounds what its unfinished results take
constexpr int kMinQueries = 256;   // fewer do not pay for packing K and V

// Memory of one thread: the kernel's, and the unfinished results of one task.
template <class Kernel>
struct Sizes {
  int v_stride;
  int64_t kernel, queries, tile, partial;  // bytes; a tile has its queries and its state

  explicit Sizes(const AttentionBatch& batch)
      : v_stride(Kernel::v_stride(batch)), kernel((Kernel::scratch_bytes(batch) + 63) / 64 * 64),
        queries((Kernel::query_bytes(batch) + 63) / 64 * 64), tile(queries + int64_t{4} * kTile * (v_stride + 2)),
        partial(int64_t{4} * batch.num_heads * (v_stride + 2)) {}

  int64_t thread() const { return kernel + tile * (kMaxQueries / kTile + 1); }
};

// One layer of one step.
template <class Kernel, class Element>
class Attention {
 public:
  Attention(const AttentionBatch& batch, const AttentionLayer& layer)
      : batch_(batch), layer_(layer), sizes_(batch), scores_(layer.scale, layer.softcap),
        group_(batch.num_heads / batch.num_kv_heads), v_stride_(sizes_.v_stride) {
    // With a window, blocks are not seen whole, so that a plan does not fit.
    plan_ = layer.window > 0 ? nullptr : reinterpret_cast<const Plan*>(batch.plan);
    partials_ = static_cast<char*>(batch.workspace) + num_threads() * sizes_.thread();
  }

  void run() {
    if (plan_ != nullptr && plan_->num_runs > 0) {
      parallel_for(int64_t{plan_->num_runs} * batch_.num_kv_heads, [&](int64_t task, int thread) {
        run_block(plan_->runs()[task / batch_.num_kv_heads], static_cast<int>(task % batch_.num_kv_heads), thread);
      });
    }
    list_tasks();
    parallel_for(static_cast<int64_t>(tasks_.size()), [&](int64_t task, int thread) {
      if (num_queries(tasks_[task].row) == 1)
        run_decode(tasks_[task], thread);
      else
        run_prefill(tasks_[task], thread);
    });
  }

 private:
  // Queries [first, first + count) of a row and KV head: query i is head i % group of token i / group. For a row with
  // one token: `count` KV heads from `kv_head` on.
  struct Task {
    int row, kv_head, first, count;
  };

  int num_queries(int row) const { return batch_.q_starts[row + 1] - batch_.q_starts[row]; }

  // The longest tasks first: prefills, last queries first, as they see the most.
  void list_tasks() {
    int64_t all = 0;
    for (int row = 0; row < batch_.num_rows; ++row)
      if (num_queries(row) > 1) all += int64_t{num_queries(row)} * batch_.num_heads;
    const int64_t even = all / (4 * num_threads());
    const int step = static_cast<int>(std::clamp<int64_t>(even / kTile * kTile, kMinQueries, kMaxQueries));
    tasks_.reserve(batch_.num_rows * batch_.num_kv_heads + all / step);
    for (int row = 0; row < batch_.num_rows; ++row) {
      if (num_queries(row) <= 1) continue;
      const int count = num_queries(row) * group_;
      for (int first = (count - 1) / step * step; first >= 0; first -= step)
        for (int head = 0; head < batch_.num_kv_heads; ++head)
          tasks_.push_back({row, head, first, std::min(step, count - first)});
    }
    // Rows that decode: whole ones, and in the end smaller tasks, so that threads are done at the same time.
    const int heads = std::clamp(batch_.num_rows * batch_.num_kv_heads / (8 * num_threads()), 1, batch_.num_kv_heads);
    const int first_small = batch_.num_rows - 2 * num_threads();
    for (int row = 0; row < batch_.num_rows; ++row) {
      if (num_queries(row) != 1) continue;
      const int step = row < first_small ? heads : std::min(heads, (batch_.num_kv_heads + 3) / 4);
      for (int head = 0; head < batch_.num_kv_heads; head += step)
        tasks_.push_back({row, head, 0, std::min(step, batch_.num_kv_heads - head)});
    }
  }

  KeySource source(int row, int kv_head) const {
    const int64_t bytes = batch_.kv_int8 ? 1 : sizeof(Element);
    const int64_t first_scale = int64_t{kv_head} * batch_.page_size;
    return {static_cast<const char*>(layer_.k_pages) + kv_head * batch_.k_head_stride * bytes,
            static_cast<const char*>(layer_.v_pages) + kv_head * batch_.v_head_stride * bytes,
            batch_.k_page_stride * bytes,
            batch_.k_token_stride * bytes,
            batch_.v_page_stride * bytes,
            batch_.v_token_stride * bytes,
            batch_.page_table + row * batch_.table_stride,
            batch_.page_size,
            batch_.kv_int8 ? layer_.k_scales + first_scale : nullptr,
            batch_.kv_int8 ? layer_.v_scales + first_scale : nullptr,
            int64_t{batch_.num_kv_heads} * batch_.page_size};
  }

  // Adds the queries [first, first + count) of a row and KV head.
  void add_queries(Tile& tile, int row, int kv_head, int first, int count) const {
    int token = first / group_, head = first % group_;
    const auto* q = static_cast<const Element*>(layer_.q) + (batch_.q_starts[row] + token) * layer_.q_stride +
                    int64_t{kv_head} * group_ * batch_.k_dim;
    int position = batch_.kv_lens[row] - num_queries(row) + token;
    for (const int stop = tile.count + count; tile.count < stop; ++tile.count) {
      tile.q[tile.count] = reinterpret_cast<const char*>(q + int64_t{head} * batch_.k_dim);
      tile.first[tile.count] = layer_.window > 0 ? std::max(0, position - layer_.window + 1) : 0;
      tile.end[tile.count] = position + 1;
      if (++head == group_) {
        head = 0;
        ++position;
        q += layer_.q_stride;
      }
    }
  }

  // The result of a query: `sums` are its values' by the weights, in all `sum`, of scores above `shift`.
  void write(int row, int token, int head, const float* sums, float sum, float shift) const {
    if (layer_.sinks != nullptr) sum += std::exp2(layer_.sinks[head] * kLog2E - finite(shift));
    auto* out = static_cast<Element*>(layer_.out) + (batch_.q_starts[row] + token) * layer_.out_stride +
                int64_t{head} * batch_.v_dim;
    const float factor = 1 / sum;
    int d = 0;
    for (; d + kLanes <= batch_.v_dim; d += kLanes) store(out + d, load(sums + d) * factor);
    for (; d < batch_.v_dim; ++d) {
      if constexpr (sizeof(Element) == 4)
        out[d] = sums[d] * factor;
      else
        out[d] = to_bfloat16(sums[d] * factor);
    }
  }

  // Whether the values of `queries` are finite, before they are divided by sums of weights.
  bool all_finite(const float* sums, int queries) const {
    Words bits = {};  // of zeros and NaN; sums would wait for each other
    for (int d = 0; d < queries * v_stride_; d += kLanes) bits |= (Words)(load(sums + d) * 0.0f);
    uint32_t any = 0;
    for (int i = 0; i < kLanes; ++i) any |= bits[i];
    return any << 1 == 0;
  }

  char* scratch(int thread) const { return static_cast<char*>(batch_.workspace) + thread * sizes_.thread(); }

  // The memory for the n-th tile of a task: its queries, its results.
  char* queries(int thread, int n) const { return scratch(thread) + sizes_.kernel + n * sizes_.tile; }

  State state(int thread, int n) const {
    auto* memory = reinterpret_cast<float*>(queries(thread, n) + sizes_.queries);
    return {memory, memory + kTile * v_stride_, memory + kTile * (v_stride_ + 1)};
  }

  float* partial(int number, int head) const {
    return reinterpret_cast<float*>(partials_ + number * sizes_.partial) + head * (v_stride_ + 2);
  }

  // One block of rows that all have it.
  void run_block(const PlanRun& run, int kv_head, int thread) {
    Kernel kernel(batch_, scratch(thread));
    const int32_t* rows = plan_->numbers() + run.rows;
    const int begin = run.block * kAttentionBlock, end = begin + kAttentionBlock;
    const int count = run.num_rows * group_;
    kernel.set_block(source(rows[0], kv_head), begin, end, count);
    for (int first = 0; first < count; first += kTile) {
      Tile tile;
      for (int i = first; i < std::min(count, first + kTile); ++i)
        add_queries(tile, rows[i / group_], kv_head, i % group_, 1);
      const State now = state(thread, 0);
      kernel.set_queries(tile, count, queries(thread, 0));
      kernel.attend(tile, queries(thread, 0), begin, end, scores_, now);
      for (int i = 0; i < tile.count; ++i) {
        const int query = first + i;
        float* to = partial(run.first_partial + query / group_, kv_head * group_ + query % group_);
        std::memcpy(to, now.out + i * v_stride_, 4 * v_stride_);
        to[v_stride_] = now.shift[i];
        to[v_stride_ + 1] = now.sum[i];
      }
    }
  }

  // One token of a row, for `count` KV heads.
  void run_decode(const Task& task, int thread) {
    Kernel kernel(batch_, scratch(thread));
    const int length = batch_.kv_lens[task.row], stop_head = task.kv_head + task.count;
    const int planned = plan_ != nullptr ? plan_->rows()[task.row].num_partials : 0;
    const int position = layer_.window > 0 ? std::max(0, length - layer_.window) : 0;
    const int first_block = std::max(position / kAttentionBlock, planned);
    for (int head = task.kv_head; head < stop_head; ++head) {
      for (int first = 0; first < group_; first += kTile) {
        Tile tile;
        add_queries(tile, task.row, head, first, std::min(kTile, group_ - first));
        const State total = state(thread, 0), now = state(thread, 1);
        bool empty = true;
        for (int block = 0; block < planned; ++block, empty = false) {
          const int number = (plan_->numbers() + plan_->rows()[task.row].partials)[block];
          const float* from = partial(number, head * group_ + first);
          const State& to = empty ? total : now;
          for (int i = 0; i < tile.count; ++i) {
            to.shift[i] = from[i * (v_stride_ + 2) + v_stride_];
            to.sum[i] = from[i * (v_stride_ + 2) + v_stride_ + 1];
          }
          add(total, now, from, tile.count, empty);
        }
        kernel.set_queries(tile, group_, queries(thread, 0));
        for (int block = first_block; block * kAttentionBlock < length; ++block, empty = false) {
          const int begin = block * kAttentionBlock, end = std::min(length, begin + kAttentionBlock);
          kernel.set_block(source(task.row, head), begin, end, group_);
          const int again = first_block * kAttentionBlock;
          if (end < length)
            kernel.expect(source(task.row, head), end, std::min(kAttentionBlock, length - end));
          else if (head + 1 < stop_head)
            kernel.expect(source(task.row, head + 1), again, std::min(kAttentionBlock, length - again));
          kernel.extend(tile, queries(thread, 0), std::max(begin, tile.first[0]), end, scores_, total, now, empty);
        }
        for (int i = 0; i < tile.count; ++i)
          write(task.row, 0, head * group_ + first + i, total.out + i * v_stride_, total.sum[i], total.shift[i]);
      }
    }
  }

  // Adds a planned block, whose shifts and sums are in `now`, or already in `total` if that is empty.
  void add(const State& total, const State& now, const float* from, int count, bool empty) const {
    if (empty) {
      for (int i = 0; i < count; ++i) std::memcpy(total.out + i * v_stride_, from + i * (v_stride_ + 2), 4 * v_stride_);
      return;
    }
    const Merge merge(total, now.shift, now.sum, count);
    for (int i = 0; i < count; ++i)
      merge.add(i, v_stride_, from + i * (v_stride_ + 2), total.out + i * v_stride_);
  }

  void run_prefill(const Task& task, int thread) {
    Kernel kernel(batch_, scratch(thread));
    const KeySource keys = source(task.row, task.kv_head);
    const int num_tiles = (task.count + kTile - 1) / kTile;
    bool empty[kMaxQueries / kTile];
    Tile tiles[kMaxQueries / kTile];
    for (int n = 0; n < num_tiles; ++n) {
      add_queries(tiles[n], task.row, task.kv_head, task.first + n * kTile, std::min(kTile, task.count - n * kTile));
      kernel.set_queries(tiles[n], task.count, queries(thread, n));
      empty[n] = true;
    }
    const Tile& last_tile = tiles[num_tiles - 1];
    const int last_end = last_tile.end[last_tile.count - 1];
    const State now = state(thread, kMaxQueries / kTile);
    for (int block = tiles[0].first[0] / kAttentionBlock; block * kAttentionBlock < last_end; ++block) {
      const int begin = block * kAttentionBlock, end = std::min(last_end, begin + kAttentionBlock);
      kernel.set_block(keys, begin, end, task.count);
      if (const int left = last_end - end; left >= 32) kernel.expect(keys, end, std::min(left, kAttentionBlock));
      for (int n = 0; n < num_tiles; ++n) {
        const Tile& tile = tiles[n];
        const int from = std::max(begin, tile.first[0]), to = std::min(end, tile.end[tile.count - 1]);
        if (from >= to) continue;
        kernel.extend(tile, queries(thread, n), from, to, scores_, state(thread, n), now, empty[n]);
        empty[n] = false;
      }
    }
    int token = task.first / group_, head = task.first % group_;
    for (int n = 0; n < num_tiles; ++n) {
      const State total = state(thread, n);
      const bool finite = all_finite(total.out, tiles[n].count);
      for (int i = 0; i < tiles[n].count; ++i) {
        const float* sums = total.out + i * v_stride_;
        if (!finite && std::isfinite(total.sum[i]) && !all_finite(sums, 1)) {
          attend_alone(kernel, keys, tiles[n], i, thread, now);
          sums = now.out;  // sums of weights are the same
        }
        write(task.row, token, task.kv_head * group_ + head, sums, total.sum[i], total.shift[i]);
        if (++head == group_) {
          head = 0;
          ++token;
        }
      }
    }
  }

  // Query i of a tile once more, alone, into the first row of `total`: blocks end with the last token that it sees, so that
  // values of later ones, which are not finite, are not multiplied by its weights of 0.
  void attend_alone(Kernel& kernel, const KeySource& keys, const Tile& tile, int i, int thread, const State& total) const {
    Tile alone;
    alone.count = 1;
    alone.q[0] = tile.q[i], alone.first[0] = tile.first[i], alone.end[0] = tile.end[i];
    constexpr int kHalf = kTile / 2;  // of the rows: a kernel overwrites no more of them for one query
    const State now{total.out + kHalf * v_stride_, total.shift + kHalf, total.sum + kHalf};
    char* const query = queries(thread, kMaxQueries / kTile);
    kernel.set_queries(alone, 1, query);
    const int first_block = alone.first[0] / kAttentionBlock;
    for (int block = first_block; block * kAttentionBlock < alone.end[0]; ++block) {
      const int begin = block * kAttentionBlock, end = std::min(alone.end[0], begin + kAttentionBlock);
      kernel.set_block(keys, begin, end, 1);
      kernel.extend(alone, query, std::max(begin, alone.first[0]), end, scores_, total, now, block == first_block);
    }
  }

  const AttentionBatch& batch_;
  const AttentionLayer& layer_;
  const Sizes<Kernel> sizes_;
  const Scores scores_;
  const int group_, v_stride_;
  const Plan* plan_;
  char* partials_;
  std::vector<Task> tasks_;
};

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
using BFloat16Kernel = AmxKernel;
#elif defined(__AVX512BF16__)
using BFloat16Kernel = DotKernel;
#else
using BFloat16Kernel = VectorKernel<uint16_t>;
#endif

template <class Element>
void copy_tokens(const Element* from, int64_t from_stride, int64_t tokens, const int64_t* slots, int page_size,
                 int heads, int dim, Element* pages, int64_t page_stride, int64_t token_stride, int64_t head_stride) {
  for (int64_t t = 0; t < tokens; ++t) {
    Element* to = pages + slots[t] / page_size * page_stride + slots[t] % page_size * token_stride;
    for (int head = 0; head < heads; ++head)
      std::memcpy(to + head * head_stride, from + t * from_stride + head * dim, sizeof(Element) * dim);
  }
}

template <class Element>
void write_tokens(const AttentionBatch& b, int64_t tokens, const void* k, int64_t k_stride, const void* v,
                  int64_t v_stride, const int64_t* slots, void* k_pages, void* v_pages) {
  copy_tokens(static_cast<const Element*>(k), k_stride, tokens, slots, b.page_size, b.num_kv_heads, b.k_dim,
              static_cast<Element*>(k_pages), b.k_page_stride, b.k_token_stride, b.k_head_stride);
  copy_tokens(static_cast<const Element*>(v), v_stride, tokens, slots, b.page_size, b.num_kv_heads, b.v_dim,
              static_cast<Element*>(v_pages), b.v_page_stride, b.v_token_stride, b.v_head_stride);
}

template <class Element>
void quantize_tokens(const AttentionBatch& b, const Element* from, int64_t from_stride, int64_t tokens,
                     const int64_t* slots, int dim, int8_t* pages, int64_t page_stride, int64_t token_stride,
                     int64_t head_stride, float* scales) {
  parallel_for(tokens, [&](int64_t t, int) {
    const int64_t page = slots[t] / b.page_size, offset = slots[t] % b.page_size;
    int8_t* const to = pages + page * page_stride + offset * token_stride;
    for (int head = 0; head < b.num_kv_heads; ++head)
      scales[(page * b.num_kv_heads + head) * b.page_size + offset] =
          quantize_head(from + t * from_stride + head * dim, dim, to + head * head_stride);
  });
}

template <class Element>
void quantize_and_write(const AttentionBatch& b, int64_t tokens, const void* k, int64_t k_stride, const void* v,
                        int64_t v_stride, const int64_t* slots, void* k_pages, void* v_pages, float* k_scales,
                        float* v_scales) {
  quantize_tokens(b, static_cast<const Element*>(k), k_stride, tokens, slots, b.k_dim, static_cast<int8_t*>(k_pages),
                  b.k_page_stride, b.k_token_stride, b.k_head_stride, k_scales);
  quantize_tokens(b, static_cast<const Element*>(v), v_stride, tokens, slots, b.v_dim, static_cast<int8_t*>(v_pages),
                  b.v_page_stride, b.v_token_stride, b.v_head_stride, v_scales);
}

template <class Kernel>
int64_t workspace_bytes(const AttentionBatch& batch) {
  const Sizes<Kernel> sizes(batch);
  const auto* plan = reinterpret_cast<const Plan*>(batch.plan);
  return num_threads() * sizes.thread() + (plan != nullptr ? plan->num_partials * sizes.partial : 0);
}

}  // namespace
}  // namespace rhizome

int64_t rhizome_attention_workspace(const rhizome::AttentionBatch* batch) {
  using namespace rhizome;
  return batch->dtype == kBFloat16 ? workspace_bytes<BFloat16Kernel>(*batch)
                                   : workspace_bytes<VectorKernel<float>>(*batch);
}

void rhizome_attention(const rhizome::AttentionBatch* batch, const rhizome::AttentionLayer* layer) {
  using namespace rhizome;
  if (batch->dtype == kBFloat16)
    Attention<BFloat16Kernel, uint16_t>(*batch, *layer).run();
  else
    Attention<VectorKernel<float>, float>(*batch, *layer).run();
}

void rhizome_kv_write(const rhizome::AttentionBatch* batch, int64_t tokens, const void* k, int64_t k_stride,
                      const void* v, int64_t v_stride, const int64_t* slots, void* k_pages, void* v_pages,
                      float* k_scales, float* v_scales) {
  using namespace rhizome;
  if (batch->kv_int8 && batch->dtype == kBFloat16)
    quantize_and_write<uint16_t>(*batch, tokens, k, k_stride, v, v_stride, slots, k_pages, v_pages, k_scales, v_scales);
  else if (batch->kv_int8)
    quantize_and_write<float>(*batch, tokens, k, k_stride, v, v_stride, slots, k_pages, v_pages, k_scales, v_scales);
  else if (batch->dtype == kBFloat16)
    write_tokens<uint16_t>(*batch, tokens, k, k_stride, v, v_stride, slots, k_pages, v_pages);
  else
    write_tokens<float>(*batch, tokens, k, k_stride, v, v_stride, slots, k_pages, v_pages);
}

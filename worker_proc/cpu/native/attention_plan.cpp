#include "attention_plan.h"

#include <algorithm>
#include <vector>

#include "attention.h"
#include "parallel.h"

namespace rhizome {
namespace {

struct Run {
  int32_t block;
  std::vector<int32_t> rows;
};

int num_queries(const AttentionBatch& batch, int row) { return batch.q_starts[row + 1] - batch.q_starts[row]; }

class Planner {
 public:
  explicit Planner(const AttentionBatch& batch) : batch_(batch), done_(batch.num_rows, 0) {
    for (int row = 0; row < batch.num_rows; ++row)
      if (num_queries(batch, row) == 1) decodes_.push_back(row);
  }

  // Rows that share a block share those before it too, so the groups of a block are parts of the block before's.
  void share() {
    if (decodes_.size() > 1) share(decodes_, 0);
  }

  // Blocks of long rows become tasks of their own where rows and heads are too few to employ every thread.
  void split() {
    const int64_t tasks = int64_t{batch_.num_rows} * batch_.num_kv_heads;
    if (decodes_.size() < static_cast<size_t>(batch_.num_rows) || tasks >= 2 * num_threads()) return;
    for (const int row : decodes_)
      while (batch_.kv_lens[row] > (done_[row] + 1) * kAttentionBlock) runs_.push_back({done_[row]++, {row}});
  }

  std::vector<int32_t> write() const {
    const int rows = batch_.num_rows, num_runs = static_cast<int>(runs_.size());
    const int runs_at = 2, rows_at = runs_at + 4 * num_runs, lists_at = rows_at + 2 * rows;
    std::vector<int32_t> plan(lists_at);
    std::vector<std::vector<int32_t>> partials(rows);
    int32_t next = 0;
    for (int i = 0; i < num_runs; ++i) {
      const Run& run = runs_[i];
      int32_t* entry = &plan[runs_at + 4 * i];  // a PlanRun
      entry[0] = run.block;
      entry[1] = static_cast<int32_t>(run.rows.size());
      entry[2] = static_cast<int32_t>(plan.size());
      entry[3] = next;
      plan.insert(plan.end(), run.rows.begin(), run.rows.end());
      for (const int row : run.rows) partials[row].push_back(next++);
    }
    for (int row = 0; row < rows; ++row) {
      int32_t* entry = &plan[rows_at + 2 * row];  // a PlanRow
      entry[0] = static_cast<int32_t>(partials[row].size());
      entry[1] = static_cast<int32_t>(plan.size());
      plan.insert(plan.end(), partials[row].begin(), partials[row].end());
    }
    plan[0] = num_runs;
    plan[1] = next;
    return plan;
  }

 private:
  void share(std::vector<int32_t> rows, int block) {
    const int end = (block + 1) * kAttentionBlock;
    std::erase_if(rows, [&](int row) { return batch_.kv_lens[row] < end; });
    if (rows.size() < 2) return;
    const int first = block * kAttentionBlock / batch_.page_size;
    const int stop = (end + batch_.page_size - 1) / batch_.page_size;
    const auto pages = [&](int row) { return batch_.page_table + row * batch_.table_stride; };
    std::stable_sort(rows.begin(), rows.end(), [&](int a, int b) {
      return std::lexicographical_compare(pages(a) + first, pages(a) + stop, pages(b) + first, pages(b) + stop);
    });
    for (auto begin = rows.begin(); begin != rows.end();) {
      const auto after = std::find_if(begin + 1, rows.end(), [&](int row) {
        return !std::equal(pages(row) + first, pages(row) + stop, pages(*begin) + first);
      });
      if (after - begin > 1) {
        const std::vector<int32_t> group(begin, after);
        runs_.push_back({block, group});
        for (const int row : group) ++done_[row];
        share(group, block + 1);
      }
      begin = after;
    }
  }

  const AttentionBatch& batch_;
  std::vector<int32_t> decodes_, done_;  // done: leading blocks of a row that are in runs
  std::vector<Run> runs_;
};

}  // namespace
}  // namespace rhizome

int64_t rhizome_attention_plan(const rhizome::AttentionBatch* batch, int32_t* plan, int64_t capacity, int share) {
  using namespace rhizome;
  int64_t most = 2 + 2 * int64_t{batch->num_rows};  // the header, the rows, and six numbers for a block in its own run
  for (int row = 0; row < batch->num_rows; ++row)
    if (num_queries(*batch, row) == 1) most += 6 * int64_t{batch->kv_lens[row] / kAttentionBlock + 1};
  if (capacity < most) return most;
  Planner planner(*batch);
  if (share) planner.share();
  planner.split();
  const std::vector<int32_t> numbers = planner.write();
  std::copy(numbers.begin(), numbers.end(), plan);
  return most;
}

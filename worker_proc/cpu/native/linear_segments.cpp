#include "linear_task_segments.h"

namespace rhizome {

#if defined(RHIZOME_SEGMENTS)
void multiply_segments(const PackedMatrix& weights, const int8_t* x, int64_t x_stride, const Range& range, BeforePanel before,
                       PanelSums then) {
  const auto run = [&]<Format kFormat>(std::integral_constant<Format, kFormat>) {
    multiply_pieces<SegmentPiece<kFormat>, ByteSegments>(weights, x, x_stride, range, before, then);
  };
#if defined(RHIZOME_INT8_DOTS)
  if (weights.format == Format::kInt8Segments) return run(std::integral_constant<Format, Format::kInt8Segments>());
#endif
  if (weights.format == Format::kInt4Segments) return run(std::integral_constant<Format, Format::kInt4Segments>());
  run(std::integral_constant<Format, Format::kFloat4Segments>());
}
#endif

}  // namespace rhizome

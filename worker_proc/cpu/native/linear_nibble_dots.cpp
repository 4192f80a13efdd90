#include "linear_number_dots.h"

namespace rhizome {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
void nibble_number_dots(const NumberPlace& place, int count, const DotRows& rows, LinesAhead& ahead, bf16* plain) {
  const auto run = [&](auto of) { of(place, count, rows, ahead, plain); };
  using enum CodeZeros;
  if (is_float4(place.weights.format)) return run(group_dots<Format::kFloat4, kMiddle>);
  switch (place.weights.scale_form) {
    case ScaleForm::kFloat32:
      return run(place.weights.zeros != nullptr ? group_dots<Format::kInt4, kZeros> : group_dots<Format::kInt4, kMiddle>);
    case ScaleForm::kFloat16: return run(group_dots<Format::kInt4, kMiddle, ScaleForm::kFloat16>);
    case ScaleForm::kFactors: return run(group_dots<Format::kInt4, kBelow, ScaleForm::kFactors>);
    case ScaleForm::kLess: return run(group_dots<Format::kInt4, kBelow>);
  }
}
#endif

}  // namespace rhizome
